"""What leaves a private step: noise, releases, and nothing else.

Equality is shown in float64; statistical tests have fixed seeds and false-alarm rates below 1e-6.
"""

import copy

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.step.rounding import RELEASE_SLACK
from tools import step_tools as tools

cross_entropy = functional.cross_entropy


_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("size", [None, 3])
def test_a_record_that_is_not_finite_counts_as_zero(bad, kind, size):
    """Pitfall 21: the update is finite, and that of the batch without the record."""
    model, inputs, labels = tools.example(kind)
    inputs[4, 0] = bad
    rest = [i for i in range(len(inputs)) if i != 4]
    step = tools.make_step(model, cross_entropy, performance=ow.Performance(micro_batch_size=size))
    total = tools.flat(step.clipped_sum(tools.batch_of(inputs, labels)))
    without = tools.flat(step.clipped_sum(tools.batch_of(inputs[rest], labels[rest], 0, rest)))
    assert torch.isfinite(total).all()
    limit = 0.0 if not np.isfinite(bad) else float(step.plan.clip_norms[4 % 3]) * (1 + 1e-6)
    assert float((total - without).norm()) <= limit + 1e-9


def reachable_tensors(thing) -> list[Tensor | np.ndarray]:
    """Tensors and arrays in public attributes, the model's and the plan's own aside."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    values = [getattr(thing, n) for n in names if n not in ("model", "plan", "optimizer")]
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
    return [v for v in flat if isinstance(v, Tensor | np.ndarray)]


def test_nothing_of_the_records_is_kept_unless_asked_for():
    """Pitfalls 21 and 26: losses, norms and the count of bad records only with not_private=True."""
    model, inputs, labels = tools.example("mlp")
    inputs[2] = float("nan")
    plan = tools.make_plan()
    step = ow.PrivateStep(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy)
    all_rows = torch.arange(tools.RECORDS) % len(inputs)
    step(next(iter(ow.PoissonBatches((inputs[all_rows], labels[all_rows]), plan))))
    assert step.peek is None
    assert step.private
    assert "NOT PRIVATE" not in repr(step)
    assert reachable_tensors(step) == []
    assert all(p.grad is None for p in model.parameters())
    assert torch.isfinite(tools.weights_of(model)).all()

    step = tools.make_step(
        model, cross_entropy, not_private=True, performance=ow.Performance(micro_batch_size=4)
    )
    step(tools.batch_of(inputs, labels))
    assert step.peek is not None
    assert np.isfinite(step.peek.norms).sum() == 10
    assert step.peek.factors[2] == 0
    assert [len(v) for v in (step.peek.losses, step.peek.norms, step.peek.factors)] == [11] * 3
    np.testing.assert_array_equal(step.peek.owner_index, np.arange(11) % 3)
    assert repr(step.peek) == "Peek()"
    step(tools.batch_of(inputs[:0], labels[:0], 1))
    assert len(step.peek.norms) == 0


def test_private_says_whether_the_guarantee_holds():
    """Pitfall 28: a fixed seed, or peeking, marks the run."""
    model, _, _ = tools.example("mlp")

    def step(**options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ow.PrivateStep(model, tools.make_plan(), optimizer, cross_entropy, **options)

    assert step().private
    assert step(stream=ow.SecretStream()).private
    for marked in (step(stream=tools.seeded()), step(not_private=True)):
        assert not marked.private
        assert "NOT PRIVATE" in repr(marked)


class Flat(nn.Module):
    """Parameters on which the output depends, with a gradient of exactly zero."""

    def __init__(self, count, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, count, dtype=dtype))

    def forward(self, x):
        return functional.linear(x, self.weight)


@pytest.mark.parametrize("size", [None, 2])
def test_the_update_has_the_variance_of_one_draw(size):
    """Pitfalls 9, 27, 31: variance (s/B)^2, with micro-batches too.

    Chi-square test with a false-alarm rate of 1e-7, fixed seed; 60,000 numbers tell 1 draw from 2.
    """
    model, plan = Flat(20_000), tools.make_plan()
    step = tools.make_step(model, cross_entropy, performance=ow.Performance(micro_batch_size=size))
    step(tools.batch_of(torch.zeros(6, 20_000), torch.zeros(6, dtype=torch.long)))
    moves = tools.weights_of(model).numpy() / (plan.noise_std / plan.expected_batch_size)
    low, high = stats.chi2.interval(1 - 1e-7, df=moves.size)
    assert low < (moves**2).sum() < high
    assert stats.kstest(moves, "norm").pvalue > 1e-7


def test_keys_and_schedules_decide_the_noise():
    """Pitfalls 28 and 29: another key, other noise; the schedule's std of each step is used."""
    plan = tools.make_plan(noise_schedule=((2, 1.0), (4, 1.5)))
    found = {}
    for seed in (1, 2):
        model = Flat(2000)
        step = tools.make_step(model, cross_entropy, plan=plan, seed=seed)
        for number in range(4):
            before = tools.weights_of(model)
            step(tools.batch_of(torch.zeros(0, 2000), torch.zeros(0, dtype=torch.long), number))
            found[seed, number] = (before - tools.weights_of(model)) * plan.expected_batch_size
            expected = tools.noise_of(model, plan, number, seed)
            torch.testing.assert_close(found[seed, number], expected[0].flatten())
    assert not np.isclose(plan.noise_std_at(0), plan.noise_std_at(2))
    assert float(found[1, 2].std() / found[1, 0].std()) == pytest.approx(1.5, rel=0.1)
    moves = torch.stack(list(found.values()))
    assert (torch.corrcoef(moves) - torch.eye(8)).abs().max() < 0.15  # 6000 numbers: 11 sigma


def test_half_precision_models_sum_in_float32():
    """Pitfall 22: norms beyond half precision's range and sums that it would round away."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).bfloat16()
    inputs = 1e4 * torch.randn(40, 4)
    batch = tools.batch_of(inputs.bfloat16(), torch.randint(0, 3, (40,)))
    step = tools.make_step(model, cross_entropy, not_private=True)
    sums = step.clipped_sum(batch)
    assert {total.dtype for total in sums.values()} <= {torch.float32, torch.float64}
    wide = copy.deepcopy(model).double()
    exact = tools.make_step(wide, cross_entropy)
    wide_batch = tools.batch_of(batch.data[0].double(), batch.data[1])
    expected = tools.flat(exact.clipped_sum(wide_batch))
    assert float((tools.flat(sums) - expected).norm() / expected.norm()) < 0.05
    before = tools.weights_of(model)
    step(batch)
    assert step.peek is not None
    assert np.isfinite(step.peek.norms).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not torch.equal(tools.weights_of(model), before)


class Fixed(ow.mechanisms.Release):
    """A release that returns given rows, whatever the model says."""

    def __init__(self, rows):
        self.rows = rows
        self.shape = rows.shape[1:]

    def contributions(self, outputs, targets):
        return self.rows[targets]


def released_sum(rows, size=None, seed=None, release=None):
    """The release of a step whose records contribute `rows`; noised if a seed is given."""
    seen = []

    def loss(outputs, targets, released):
        seen.append(released)
        return outputs.square().sum(dim=1)

    step = tools.make_step(
        nn.Linear(2, 2), loss, plan=tools.make_plan(release_std=4.0), seed=seed or 0,
        release=release or Fixed(rows), performance=ow.Performance(micro_batch_size=size),
    )  # fmt: skip
    batch = tools.batch_of(torch.randn(len(rows), 2), torch.arange(len(rows)))
    step(batch) if seed else step.clipped_sum(batch)
    assert all(torch.equal(seen[0], other) for other in seen)
    return seen[0]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_release_is_cut_summed_and_noised(shape):
    """Pitfall 30: sensitivity 1 by brute force, and noise of the plan's release_std."""
    generator = torch.Generator().manual_seed(1)
    for case in range(40):
        rows = torch.randn(7, *shape, generator=generator) * 10.0 ** (case % 5 - 2)
        if case % 3 == 0:
            rows[2] = float("nan") if case % 2 else float("inf")
        total = released_sum(rows)
        assert torch.isfinite(total).all()
        lengths = rows.reshape(7, -1).norm(dim=1)
        if torch.isfinite(lengths).all() and (lengths <= 1).all():
            torch.testing.assert_close(total, rows.sum(dim=0) / (1 + RELEASE_SLACK))
        for out in range(7):
            rest = torch.cat([rows[:out], rows[out + 1 :]])
            assert float((total - released_sum(rest)).norm()) <= 1 + 1e-9
    rows = torch.randn(7, *shape, generator=generator)
    noise = released_sum(rows, seed=9) - released_sum(rows)
    expected = tools.release_noise(9, 0, torch.zeros(shape, dtype=torch.float64))
    torch.testing.assert_close(noise, expected, rtol=0, atol=4 * 2.0**-20)  # the sum is rounded
    torch.testing.assert_close(released_sum(rows, 3, seed=9), released_sum(rows, seed=9))


def test_a_release_with_a_total_method_is_still_clipped():
    """Only a release that says so by its class sums up by itself."""

    class WithTotal(Fixed):
        def total(self, *_):
            return self.rows.sum(dim=0)

    rows = torch.full((7, 3), 100.0)
    total = released_sum(rows, release=WithTotal(rows))
    torch.testing.assert_close(total, released_sum(rows))
    assert float(total.norm()) <= 7 * (1 + 1e-9)


def test_every_step_makes_its_release():
    """Pitfall 7: an empty batch too, and then it is noise alone."""
    seen = []

    class Remembering(tools.CountClasses):
        def bind(self, plan):
            return self

        def process(self, noised):
            seen.append(noised)
            return noised

    def loss(outputs, targets, released):
        return cross_entropy(outputs, targets, reduction="none") + released.sum() * 0

    model, inputs, labels = tools.example("mlp")
    paid = tools.make_plan(release_std=4.0)
    step = tools.make_step(model, loss, plan=paid, release=Remembering())
    for number, records in enumerate((11, 0, 5)):
        step(tools.batch_of(inputs[:records], labels[:records], number))
    assert len(seen) == 3
    drawn = [tools.release_noise(tools.SEED, number, seen[0]) for number in range(3)]
    torch.testing.assert_close(seen[1], drawn[1])
    shares = 5 / (1 + RELEASE_SLACK)  # they add up to 1 a record, less what rounding may take
    assert float((seen[2] - drawn[2]).sum()) == pytest.approx(shares, abs=1e-4)


def test_a_release_and_its_payment_belong_together():
    """Pitfall 30: refused where the plan pays for none, where none is made, and where rows lack."""
    model, inputs, labels = tools.example("mlp")
    paid = tools.make_plan(release_std=4.0)
    with pytest.raises(
        ow.OwnerwiseError, match="CountClasses was passed, but the plan does not account for"
    ):
        tools.make_step(model, cross_entropy, release=tools.CountClasses())
    with pytest.raises(ow.OwnerwiseError, match="accounts for a release, but none was passed"):
        tools.make_step(model, cross_entropy, plan=paid)

    class Summed(tools.CountClasses):
        def contributions(self, outputs, targets):
            return super().contributions(outputs, targets).sum(dim=0)

    step = tools.make_step(model, cross_entropy, plan=paid, release=Summed())
    with pytest.raises(ow.OwnerwiseError, match="the wrong number of rows"):
        step(tools.batch_of(inputs, labels))


def test_the_cost_of_a_release_is_accounted_jointly():
    """Pitfall 30: one Gaussian with multiplier (m^-2 + r^-2)^-1/2, by dp-accounting."""
    plan = tools.make_plan(release_std=4.0)
    for owner in range(3):
        joint = (plan.noise_multipliers[owner] ** -2 + 4.0**-2) ** -0.5
        event = dp_event.PoissonSampledDpEvent(
            float(plan.sampling_rates[owner]), dp_event.GaussianDpEvent(float(joint))
        )
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        accountant.compose(dp_event.SelfComposedDpEvent(event, 4))
        expected = accountant.get_epsilon(float(plan.deltas[owner]))
        assert plan.epsilon(steps=4)[owner] == pytest.approx(expected, rel=5e-3)
