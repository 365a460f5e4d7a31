"""Numbers of a batch that a loss, a rule or a model keeps for later, without noise."""

import pytest
import torch
from torch import nn

import ownerwise as ow
from attacks.test_mixing import batch_of, cross_entropy, data_of, step_of, take_steps
from ownerwise.gradients import Refused


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        return self.layer(x) + self.shift


@pytest.mark.parametrize("micro", [None, 17])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_loss_that_writes_to_a_buffer_is_refused(micro, replaced):
    model = Shifted()

    def loss(out, y):
        if replaced:
            model.shift = out.detach().mean(0)
        else:
            model.shift.copy_(out.detach().mean(0))
        return cross_entropy(out, y)

    with pytest.raises(Refused, match="changed by the loss"):
        step_of(loss, model=model, performance=ow.Performance(micro_batch_size=micro))(
            batch_of(*data_of(60))
        )


class Keeps(ow.mechanisms.ClippingRule):
    """A clipping rule that stores norms in the model."""

    randomised = False

    def __init__(self, model):
        self.model = model

    def factors(self, norms, clip_norms, stream):
        self.model.shift.copy_(norms[:3])
        return (clip_norms / norms).clamp(max=1.0)


def test_a_rule_that_writes_to_a_buffer_is_refused():
    model = Shifted()
    with pytest.raises(Refused, match="the clipping rule"):
        step_of(cross_entropy, model=model, clipping=Keeps(model))(batch_of(*data_of(60)))


def test_a_buffer_may_change_between_steps():
    model = Shifted()
    step = step_of(cross_entropy, model=model)
    for number in range(3):
        model.shift.fill_(number)
        step(batch_of(*data_of(60), number))


class Counts(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layer, self.what, self.number = nn.Linear(5, 3), what, 0

    def forward(self, x):
        out = self.layer(x + 1e-3 * self.number)
        self.number += self.what(x)
        return out


def test_a_whole_number_computed_from_the_records_is_refused():
    for what in (lambda x: int(1e3 * x.detach().sum()), len):
        with pytest.raises(Refused, match="based on the records"):
            take_steps(step_of(cross_entropy, model=Counts(what)), *data_of(60), 3)
    take_steps(step_of(cross_entropy, model=Counts(lambda x: 1)), *data_of(60), 5)


@pytest.mark.parametrize("micro", [None, 2, 33])
def test_a_loss_that_remembers_the_largest_loss_is_refused(micro):
    largest = [1.0]

    def loss(out, y):
        losses = cross_entropy(out, y)
        largest[0] = max(largest[0], float(losses.detach().max()))
        return losses / largest[0]

    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        take_steps(
            step_of(loss, performance=ow.Performance(micro_batch_size=micro)), *data_of(60), 20
        )


def test_a_loss_that_changes_with_every_call_is_refused_for_single_records():
    average = [1.0]

    def loss(out, y):
        losses = cross_entropy(out, y)
        average[0] = 0.9 * average[0] + 0.1 * float(losses.detach().mean())
        return losses / average[0]

    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        step_of(loss, performance=ow.Performance(micro_batch_size=1))(batch_of(*data_of(60)))
