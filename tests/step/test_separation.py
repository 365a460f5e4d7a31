"""The check of a loss: its pass with that of the batch, and gradients that nearly cancel."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import Chain
from ownerwise.mechanisms import constraints, per_record
from ownerwise.step.loss_separation import LossCheck
from tools import step_tools as tools


def check(loss, model, x, y, released=(), *, joint, seed=0):
    """Check a loss as the step does, with clip norm 1 and without clipping."""
    chain = Chain.of(model, x)
    outputs, losses = chain.forward(x), per_record(loss)
    stream = tools.seeded(seed).at_step(0)
    found = LossCheck(loss, losses, outputs, y, len(x), released, stream, thorough=False)
    values = losses(outputs, y, *released)
    records = chain.backward(values, also=found.joint(values) if joint else None)
    found.compare(values, lambda: records.norms, 1.0, len(x))


def by_largest(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses / losses.detach().max()


def by_gradient(outputs, targets):
    """The values are separate, but the gradients are not."""
    values = functional.cross_entropy(outputs, targets, reduction="none")
    scale = outputs.detach().abs().max()
    return values + scale * (outputs - outputs.detach()).sum(dim=1)


class Keeps:
    """Adds what it kept of the outputs of the last call, with their graph."""

    def __init__(self):
        self.kept = 0.0

    def __call__(self, outputs, targets):
        values = functional.cross_entropy(outputs, targets, reduction="none") + self.kept
        self.kept = outputs.sum()
        return values


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("loss", [by_largest, by_gradient, Keeps()])
def test_values_and_gradients_that_mix_are_found_in_one_pass_and_in_two(loss, joint):
    model, x, y = nn.Linear(4, 3), torch.randn(40, 4), torch.randint(0, 3, (40,))
    found = []
    for seed in range(20):  # half of the parts have the record that matters
        try:
            check(loss, model, x, y, joint=joint, seed=seed)
        except ow.OwnerwiseError as error:
            found.append(str(error))
    assert len(found) >= 4
    assert all("changes with the other records" in text for text in found)


@pytest.mark.parametrize("joint", [True, False])
def test_a_loss_of_each_record_passes(joint):
    model, x, y = nn.Linear(4, 3), torch.randn(40, 4), torch.randint(0, 3, (40,))
    for _ in range(5):
        check(functional.cross_entropy, model, x, y, joint=joint)


@pytest.mark.parametrize("price", [10.0, 100.0])
def test_prices_of_saturated_predictions_are_not_taken_for_mixed_records(price):
    """Their gradients nearly cancel, and what is left is rounding."""
    part = ow.Partition({"group": ("a", "b")}, classes=2)
    parity = constraints.demographic_parity(part, "group", max_gap=0.02)
    loss = ow.RateConstraints(parity).penalised(nn.functional.cross_entropy)
    model = nn.Linear(2, 2).float()
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        x = 15 * torch.randn(64, 2, generator=generator) * torch.rand(64, 1, generator=generator)
        y = torch.randint(0, 2, (64, 2), generator=generator)
        prices = price * torch.randn(2, 2, generator=generator, dtype=torch.float64)
        check(loss, model, x.float(), y, (prices,), joint=True)


def test_one_output_per_record_is_compared_too():
    """Rounding makes the comparison look at gradients of shape [records], not [records, 1]."""

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, inputs):
            return self.linear(inputs)[:, 0]

    def rounded(outputs, targets):
        return (outputs - targets) ** 2 * (1 + 1e-6 * outputs.detach().abs().max())

    step = tools.make_step(Single(), rounded)
    records = tools.batch_of(torch.randn(11, 4), torch.randn(11))
    sums = list(step.clipped_sum(records).values())
    assert all(torch.isfinite(total).all() for total in sums)
