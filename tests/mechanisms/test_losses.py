"""Losses record by record."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import never_mixes, per_record
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

torch.manual_seed(0)
LOGITS, LABELS = torch.randn(6, 4), torch.randint(0, 4, (6,))
ROWS, TARGETS = torch.randn(6, 3), torch.randn(6, 3)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (functional.cross_entropy, LOGITS, LABELS),
        (functional.cross_entropy, LOGITS, LOGITS.softmax(dim=1)),
        (partial(functional.cross_entropy, label_smoothing=0.1), LOGITS, LABELS),
        (nn.CrossEntropyLoss(), LOGITS, LABELS),
        (nn.NLLLoss(), LOGITS.log_softmax(dim=1), LABELS),
        (functional.mse_loss, ROWS, TARGETS),
        (nn.MSELoss(), ROWS, TARGETS),
        (nn.HuberLoss(), ROWS, TARGETS),
        (functional.binary_cross_entropy_with_logits, ROWS[:, 0], TARGETS[:, 0].sigmoid()),
        (nn.BCEWithLogitsLoss(), ROWS, TARGETS.sigmoid()),
        (functional.cross_entropy, torch.randn(6, 4, 5), torch.randint(0, 4, (6, 5))),
        (nn.CrossEntropyLoss(), torch.randn(6, 4, 5, 2), torch.randint(0, 4, (6, 5, 2))),
    ],
)
def test_a_torch_loss_is_that_of_each_record_alone(loss, outputs, targets):
    """One entry per record: what the loss itself says of a batch of this one record."""
    found = per_record(loss)(outputs, targets)
    alone = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(found, torch.stack(alone))


def test_the_users_loss_object_is_not_changed():
    loss = nn.CrossEntropyLoss(weight=torch.ones(4), reduction="sum")
    before = copy.deepcopy(vars(loss))
    per_record(loss)(LOGITS, LABELS)
    assert loss.reduction == "sum"
    assert set(vars(loss)) == set(before)
    assert loss(LOGITS, LABELS).dim() == 0
    loss.double()  # moved by its owner: the step's moves along
    assert per_record(loss)(LOGITS.double(), LABELS).dtype == torch.float64


def test_class_weights_multiply_and_are_not_divided_out():
    """Their sum over the batch depends on the other records, so it may not be the divisor."""
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    plain = functional.cross_entropy(LOGITS, LABELS, reduction="none")
    for loss in (nn.CrossEntropyLoss(weight), partial(functional.cross_entropy, weight=weight)):
        torch.testing.assert_close(per_record(loss)(LOGITS, LABELS), weight[LABELS] * plain)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_records_count_as_zero(ignored):
    labels = LABELS.clone()
    labels[2] = ignored
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    found = per_record(loss)(LOGITS, labels)
    assert found[2] == 0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(ignore_index=0), partial(functional.cross_entropy, ignore_index=0)],
)
def test_a_record_does_not_depend_on_how_far_its_batch_was_padded(loss):
    """Pitfall 33: ignored tokens do not count in the mean; two paddings are one record."""
    outputs, targets = torch.randn(6, 4, 5), torch.randint(1, 4, (6, 5))
    targets[1, 2:] = 0
    targets[4] = 0  # nothing but padding
    found = per_record(loss)(outputs, targets)
    wider = torch.cat([outputs, torch.randn(6, 4, 7)], dim=2)
    padded = torch.cat([targets, torch.zeros(6, 7, dtype=torch.long)], dim=1)
    torch.testing.assert_close(per_record(loss)(wider, padded), found)
    rest = [0, 1, 2, 3, 5]
    alone = torch.stack([loss(outputs[i : i + 1], targets[i : i + 1]) for i in rest])
    torch.testing.assert_close(found[rest], alone)
    assert found[4] == 0


def test_custom_losses_give_one_entry_or_row_per_record():
    found = per_record(lambda out, y: (out - y).abs())(ROWS, TARGETS)
    torch.testing.assert_close(found, (ROWS - TARGETS).abs().mean(dim=1))
    found = per_record(lambda out, y: (out - y["a"]).abs().sum(1))(
        ROWS, {"a": TARGETS, "b": LABELS}
    )
    torch.testing.assert_close(found, (ROWS - TARGETS).abs().sum(dim=1))


def test_what_is_released_is_handed_through():
    found = per_record(lambda out, y, released: (out - y).sum(1) * released)(ROWS, TARGETS, 3.0)
    torch.testing.assert_close(found, 3 * (ROWS - TARGETS).sum(dim=1))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: functional.mse_loss(out, y),
        lambda out, y: (out - y).square().sum(dim=0),
        lambda out, y: (out - y).square()[:4],
    ],
)
def test_a_reduced_loss_is_refused(loss):
    """Clipping the gradient of a mean would clip the batch, not the records."""
    with pytest.raises(ow.OwnerwiseError, match=r"expected one entry .* per record") as refusal:
        per_record(loss)(ROWS, TARGETS)
    assert not re.search(r"\d", str(refusal.value)), "numbers of rows are private"
    step = tools.make_step(nn.Linear(3, 3), loss)
    with pytest.raises(ow.OwnerwiseError, match=r"expected one entry"):
        step(tools.batch_of(ROWS, TARGETS))


def test_outputs_that_spread_over_the_targets_are_refused():
    """[B, 1] against [B] makes [B, B]: each record would be compared with all targets."""
    step = tools.make_step(nn.Linear(3, 1), functional.mse_loss)
    with pytest.raises(ow.OwnerwiseError, match=r"expected \[records, 1\].* y\[:, None\]"):
        step(tools.batch_of(ROWS, TARGETS[:, 0]))
    assert step.steps_spent == 0


def test_an_own_loss_that_spreads_outputs_over_the_targets_is_refused():
    """[B, 1] against [B] makes [B, B]: each record would be compared with all targets."""
    step = tools.make_step(nn.Linear(3, 1), lambda outputs, targets: (outputs - targets) ** 2)
    with pytest.raises(ow.OwnerwiseError, match=r"compares each record .* y\[:, None\]"):
        step(tools.batch_of(ROWS, TARGETS[:, 0]))


def test_a_frozen_parameter_of_the_loss_is_allowed():
    loss = nn.CrossEntropyLoss()
    loss.scale = nn.Parameter(torch.ones(()), requires_grad=False)
    model = nn.Linear(3, 4)
    before = model.weight.clone()
    tools.make_step(model, loss)(tools.batch_of(ROWS, LABELS))
    assert not torch.equal(model.weight, before)
    assert loss.scale.item() == 1


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])
APART = {
    "cross entropy": (functional.cross_entropy, LOGITS, LABELS),
    "probabilities": (functional.cross_entropy, LOGITS, LOGITS.softmax(dim=1)),
    "class weights": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), LOGITS, LABELS),
    "partial": (partial(functional.cross_entropy, weight=WEIGHTS), LOGITS, LABELS),
    "pixels": (nn.CrossEntropyLoss(), torch.randn(6, 4, 5), torch.randint(0, 4, (6, 5))),
    "likelihood": (nn.NLLLoss(), LOGITS.log_softmax(dim=1), LABELS),
    "squares": (functional.mse_loss, ROWS, TARGETS),
    "distances": (nn.L1Loss(), ROWS, TARGETS),
    "huber": (partial(functional.huber_loss, delta=0.5), ROWS, TARGETS),
    "smooth": (nn.SmoothL1Loss(beta=0.5), ROWS, TARGETS),
    "binary": (nn.BCEWithLogitsLoss(), ROWS, TARGETS.sigmoid()),
    "chances": (functional.binary_cross_entropy, ROWS.sigmoid(), TARGETS.sigmoid()),
}


@pytest.mark.parametrize("name", APART)
def test_losses_that_need_no_check_treat_records_separately(name):
    """Every part of a batch has the losses and gradients that it has within the batch."""
    loss, outputs, targets = APART[name]
    assert never_mixes(loss, outputs, targets)

    def run(rows):
        leaf = outputs[rows].clone().requires_grad_()
        losses = per_record(loss)(leaf, targets[rows])
        return losses.detach(), *torch.autograd.grad(losses.sum(), leaf)

    whole = run(list(range(6)))
    for part in ([0], [5, 2], [1, 3, 4], [0, 1, 2, 3, 4]):
        for within, alone in zip(whole, run(part), strict=True):
            torch.testing.assert_close(within[part], alone, rtol=1e-6, atol=1e-7)


class MixingEntropy(nn.CrossEntropyLoss):
    def forward(self, input, target):
        return super().forward(input, target) / len(input)


def hooked(kind):
    loss = nn.MSELoss()
    getattr(loss, f"register_{kind}_hook")(lambda *given: None)
    return loss


def weighted_by(weight):
    loss = nn.BCEWithLogitsLoss()
    del loss.pos_weight
    loss.pos_weight = weight
    return loss


def replaced():
    loss = nn.MSELoss()
    loss.forward = lambda out, y: (out - y).square() / len(out)
    return loss


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (lambda out, y: functional.cross_entropy(out, y, reduction="none"), LOGITS, LABELS),
        (MixingEntropy(), LOGITS, LABELS),
        (hooked("forward"), ROWS, TARGETS),
        (hooked("forward_pre"), ROWS, TARGETS),
        (hooked("full_backward"), ROWS, TARGETS),
        (replaced(), ROWS, TARGETS),
        (functional.mse_loss, ROWS[:, :1], TARGETS[:, 0]),  # torch broadcasts them
        (functional.mse_loss, torch.randn(6, 6), torch.randn(6)),
        (nn.BCELoss(weight=torch.rand(6, 1)), ROWS.sigmoid(), TARGETS.sigmoid()),  # by position
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(6, 1)), ROWS, TARGETS.sigmoid()),
        (weighted_by(torch.rand(6, 1)), ROWS, TARGETS.sigmoid()),
        (weighted_by(nn.Parameter(torch.rand(6, 1))), ROWS, TARGETS.sigmoid()),
        (partial(functional.mse_loss, weight=torch.rand(6, 1)), ROWS, TARGETS),
        (partial(functional.cross_entropy, LOGITS), LABELS, LABELS),
        (functional.kl_div, ROWS, TARGETS),
    ],
)
def test_every_other_loss_is_checked_in_every_step(loss, outputs, targets):
    assert not never_mixes(loss, outputs, targets)
