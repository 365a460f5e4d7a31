"""Poisson batches. Statistical tests use fixed seeds and p > 1e-6 (their false-alarm rate)."""

from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from ownerwise.batches import PoissonBatches, poisson
from ownerwise.batches.sampler import OwnerSampler, PoissonSampler, _skip
from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import (
    SecretStream,
)

ALARM = 1e-6


@dataclass
class Plan:
    """Stands in for ownerwise.planning.Plan."""

    sampling_rates: np.ndarray
    record_owner_index: np.ndarray
    steps: int
    hash: str = "stand-in"
    sampling: str = "record"
    records_per_owner: int | None = None
    hardened_rows: int | None = None

    def __post_init__(self):
        self.sampling_rates = np.asarray(self.sampling_rates, dtype=np.float64)
        self.owners = SimpleNamespace(record_owner_index=np.asarray(self.record_owner_index))
        self.holders = SimpleNamespace(
            sampling_rates=self.sampling_rates,
            elements=np.bincount(self.record_owner_index, minlength=len(self.sampling_rates)),
        )


@pytest.fixture(autouse=True)
def _stand_in_plans(monkeypatch):
    monkeypatch.setattr(poisson, "Plan", SimpleNamespace(verified=lambda plan: plan))


class Squares(Dataset):
    """A map-style Dataset whose record i is ([i, i^2], i)."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([index, index**2], dtype=torch.float64), index


def seeded(seed=1):
    return SecretStream.from_seed(seed)


def step_stream(seed=1):
    return seeded(seed).child("test").at_step(0)


def arrays(records):
    return torch.arange(2.0 * records).view(records, 2), np.arange(records, dtype=np.int32)


def drawn_matrix(rates, owner, steps, seed=1):
    """0/1 matrix [steps, records] of who was drawn when."""
    plan = Plan(rates, owner, steps)
    batches = PoissonBatches(np.zeros((len(owner), 0)), plan, stream=seeded(seed))
    drawn = np.zeros((steps, len(owner)))
    for batch in batches:
        drawn[batch.step, batch.indices] = 1
    return drawn


def two_sided(p_value):
    return min(p_value, 1 - p_value) > ALARM


def test_rates_per_owner_and_independence_of_records_and_steps():
    """Pitfalls 1 and 3: the rates are each owner's own; no draw depends on another."""
    rates = np.array([0.9, 0.31, 0.3, 0.06, 0.04, 0.02])
    owner = np.arange(60) % 6
    steps = 8000
    drawn = drawn_matrix(rates, owner, steps)
    q = rates[owner]
    std = np.sqrt(q * (1 - q))
    counts = (drawn.sum(0) - steps * q) / (np.sqrt(steps) * std)
    assert two_sided(stats.chi2.cdf((counts**2).sum(), 60))
    for number, rate in enumerate(rates):
        total = int(drawn[:, owner == number].sum())
        assert stats.binomtest(total, 10 * steps, rate).pvalue > ALARM
    scores = (drawn - q) / std
    pairs = (scores.T @ scores / np.sqrt(steps))[np.triu_indices(60, 1)]
    assert two_sided(stats.chi2.cdf((pairs**2).sum(), len(pairs)))
    lagged = scores[1:].T @ scores[:-1] / np.sqrt(steps - 1)
    assert two_sided(stats.chi2.cdf((lagged**2).sum(), lagged.size))


@pytest.mark.parametrize(
    "rates", [[0.5, 0.5, 0.5, 0.5], [0.3, 0.45, 0.27, 0.5], [1.0, 0.8, 0.2, 0.01]]
)
def test_every_subset_has_its_exact_probability(rates):
    """Pitfall 1: all 16 batches of four records, also the empty one, follow the product law."""
    sampler, stream, repeats = PoissonSampler(rates, np.arange(4)), step_stream(), 20_000
    codes = [int((1 << sampler.draw(stream)).sum()) for _ in range(repeats)]
    taken = (np.arange(16)[:, None] >> np.arange(4)) & 1
    expected = np.prod(np.where(taken, rates, 1 - np.array(rates)), axis=1)
    counts = np.bincount(codes, minlength=16)
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert stats.chisquare(counts[possible], repeats * expected[possible]).pvalue > ALARM


def test_batch_sizes_are_binomial_without_cap_or_redraw():
    """Pitfall 1: very large and empty batches come as often as they should."""
    sampler = PoissonSampler([0.004], np.zeros(500, dtype=int))
    stream, repeats = step_stream(), 20_000
    sizes = np.minimum([len(sampler.draw(stream)) for _ in range(repeats)], 8)
    expected = stats.binom.pmf(np.arange(9), 500, 0.004)
    expected[8] = stats.binom.sf(7, 500, 0.004)
    assert stats.chisquare(np.bincount(sizes, minlength=9), repeats * expected).pvalue > ALARM


def test_many_own_rates():
    """10^5 records over 12 octaves: counts per octave of rates follow the sum of their rates."""
    rates = 2.0 ** np.linspace(-12, 0, 100_001)[:-1]
    sampler, stream, steps = PoissonSampler(rates, np.arange(100_000)), step_stream(), 20
    counts = sum(np.bincount(sampler.draw(stream) // 5000, minlength=20) for _ in range(steps))
    mean = steps * rates.reshape(20, -1).sum(1)
    variance = steps * (rates * (1 - rates)).reshape(20, -1).sum(1)
    assert two_sided(stats.chi2.cdf(((counts - mean) ** 2 / variance).sum(), 20))


@pytest.mark.parametrize("rate", [1e-9, 1.01e-9, 3e-12])
def test_tiny_rates_are_honoured(rate):
    """Pitfall 6: of 10^6/rate records 10^6 are drawn (std 1000), evenly spread; float32 would draw
    none, or 60 times too many."""
    size = round(1e6 / rate)
    positions = _skip(step_stream(), size, rate)
    assert stats.poisson.cdf(len(positions), 1e6) > ALARM
    assert stats.poisson.sf(len(positions), 1e6) > ALARM
    assert stats.kstest(positions / size, "uniform").pvalue > ALARM
    assert stats.kstest(np.diff(positions) * rate, "expon").pvalue > ALARM


class _Words:
    """A stream whose first word is chosen; the rest give gaps beyond any record."""

    def __init__(self, first):
        self._first = first

    def words(self, count):
        words = np.ones(count, dtype=np.uint64)
        words[0] = self._first
        return words


def exact_chance_of_a_gap_up_to(gap, rate):
    """The share of all 2^64 words whose gap is at most `gap`, by bisection of both halves."""

    def within(word):
        first = _skip(_Words(word), gap + 2, rate)[:1]
        return len(first) == 1 and first[0] <= gap

    def bisect(low, high, test):  # the first k for which the monotone test fails
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if test(middle) else (low, middle)
        return low

    small = bisect(0, 2**63, lambda k: within(2 * k))
    large = 2**63 - bisect(0, 2**63, lambda k: not within(2 * k + 1))
    return Fraction(small + large, 2**64)


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 2.0**-24 * 1.1, 0.0123, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("gap", [0, 1, 2, 50])
def test_the_chance_of_each_gap_is_exact(gap, rate):
    """Pitfall 6: counted over all 2^64 words: the grid is 2^-64, nothing is in float32."""
    exact = 1 - (1 - Fraction(rate)) ** (gap + 1)
    error = abs(exact_chance_of_a_gap_up_to(gap, rate) - exact)
    assert error <= Fraction(1, 2**63) + Fraction(1e-15) * exact


def test_thinning_compares_all_53_bits():
    """Pitfall 6: a candidate is kept below q/p and dropped at q/p, one step of 2^-53 apart."""

    class Edge:
        def words(self, count):  # gaps of 0: every record is a candidate
            return np.zeros(count, dtype=np.uint64)

        def uniforms(self, count):
            return np.array([0.27 / 0.45 - 2.0**-53, 0.27 / 0.45, 1 - 2.0**-53])

    sampler = PoissonSampler([0.27, 0.45], np.array([0, 0, 1]))
    assert sampler.draw(Edge()).tolist() == [0, 2]


def test_tiny_rates_among_few_records():
    """Pitfall 6: one of 1,000 records of rate 1e-6 is drawn with chance 1e-3, at every place."""
    stream = step_stream()
    positions = np.concatenate([_skip(stream, 1000, 1e-6) for _ in range(100_000)])
    assert stats.binomtest(len(positions), 10**8, 1e-6).pvalue > ALARM
    assert stats.kstest(positions / 1000, "uniform").pvalue > ALARM


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(0, 50),
    st.integers(0, 2**32),
)
def test_batches_are_ascending_and_rates_zero_and_one_are_certain(rates, records, seed):
    owner = np.random.default_rng(seed).integers(len(rates), size=records)
    indices = PoissonSampler(rates, owner).draw(step_stream(seed))
    assert indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0)
    assert np.all((indices >= 0) & (indices < records))
    drawn = np.isin(np.arange(records), indices)
    q = np.array(rates)[owner]
    assert not drawn[q == 0].any()
    assert drawn[q == 1].all()


def test_a_batch_that_outgrows_its_block_is_continued():
    class Small:
        """All exponentials are tiny: every record is drawn, far more than the expected number."""

        def words(self, count):
            return np.zeros(count, dtype=np.uint64)

    assert np.array_equal(_skip(Small(), 1000, 0.001), np.arange(1000))


def test_the_rates_are_the_plans_bit_for_bit():
    """Pitfall 3: nothing like 1/len(loader) or round(1/q) is between plan and sampler."""
    plan = Plan([1 / 3, 0.1 + 1e-17, 5e-324], np.arange(3), 1)
    sampler = PoissonBatches(np.zeros(3), plan)._sampler
    assert sampler.sampling_rates.tobytes() == plan.sampling_rates.tobytes()


def test_steps_are_counted_and_step_t_plus_one_is_refused():
    """Pitfall 4: exactly the planned steps, neither cut to epochs nor run on."""
    plan = Plan([0.5], np.zeros(10, dtype=int), 7)
    assert [batch.step for batch in PoissonBatches(np.zeros(10), plan)] == list(range(7))
    part = PoissonBatches(np.zeros(10), plan, start=2, steps=3)
    assert len(part) == 3
    assert [batch.step for batch in part] == [2, 3, 4]
    with pytest.raises(StopIteration):
        next(iter(PoissonBatches(np.zeros(10), plan, start=7)))
    for start, steps in [(0, 8), (5, 3), (8, None), (-1, 2), (0, -1)]:
        with pytest.raises(OwnerwiseError, match="but the plan has only 7"):
            PoissonBatches(np.zeros(10), plan, start=start, steps=steps)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_empty_batches_are_yielded_with_shape_and_dtype(num_workers):
    """Pitfalls 5 and 7: with rate 0 every step comes, with or without workers, and has no rows."""
    plan = Plan([0.0], np.zeros(6, dtype=int), 5)
    options = {"num_workers": num_workers}
    for batches, dtype in [
        (PoissonBatches(arrays(6), plan, **options), torch.int32),
        (PoissonBatches(Squares(6), plan, **options), torch.int64),
    ]:
        all_steps = list(batches)
        assert [batch.step for batch in all_steps] == list(range(5))
        for batch in all_steps:
            x, y = batch.data
            assert len(batch) == 0
            assert x.shape == (0, 2)
            assert y.shape == (0,)
            assert y.dtype == dtype
            assert batch.owner_index.shape == batch.indices.shape == (0,)


def test_empty_batches_of_nested_collations():
    """Pitfall 7: whatever the collate function makes, tensors lose their rows and keep the rest."""
    Pair = namedtuple("Pair", "x y")

    def collate(samples):
        x = torch.stack([sample[0] for sample in samples])
        return {"pair": Pair(x, [x.int()]), "name": "squares"}

    plan = Plan([0.0], np.zeros(6, dtype=int), 1)
    (batch,) = PoissonBatches(Squares(6), plan, collate=collate)
    pair = batch.data["pair"]
    assert isinstance(pair, Pair)
    assert pair.x.shape == pair.y[0].shape == (0, 2)
    assert pair.y[0].dtype == torch.int32
    assert batch.data["name"] == "squares"


def test_rows_belong_to_the_records_and_owners_to_the_rows():
    owner = np.array([2, 0, 1] * 20)
    plan = Plan([0.2, 0.5, 0.9], owner, 20)
    x, y = arrays(60)
    for batch in PoissonBatches((x, y), plan):
        assert torch.equal(batch.data[0], x[batch.indices])
        assert np.array_equal(batch.data[1].numpy(), y[batch.indices])
        assert np.array_equal(batch.owner_index, owner[batch.indices])
        assert batch.owner_index.dtype == np.int64
        assert len(batch) == len(batch.indices)


def test_a_batch_does_not_show_its_records():
    (batch,) = PoissonBatches(np.zeros(3), Plan([1.0], np.zeros(3, dtype=int), 1))
    assert repr(batch) == "Batch(step=0)"


def equal_batches(one, other):
    return one.step == other.step and np.array_equal(one.indices, other.indices)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_neither_order_nor_content(num_workers):
    """Pitfall 5: workers fetch, never draw, drop or repeat; the global seed stays as it was."""
    plan = Plan([0.01, 0.2], np.arange(30) % 2, 12)
    plain = list(PoissonBatches(Squares(30), plan, stream=seeded()))
    state = torch.get_rng_state()
    fetched = list(PoissonBatches(Squares(30), plan, stream=seeded(), num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(fetched) == 12
    for one, other in zip(plain, fetched, strict=True):
        assert equal_batches(one, other)
        assert all(torch.equal(a, b) for a, b in zip(one.data, other.data, strict=True))
        assert np.array_equal(other.data[1].numpy(), other.indices)


def test_a_private_run_with_workers_does_not_repeat_batches():
    plan = Plan([0.5], np.zeros(64, dtype=int), 4)
    fetched = list(PoissonBatches(Squares(64), plan, num_workers=2))
    assert len({tuple(batch.indices) for batch in fetched}) == 4


def test_a_resumed_run_with_a_fixed_seed_draws_the_same_batches():
    plan = Plan([0.3, 0.02], np.arange(50) % 2, 10)
    whole = list(PoissonBatches(arrays(50), plan, stream=seeded(5)))
    resumed = list(PoissonBatches(arrays(50), plan, stream=seeded(5), start=6))
    assert all(equal_batches(*pair) for pair in zip(whole[6:], resumed, strict=True))


def test_iterating_elsewhere_changes_nothing():
    """Pitfall 8: an evaluation that walks over the same batches does not shift the training's."""
    plan = Plan([0.3], np.zeros(50, dtype=int), 10)
    undisturbed = list(PoissonBatches(arrays(50), plan, stream=seeded()))
    batches = PoissonBatches(arrays(50), plan, stream=seeded())
    next(iter(batches))
    disturbed = []
    for batch in batches:
        disturbed.append(batch)
        elsewhere = list(batches)
        assert all(equal_batches(*pair) for pair in zip(undisturbed, elsewhere, strict=True))
    assert all(equal_batches(*pair) for pair in zip(undisturbed, disturbed, strict=True))


def test_passes_and_runs_of_a_private_stream_share_nothing():
    """Pitfalls 15 and 29: each pass has a key of its own, and a stream serves one run."""
    plan = Plan([0.5], np.zeros(100, dtype=int), 3)
    stream = SecretStream()
    batches = PoissonBatches(arrays(100), plan, stream=stream)
    drawn = [tuple(batch.indices) for _ in range(3) for batch in batches]
    drawn += [tuple(batch.indices) for batch in PoissonBatches(arrays(100), plan)]
    assert len(set(drawn)) == 12
    with pytest.raises(RuntimeError, match="'sampling' of this stream is already in use"):
        PoissonBatches(arrays(100), plan, stream=stream)


def test_global_seeds_do_not_matter_and_seeds_are_told():
    """Pitfall 28."""
    plan = Plan([0.5], np.zeros(100, dtype=int), 1)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        batches = PoissonBatches(arrays(100), plan)
        assert batches.private
        drawn.append(tuple(next(iter(batches)).indices))
    assert drawn[0] != drawn[1]
    batches = PoissonBatches(arrays(100), plan, stream=seeded(3))
    assert not batches.private
    assert "NOT PRIVATE" in repr(batches)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


SQUARES = Squares(4)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (DataLoader(SQUARES, shuffle=True), "pass loader.dataset"),
        (DataLoader(SQUARES), "forms its own batches"),
        (RandomSampler(SQUARES), "chooses the records itself"),
        (BatchSampler(RandomSampler(SQUARES), 2, False), "chooses the records itself"),
        (_Stream(), "map-style Dataset"),
        (iter([1, 2, 3, 4]), "map-style Dataset"),
        ({"x": np.zeros(4)}, "by index"),
        (4, "by index"),
        ((), "empty tuple"),
        ((np.zeros(4), [1, 2, 3, 4]), "array 1 in the data is a list"),
        ((np.zeros(4), np.array(["a"] * 4)), "array 1 .* torch does not support"),
        ((np.zeros((4, 2)), np.zeros(5)), "array 1 in the data has 5 rows, .* have 4 records"),
        (np.zeros(()), "0 rows"),
        (Squares(3), "the Squares has 3 rows, .* have 4 records"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_reason_and_remedy(dataset, reason):
    """Pitfall 2: shuffled batches can never be accounted as Poisson."""
    with pytest.raises(OwnerwiseError, match=reason):
        PoissonBatches(dataset, Plan([0.5], np.zeros(4, dtype=int), 3))


def test_all_problems_of_the_data_are_listed():
    plan = Plan([0.5], np.zeros(4, dtype=int), 3)
    with pytest.raises(OwnerwiseError) as caught:
        PoissonBatches((np.zeros(3), "abcd", torch.zeros(5)), plan)
    assert len(caught.value.problems) == 3
    with pytest.raises(OwnerwiseError, match="collate= applies only to a Dataset"):
        PoissonBatches((np.zeros(4),), plan, collate=list)


@pytest.mark.parametrize("rate", [-0.1, 1.0000001, np.nan, np.inf])
def test_senseless_rates_and_owners_are_refused(rate):
    with pytest.raises(OwnerwiseError, match=r"must be in \[0, 1\]"):
        PoissonSampler([0.5, rate], np.array([0, 1]))
    with pytest.raises(OwnerwiseError, match="every record needs an owner"):
        PoissonSampler([0.5], np.array([0, -1]))


def test_tensor_datasets_and_lists_of_samples():
    plan = Plan([0.5], np.zeros(20, dtype=int), 5)
    x = torch.arange(40.0).view(20, 2)

    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)[0]

    sources = [TensorDataset(x), [(row,) for row in x], x, x.numpy()]
    for source in sources:
        for batch in PoissonBatches(source, plan):
            assert torch.equal(batch.data[0], x[batch.indices])
    for batch in PoissonBatches(Doubled(x), plan):
        assert torch.equal(batch.data, 2 * x[batch.indices])


def test_read_only_arrays_stay_as_they_are():
    x = np.arange(20.0)
    x.flags.writeable = False
    for batch in PoissonBatches((x,), Plan([0.5], np.zeros(20, dtype=int), 3)):
        batch.data[0].zero_()
    assert x[19] == 19


def test_datasets_that_fetch_many_at_once():
    class Many(Squares):
        def __getitems__(self, indices):
            return [(torch.tensor(index), index) for index in indices]

    for batch in PoissonBatches(Many(20), Plan([0.5], np.zeros(20, dtype=int), 5)):
        assert np.array_equal(batch.data[0].numpy(), batch.indices)


def test_a_plan_without_owners_of_records_is_refused():
    plan = Plan([0.5], np.zeros(2, dtype=int), 3)
    plan.owners.record_owner_index = None
    with pytest.raises(OwnerwiseError, match=r"owners\.with_records"):
        PoissonBatches(torch.zeros(2, 1), plan)
    plan.owners = None
    with pytest.raises(OwnerwiseError, match=r"Plan\.load\(path, owners=\)"):
        PoissonBatches(torch.zeros(2, 1), plan)


def test_owners_are_drawn_whole_and_independently():
    sizes = np.array([1, 5, 0, 40, 8])
    owner = np.random.default_rng(1).permutation(np.repeat(np.arange(5), sizes))
    rates = np.array([0.3, 0.7, 0.5, 0.05, 1.0])
    sampler = OwnerSampler(rates, owner, 6)
    stream, steps = SecretStream.from_seed(4), 4000
    drawn, taken = np.zeros((steps, 5), dtype=bool), np.zeros(len(owner))
    for step in range(steps):
        records = sampler.draw(stream.at_step(step))
        counts = np.bincount(owner[records], minlength=5)
        drawn[step] = counts > 0
        assert (counts[drawn[step]] == np.minimum(sizes, 6)[drawn[step]]).all()
        assert len(np.unique(records)) == len(records)
        assert (np.diff(owner[records]) >= 0).all()
        taken[records] += 1
    for number in (0, 1, 3):
        p = stats.binomtest(int(drawn[:, number].sum()), steps, rates[number]).pvalue
        assert p > ALARM
    assert drawn[:, 4].all()
    assert not drawn[:, 2].any()
    table = stats.contingency.crosstab(drawn[:, 0], drawn[:, 1]).count
    assert stats.chi2_contingency(table).pvalue > ALARM
    for number in (3, 4):  # every record of an owner is equally likely
        assert stats.chisquare(taken[owner == number]).pvalue > ALARM


def test_without_a_limit_all_records_of_a_drawn_owner_are_taken():
    owner = np.repeat([0, 1], [3, 30])
    everything = OwnerSampler(np.ones(2), owner, None).draw(SecretStream.from_seed(1).at_step(0))
    assert (everything == np.arange(33)).all()
