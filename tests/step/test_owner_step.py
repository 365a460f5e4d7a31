"""The step with owners as the unit: equality with a loop over owners, and sensitivity."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import Batch
from ownerwise.errors import OwnerwiseError
from tools.step_tools import ByRank, CountClasses, double_on_one_thread, example, flat, make_step

_double = pytest.fixture(autouse=True)(double_on_one_thread)

OWNERS = 9
SIZES = np.array([1, 3, 0, 7, 2, 50, 1, 4, 12])


def owners_of(sizes=SIZES, epsilon=(1.0, 2.0, 4.0)) -> ow.Owners:
    budgets = {number: epsilon[number % len(epsilon)] for number in range(len(sizes))}
    return ow.Owners(
        np.repeat(np.arange(len(sizes)), sizes), budgets, 1e-6, records=np.maximum(sizes, 1)
    )


@pytest.fixture(scope="module", params=["uniform", "sample", "scale", "both"])
def method(request):
    return request.param


_PLANS = {}


def owner_plan(method="scale", **options) -> ow.Plan:
    key = (method, *sorted(options.items()))
    if key not in _PLANS:
        settings = {
            "unit": "owner",
            "steps": 5,
            "batch_size": 4,
            "records_per_owner": None,
        } | options
        _PLANS[key] = ow.plan(owners_of(), method, **settings)
    return _PLANS[key]


def batch_of(inputs, targets, sizes=SIZES, left_out=()) -> Batch:
    """A batch of whole owners, made by hand."""
    owner_index = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.flatnonzero(~np.isin(owner_index, left_out))
    data = inputs[kept], targets[kept]
    return Batch(0, kept, owner_index[kept], data, by_owner=True)


def loop_over_owners(model, loss, batch, step, weights=None):
    """The weighted sum of the owners' clipped mean gradients, by autograd alone."""
    clip_norms = step.plan.clip_norms / (1 + step.slack)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters))
    inputs, targets = batch.data
    for number, owner in enumerate(np.unique(batch.owner_index)):
        rows = np.flatnonzero(batch.owner_index == owner)
        value = loss(model(inputs[rows]), targets[rows])  # the mean over the owner's records
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
        factor = min(1.0, clip_norms[owner] / float(gradient.norm()))
        total += factor * (1.0 if weights is None else weights[number]) * gradient
    return total


@pytest.mark.parametrize("kind", ["mlp", "cnn", "text", "transformer"])
@pytest.mark.parametrize("size", [None, 1, 6, 25])
def test_equals_a_loop_over_owners(kind, size):
    model, inputs, targets = example(kind, int(SIZES.sum()))
    options = ow.Performance(micro_batch_size=size)
    loss = functional.cross_entropy
    step = make_step(model, loss, plan=owner_plan(clip_norm=0.3), performance=options)
    batch = batch_of(inputs, targets)
    expected = loop_over_owners(model, loss, batch, step)
    assert torch.allclose(flat(step.clipped_sum(batch)), expected, rtol=1e-10, atol=1e-12)


def test_weights_see_the_mean_loss_of_each_owner():
    model, inputs, targets = example("mlp", int(SIZES.sum()))
    plan = owner_plan(clip_norm=0.3)
    step = make_step(model, functional.cross_entropy, plan=plan, weights=ByRank(), not_private=True)
    batch = batch_of(inputs, targets)
    present = np.unique(batch.owner_index)
    means = np.array([
        functional.cross_entropy(model(inputs[rows]), targets[rows]).item()
        for rows in (batch.owner_index == owner for owner in present)
    ])  # fmt: skip
    weights = ByRank().bind(plan).weights(means, plan.clip_norms[present], present)
    expected = loop_over_owners(model, functional.cross_entropy, batch, step, weights)
    assert torch.allclose(flat(step.clipped_sum(batch)), expected, rtol=1e-10, atol=1e-12)
    assert np.allclose(step.peek.losses, means)
    assert (step.peek.owner_index == present).all()


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.5)], ids=["plain", "ino"])
def test_removing_an_owner_moves_the_sum_by_at_most_its_clip_norm(method, weights):
    model, inputs, targets = example("mlp", int(SIZES.sum()))
    plan = owner_plan(method, clip_norm=0.05)
    step = make_step(model, functional.cross_entropy, plan=plan, weights=weights)
    whole = flat(step.clipped_sum(batch_of(inputs, targets)))
    moved = []
    for owner in np.flatnonzero(SIZES):
        without = flat(step.clipped_sum(batch_of(inputs, targets, left_out=[owner])))
        moved.append(float((whole - without).norm()) / plan.clip_norms[owner])
    assert max(moved) <= 1
    assert max(moved) > 0.9  # the bound is reached: the test can fail


def test_a_release_counts_every_owner_once():
    model, inputs, targets = example("mlp", int(SIZES.sum()))
    seen = []

    class Kept(CountClasses):
        def process(self, noised):
            seen.append(noised)
            return noised

    plan = owner_plan(release_std=30.0)
    loss = lambda outputs, targets, released, reduction="mean": functional.cross_entropy(  # noqa: E731
        outputs, targets, reduction=reduction
    )
    step = make_step(model, loss, plan=plan, release=Kept())
    batch = batch_of(inputs, targets)
    step.clipped_sum(batch)
    share = step._sums.rounding.release_slack
    sums = functional.softmax(model(inputs), dim=1).detach()
    expected = sum(sums[batch.owner_index == owner].mean(dim=0) for owner in np.flatnonzero(SIZES))
    assert torch.allclose(seen[0], expected / (1 + share), rtol=1e-9)


def test_records_drawn_for_an_owner_plan():
    rows = int(SIZES.sum())
    plan = owner_plan(records_per_owner=4)
    inputs, targets = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)
    for batch in ow.PoissonBatches((inputs, targets), plan, stream=ow.SecretStream.from_seed(3)):
        assert batch.by_owner
        owners, counts = np.unique(batch.owner_index, return_counts=True)
        assert (counts == np.minimum(SIZES[owners], 4)).all()
        assert (np.diff(batch.owner_index) >= 0).all()
        assert torch.equal(batch.data[0], inputs[batch.indices])


def test_a_batch_of_records_is_refused_under_an_owner_plan():
    model, inputs, targets = example("mlp", int(SIZES.sum()))
    step = make_step(model, functional.cross_entropy, plan=owner_plan())
    rows = batch_of(inputs, targets)
    by_record = Batch(0, rows.indices, rows.owner_index, rows.data)
    with pytest.raises(OwnerwiseError, match="samples owners"):
        step.clipped_sum(by_record)
    order = np.random.default_rng(0).permutation(len(rows))
    mixed = Batch(
        0, rows.indices[order], rows.owner_index[order],
        (inputs[order], targets[order]), by_owner=True,
    )  # fmt: skip
    with pytest.raises(OwnerwiseError, match="next to each other"):
        step.clipped_sum(mixed)


def record_plan(unit: str, sampling: str, **options) -> ow.Plan:
    settings = {"unit": unit, "sampling": sampling, "steps": 5, "batch_size": 4}
    return ow.plan(owners_of(), "scale", **{**settings, **options})


@pytest.mark.parametrize(
    ("unit", "sampling"), [("record", "record"), ("owner", "owner"), ("owner", "record")]
)
def test_only_plans_that_may_be_hardened_are_told_to(unit, sampling):
    """With unit "owner", `hardened=True` is refused, so advising it leads nowhere."""
    part = ow.Partition({"sex": ("F", "M")}, classes=3)
    gap = ow.constraints.demographic_parity(part, "sex", max_gap=0.1)
    model, inputs, targets = example("mlp", int(SIZES.sum()))
    loss = functional.cross_entropy
    plan, messages = record_plan(unit, sampling), []

    def refused(model, plan, **plugs):
        with pytest.raises(OwnerwiseError) as error:
            make_step(model, loss, plan=plan, **plugs)
        messages.append(str(error.value))

    refused(model, plan, weights=ow.INO(tail=0.5, width=0))  # a hard ranking
    refused(model.half(), plan, weights=ow.INO(tail=0.5))  # a slack above 20%
    for options in ({"hard": True}, {"temperature": 1e6}):
        constraints = ow.RateConstraints(gap, **options)
        refused(model.float(), record_plan(unit, sampling, constraints=constraints),
                release=constraints)  # fmt: skip
    trainer = ow.Trainer(
        model, plan, lr=0.1, loss=loss, weights=ow.INO(tail=0.5), progress=False, seed=0
    )
    data = 1e3 * inputs.float(), targets
    with (
        pytest.warns(ow.PrivacyWarning, match="crafted records") as warned,
        pytest.raises(OwnerwiseError, match="half precision") as error,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        trainer.fit(data)
    messages += [str(error.value), *(str(w.message) for w in warned if "crafted" in str(w.message))]
    assert len(messages) == 6
    assert [("hardened" in text) for text in messages] == [unit == "record"] * 6
