"""Training on records with several owners: the step, batches, releases, runs and their pages."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import Batch, rows_of
from ownerwise.batches.sampler import PoissonSampler
from ownerwise.mechanisms import BudgetAware
from ownerwise.mechanisms import constraints as rates
from ownerwise.runs import Run
from ownerwise.step.closing import closing_sum
from tools.step_tools import double_on_one_thread, flat, make_step, run_steps, seeded

_double = pytest.fixture(autouse=True)(double_on_one_thread)

SETS = [("ann",)] * 6 + [("bob",)] * 9 + [("cleo",)] * 9
SETS += [("ann", "cleo")] * 5 + [("bob", "cleo")] * 7 + [("ann", "bob", "cleo")] * 4
OWNERS = ow.Owners(SETS, {"ann": 0.5, "bob": 2.0, "cleo": 8.0}, 1e-5)
INDEX = OWNERS.record_owner_index
COUNT = len(SETS)
_PLANS = {}


def plan_of(method="both", unit="owner", **options) -> ow.Plan:
    key = (method, unit, *sorted((name, str(value)) for name, value in options.items()))
    if key not in _PLANS:
        sampling = {"unit": "owner", "sampling": "record"} if unit == "owner" else {}
        _PLANS[key] = ow.plan(OWNERS, method, steps=8, batch_size=10, **sampling, **options)
    return _PLANS[key]


def least(array) -> np.ndarray:
    """The smallest value among the owners of each record."""
    names = OWNERS.ids.tolist()
    return np.array([min(array[names.index(owner)] for owner in row) for row in SETS])


def data():
    random = torch.Generator().manual_seed(0)
    return torch.randn(COUNT, 4, generator=random), torch.arange(COUNT) % 3


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "weights", [None, ow.INO(tail=0.7), ow.INO(tail=0.4, score_by=BudgetAware())]
)
@pytest.mark.parametrize("method", ["sample", "both"])
def test_the_sum_is_that_of_a_loop_over_records(method, weights):
    plan, network, (x, y) = plan_of(method), model(), data()
    step = make_step(network, functional.cross_entropy, plan=plan, weights=weights)
    found = flat(step.clipped_sum(Batch(0, np.arange(COUNT), INDEX, (x, y))))
    clip_norms, pulls = least(plan.clip_norms), least(plan.sampling_rates) * least(plan.clip_norms)
    losses = functional.cross_entropy(network(x), y, reduction="none")
    importance = np.ones(COUNT)
    if weights is not None:
        scores = np.log(losses.detach().numpy())
        if isinstance(weights.score_by, BudgetAware):
            scores = scores + np.log(pulls.max() / pulls)
        bound = weights.bind(plan)
        total = float(least(plan.sampling_rates) @ clip_norms)
        assert bound.tail_length == pytest.approx(total * weights.tail, rel=1e-9)
        importance = bound.weights_of_scores(scores, clip_norms, bound.width)
    expected = torch.zeros_like(found)
    for at in range(COUNT):
        gradient = torch.autograd.grad(losses[at], list(network.parameters()), retain_graph=True)
        vector = torch.cat([part.flatten() for part in gradient])
        factor = min(1.0, clip_norms[at] / (1 + step.slack) / float(vector.norm()))
        expected += importance[at] * factor * vector
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_shared_records_are_drawn_at_the_smallest_rate():
    """Counts over 4,000 draws, each within 6 standard deviations: false alarm below 1e-6."""
    plan, draws = plan_of("sample"), 4000
    sampler = PoissonSampler(plan.holders.sampling_rates, INDEX)
    stream = seeded().child("draws")
    counts = np.zeros(COUNT)
    for step in range(draws):
        counts[sampler.draw(stream.at_step(step))] += 1
    expected = draws * least(plan.sampling_rates)
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()
    batches = ow.PoissonBatches(data(), plan, stream=seeded())
    for batch in batches:
        assert batch.owner_index.tolist() == INDEX[batch.indices].tolist()


def test_more_shared_records_than_declared_are_refused():
    """The number of each set is what bounds a batch; the owners' own numbers would still fit."""
    declared = {("ann",): 6, ("bob",): 9, ("cleo",): 9}
    declared |= {("ann", "cleo"): 5, ("bob", "cleo"): 7, ("ann", "bob", "cleo"): 4}
    one_less, one_more = SETS[1:], [("ann", "cleo")]
    owners = ow.Owners(one_less + one_more, dict(zip(OWNERS.ids, OWNERS.epsilon, strict=True)),
                       records=declared)  # fmt: skip
    plan = ow.plan(owners, steps=5, batch_size=4)
    with pytest.raises(ow.OwnerwiseError, match=r"owner ann \+ cleo has more records than"):
        make_step(model(), functional.cross_entropy, plan=plan)
    bounded, kept = owners.bound(100)
    assert len(kept) == COUNT - 1
    make_step(model(), functional.cross_entropy, plan=ow.plan(bounded, steps=5, batch_size=4))


def test_a_histogram_counts_a_record_by_its_smallest_share():
    part = ow.Partition({"sex": ("F", "M")}, classes=3)
    constraints = ow.RateConstraints(rates.demographic_parity(part, "sex", max_gap=0.1))
    plan = plan_of("sample", unit="record", constraints=constraints)
    assert plan.release_shares is not None
    bound = constraints.bind(plan)
    mass = float(least(plan.sampling_rates) @ least(plan.release_shares))
    assert bound._mass == pytest.approx(mass)


def test_the_release_after_training_uses_the_smallest_share():
    owners = ow.Owners(SETS, {"ann": 0.02, "bob": 2.0, "cleo": 4.0}, 1e-5)
    plan = ow.plan(owners, steps=4, batch_size=8, calibration=ow.Calibration())
    assert plan.closing_shares is not None
    closing, (x, y) = ow.Calibration().bind(plan), data()
    network = model()

    def total(kept):
        from dataclasses import replace

        fewer = replace(plan, owners=owners.with_records([SETS[at] for at in kept])).verified()
        rows = rows_of((x[kept], y[kept]), len(kept), None)
        streams = [seeded(3).child(name).at_step(0) for name in ("order", "parts")]
        return closing_sum(network, fewer, closing, rows, *streams, 16).numpy()

    whole = total(np.arange(COUNT))
    for removed in range(0, COUNT, 5):
        moved = np.linalg.norm(whole - total(np.delete(np.arange(COUNT), removed)))
        assert moved <= least(plan.closing_shares)[removed] * (1 + 1e-9)


def test_a_pull_adjustment_is_refused():
    counts = np.full((3, 3), 20)
    repair = ow.PullAdjustment(counts=counts, per="owner")
    with pytest.raises(ow.OwnerwiseError, match="records of several owners"):
        ow.Trainer(
            model(), plan_of("sample", unit="record"), lr=0.1, repair=repair,
            loss=functional.cross_entropy,
        ).fit(data())  # fmt: skip


def test_an_interrupted_run_ends_like_the_uninterrupted_one(tmp_path):
    plan = plan_of(unit="record")
    results = []
    for parts in ((8,), (3, 8)):
        folder = tmp_path / str(len(parts))
        for number, steps in enumerate(parts):
            step = make_step(model(), functional.cross_entropy, plan=plan, weights=ow.INO(tail=0.5))
            run_steps(step, data(), steps, seed=5, folder=folder, restore=number > 0)
        results.append(torch.cat([p.detach().flatten() for p in step.model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_runs_and_their_pages(tmp_path, unit):
    plan = plan_of(unit=unit)
    trainer = ow.Trainer(
        model(), plan, lr=0.1, loss=functional.cross_entropy, weights=ow.INO(tail=0.5),
        folder=tmp_path / "run", progress=False,
    )  # fmt: skip
    run = trainer.fit(data(), validation=data())
    assert (run.epsilon() <= plan.targets).all()
    assert (run.owner_epsilon() >= run.epsilon()).all()
    read = Run.load(tmp_path / "run")
    assert read.plan.hash == plan.hash
    assert read.plan.shared == OWNERS.shared
    read.card(tmp_path / "CARD.md")
    read.report(tmp_path / "report.html")
    for page in ("CARD.md", "report.html"):
        assert "which owners share how many records" in (tmp_path / page).read_text()
