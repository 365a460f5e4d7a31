"""The private step against a plain loop over single records, and its bookkeeping.

Equality is shown in float64; the noise of a fixed seed is drawn again and subtracted.
"""

import copy
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.batches import (
    Batch,
)
from tools import step_tools as tools

cross_entropy = functional.cross_entropy


_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "text", "transformer"])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_update_is_that_of_the_loop_over_records(kind, weighted):
    """Clipping per owner, weights, noise, divisor, SGD: by a plain loop (pitfall 17)."""
    model, inputs, labels = tools.example(kind)
    plan, batch = tools.make_plan(), tools.batch_of(inputs, labels)
    plain = copy.deepcopy(model)
    losses = cross_entropy(plain(inputs), labels, reduction="none").detach().numpy()
    bound = tools.ByRank().bind(plan)
    clip_norms = plan.clip_norms[batch.owner_index]
    weights = bound.weights(losses, clip_norms, batch.owner_index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
    step = tools.make_step(
        model, cross_entropy, optimizer=optimizer, weights=tools.ByRank() if weighted else None
    )
    sums = tools.loop_over_records(plain, cross_entropy, batch, step, weights if weighted else None)
    with torch.no_grad():
        for parameter, total in zip(plain.parameters(), tools.noised(sums, plan), strict=True):
            parameter -= 0.7 * total / plan.expected_batch_size
    step(batch)
    torch.testing.assert_close(tools.weights_of(model), tools.weights_of(plain), rtol=0, atol=1e-9)


class SharedSums(nn.Module):
    """Autograd's gradients of `a` and `b` are one tensor, that of `c` is an expanded one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.c = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return functional.linear(x, self.a + self.b) + self.c.sum()


@pytest.mark.parametrize("size", [None, 4])
def test_sums_that_share_memory_get_their_own_noise(size):
    """Pitfalls 27 and 32: every parameter gets noise once, even where gradients share a tensor."""
    torch.manual_seed(0)
    model, plan = SharedSums(), tools.make_plan()
    batch = tools.batch_of(torch.randn(9, 4), torch.randint(0, 3, (9,)))
    before = tools.weights_of(model)
    step = tools.make_step(model, cross_entropy, performance=ow.Performance(micro_batch_size=size))
    sums = tools.noised(tools.loop_over_records(model, cross_entropy, batch, step), plan)
    expected = torch.cat([total.flatten() for total in sums])
    step(batch)
    moved = (before - tools.weights_of(model)) * plan.expected_batch_size
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "plug"),
    [
        *[("mlp", plug) for plug in ("none", "weights", "release", "both")],
        *[(kind, plug) for kind in ("cnn", "text", "transformer") for plug in ("none", "both")],
    ],
)
def test_any_micro_batch_size_gives_the_same_update(kind, plug):
    """Pitfall 9: ranking, release and noise are of the logical batch; no buffer is overwritten."""

    def with_release(outputs, labels, released):
        assert released.shape == (3,)
        losses = cross_entropy(outputs, labels, reduction="none")
        return losses + (outputs.softmax(dim=1) * released.tanh()).sum(dim=1)

    release = plug in ("release", "both")
    plan = tools.make_plan(release_std=4.0) if release else tools.make_plan()
    found = []
    for size in (1, 3, 7, None):
        model, inputs, labels = tools.example(kind)
        step = tools.make_step(
            model,
            with_release if release else cross_entropy,
            plan=plan,
            weights=tools.ByRank() if plug in ("weights", "both") else None,
            release=tools.CountClasses() if release else None,
            performance=ow.Performance(micro_batch_size=size),
        )
        for number in range(2):
            step(tools.batch_of(inputs, labels, number))
        found.append(tools.weights_of(model))
    for other in found[:-1]:
        torch.testing.assert_close(other, found[-1], rtol=0, atol=1e-10)


class KeepsMasks(nn.Module):
    """Dropout that remembers what it let through in each forward pass."""

    def __init__(self):
        super().__init__()
        self.dropout, self.masks = nn.Dropout(0.5), deque()  # what a list holds is dropped

    def forward(self, x):
        self.masks.append(self.dropout(torch.ones_like(x)))
        return x * self.masks[-1]


def dropout_run(size, weights=None, spoil=0):
    """Returns (weights after four steps, masks of every forward pass of the last step)."""
    torch.manual_seed(0)
    keeps = KeepsMasks()
    model = nn.Sequential(nn.Linear(4, 6), keeps, nn.Linear(6, 3))
    inputs, labels = torch.randn(9, 4), torch.randint(0, 3, (9,))
    step = tools.make_step(
        model, cross_entropy, performance=ow.Performance(micro_batch_size=size), weights=weights
    )
    for number in range(4):  # the last step has no trial run
        torch.manual_seed(spoil + number)
        torch.rand(spoil)
        keeps.masks.clear()
        before = torch.get_rng_state()
        step(tools.batch_of(inputs, labels, number))
        assert torch.equal(torch.get_rng_state(), before)
    return tools.weights_of(model), list(keeps.masks)


def test_both_passes_of_a_step_draw_the_same_dropout_masks():
    """Pitfall 9: with micro-batches the losses that rank are those of the gradients."""
    _, masks = dropout_run(3, tools.ByRank())
    assert len(masks) == 6
    for first, second in zip(masks[:3], masks[3:], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(masks[0], masks[1])
    assert len(dropout_run(None, tools.ByRank())[1]) == 1  # one forward pass where the batch fits
    assert len(dropout_run(3)[1]) == 3


@pytest.mark.parametrize("size", [None, 4])
def test_a_fixed_seed_repeats_bit_for_bit_whatever_the_global_generator(size):
    """Pitfall 29, and the global generator is left as it was (asserted in dropout_run)."""
    assert torch.equal(dropout_run(size)[0], dropout_run(size, spoil=7)[0])


def test_neighbouring_data_sets_differ_in_nothing_but_the_sum():
    """Pitfall 25: divisor, noise and number of steps are the plan's, whatever the batch holds."""
    model, inputs, labels = tools.example("mlp")
    moves = []
    for records in (11, 10, 3):
        one = copy.deepcopy(model)
        before = tools.weights_of(one)
        step = tools.make_step(one, cross_entropy)
        batch = tools.batch_of(inputs[:records], labels[:records])
        sums = tools.noised(list(step.clipped_sum(batch).values()), step.plan)
        step(batch)
        moved = (before - tools.weights_of(one)) * step.plan.expected_batch_size
        moves.append((moved, torch.cat([total.flatten() for total in sums])))
        assert step.plan.steps == 6
    for move, expected in moves:
        torch.testing.assert_close(move, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("release", [False, True])
def test_empty_batches_move_the_model_by_noise_only_and_are_accounted(release):
    """Pitfalls 7, 4, 11, 14: a run in which nothing is ever drawn; then step T + 1 is refused."""
    plan = tools.make_plan(release_std=4.0) if release else tools.make_plan()
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(
        model, cross_entropy, plan=plan, release=tools.CountClasses() if release else None
    )
    assert (step.epsilon() == 0).all()
    for number in range(plan.steps):
        before = tools.weights_of(model)
        step(tools.batch_of(inputs[:0], labels[:0], number))
        noise = torch.cat([n.flatten() for n in tools.noise_of(model, plan, number)])
        moved = (before - tools.weights_of(model)) * plan.expected_batch_size
        torch.testing.assert_close(moved, noise, rtol=0, atol=1e-12)
        assert step.steps_spent == step.updates == number + 1
        np.testing.assert_array_equal(step.epsilon(), plan.epsilon(steps=number + 1))
    before = tools.weights_of(model)
    with pytest.raises(ow.PlanError, match="all 6 planned steps have been taken"):
        step(tools.batch_of(inputs, labels, plan.steps))
    assert torch.equal(tools.weights_of(model), before)
    assert step.steps_spent == step.updates == plan.steps


def test_a_batch_of_another_step_is_refused():
    """Pitfall 4: no batch is skipped or taken twice; the refusal costs nothing."""
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy)
    before = tools.weights_of(model)
    for wrong in (1, 5):
        with pytest.raises(ow.PlanError, match=f"for step {wrong}, but the next step is 0"):
            step(tools.batch_of(inputs, labels, wrong))
    assert torch.equal(tools.weights_of(model), before)
    assert step.steps_spent == 0
    step(tools.batch_of(inputs, labels, 0))
    with pytest.raises(ow.PlanError, match="for step 0, but the next step is 1"):
        step(tools.batch_of(inputs, labels, 0))


def test_a_step_that_fails_half_way_counts_and_the_run_goes_on():
    """Pitfall 11: what may have drawn its noise is spent."""
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy)
    step(tools.batch_of(inputs, labels))
    with pytest.raises(ow.OwnerwiseError, match="rows"):
        step(Batch(1, np.arange(3), np.zeros(3, dtype=np.int64), (inputs, labels)))
    assert (step.steps_spent, step.updates) == (2, 1)
    step(tools.batch_of(inputs, labels, 2))
    assert (step.steps_spent, step.updates) == (3, 2)


class Records(Dataset):
    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_the_batches_elsewhere_changes_nothing(workers):
    """Pitfalls 5 and 8: a second pass beside the training, or workers, do not shift the steps."""
    torch.manual_seed(0)
    inputs = torch.randn(tools.RECORDS, 4)
    labels = torch.randint(0, 3, (tools.RECORDS,))
    found = []
    for disturbed in (False, True):
        model, _, _ = tools.example("mlp")
        plan, root = tools.make_plan(), tools.seeded()
        data = Records(inputs, labels) if workers and disturbed else (inputs, labels)
        batches = ow.PoissonBatches(data, plan, stream=root, num_workers=workers * disturbed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ow.PrivateStep(model, plan, optimizer, cross_entropy, stream=root)
        for batch in batches:
            step(batch)
            if disturbed:
                next(iter(ow.PoissonBatches((inputs, labels), plan, stream=tools.seeded())))
                if not workers:
                    list(batches)
        assert step.updates == plan.steps
        found.append(tools.weights_of(model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [0, 1])
def test_a_loss_that_mixes_gradients_is_refused_after_a_first_batch_of_one(first):
    """A single record cannot show it: the next batch is looked at."""

    def mixing(outputs, targets):
        extra = outputs.sum() * 100
        return cross_entropy(outputs, targets, reduction="none") + extra - extra.detach()

    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, mixing)
    if first == 1:
        step.clipped_sum(tools.batch_of(inputs[:1], labels[:1]))
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        step.clipped_sum(tools.batch_of(inputs[:3], labels[:3]))


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("plug", [None, "weights", "release"])
def test_products_are_precise_where_the_slack_assumes_it(plug, hardened):
    """A kernel that rounds to bfloat16 in large batches alone would move the losses of all."""
    kernel, seen = torch.backends.mkldnn.matmul, []
    plan = tools.make_plan(hardened=hardened, release_std=4.0 if plug == "release" else None)
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda *_: seen.append(kernel.fp32_precision))
    plugs = {"weights": tools.ByRank(), "release": tools.CountClasses()}
    loss = lambda outputs, y, *released: functional.cross_entropy(outputs, y, reduction="none")  # noqa: E731
    step = tools.make_step(model, loss, plan=plan, **({plug: plugs[plug]} if plug else {}))
    batch = tools.batch_of(torch.randn(7, 4), torch.zeros(7, dtype=torch.long))
    kernel.fp32_precision = "bf16"
    try:
        step.clipped_sum(batch)
        precise = plug is not None and not hardened
        assert seen[-1] == ("ieee" if precise else "bf16")
        assert kernel.fp32_precision == "bf16"
    finally:
        kernel.fp32_precision = "ieee"
