"""Validation figures by group, against figures made by hand."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.evaluation import (
    Evaluation,
)
from ownerwise.evaluation import metrics as evaluation


class Fixed(nn.Module):
    """A model whose outputs are its inputs."""

    def forward(self, inputs):
        return inputs


COPIES = 10  # groups with fewer records are left out
OUTPUTS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 4.0], [0.0, 1.0]])
OUTPUTS, TARGETS = OUTPUTS.repeat(COPIES, 1), torch.tensor([0, 1, 1, 0, 1]).repeat(COPIES)


def test_figures_against_a_count_by_hand():
    groups = ["a", "a", "b", "b", "b"] * COPIES
    found = Evaluation((OUTPUTS, TARGETS), groups)(Fixed(), functional.cross_entropy)
    losses = functional.cross_entropy(OUTPUTS.double(), TARGETS, reduction="none")
    assert found["accuracy"] == 0.6
    assert found["balanced_accuracy"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["worst_group"] == {"name": "b", "recall": pytest.approx(1 / 3)}
    assert found["spread"] == pytest.approx(np.std([1, 1 / 3]))
    assert found["loss"] == pytest.approx(float(losses.mean()))
    assert found["groups"] == {
        "a": {"loss": pytest.approx(float(losses[:2].mean())), "recall": 1.0, "records": 20},
        "b": {"loss": pytest.approx(float(losses[2:5].mean())), "recall": 1 / 3, "records": 30},
    }


def test_classes_are_the_groups_if_none_are_given_in_numeric_order():
    targets = torch.arange(12).repeat(COPIES)
    found = Evaluation((torch.eye(12).repeat(COPIES, 1), targets))(
        Fixed(), functional.cross_entropy
    )
    assert list(found["groups"]) == [str(number) for number in range(12)]
    assert found["accuracy"] == found["balanced_accuracy"] == 1.0


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_a_single_output_is_a_logit(shape):
    outputs = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5]).repeat(COPIES).reshape(shape)
    targets = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0]).repeat(COPIES).reshape(shape)
    loss = functional.binary_cross_entropy_with_logits
    found = Evaluation((outputs, targets))(Fixed(), loss)
    assert found["accuracy"] == 0.8
    assert list(found["groups"]) == ["0", "1"]


def test_the_size_of_the_parts_does_not_change_the_result(monkeypatch):
    whole = Evaluation((OUTPUTS, TARGETS))(Fixed(), functional.cross_entropy)
    monkeypatch.setattr(evaluation, "_RECORDS_AT_ONCE", 2)
    assert Evaluation((OUTPUTS, TARGETS))(Fixed(), functional.cross_entropy) == whole
    arrays = (OUTPUTS.numpy(), TARGETS.numpy())
    assert Evaluation(arrays)(Fixed(), functional.cross_entropy) == whole


def test_a_loss_that_is_not_finite_is_none_as_json_asks():
    found = Evaluation((OUTPUTS * torch.inf, TARGETS))(Fixed(), functional.cross_entropy)
    assert found["loss"] is None
    assert found["groups"]["0"]["loss"] is None


def test_the_model_is_in_evaluation_mode_and_put_back_after_an_error():
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9).eval())
    first = Evaluation((OUTPUTS, TARGETS))(model, functional.cross_entropy)
    assert first == Evaluation((OUTPUTS, TARGETS))(Fixed(), functional.cross_entropy)
    assert [module.training for module in model] == [True, False]
    with pytest.raises(RuntimeError):
        Evaluation((OUTPUTS, TARGETS.bool()))(model, functional.cross_entropy)
    assert [module.training for module in model] == [True, False]


class Some(Dataset):
    """A Dataset of any length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return OUTPUTS[index], TARGETS[index]


@pytest.mark.parametrize(
    ("data", "groups", "message"),
    [
        ((OUTPUTS,), None, "tuple of Tensor; expected two arrays"),
        ((OUTPUTS, [0, 1]), None, "tuple of Tensor, list"),
        ((), None, "tuple of nothing"),
        ((OUTPUTS, TARGETS[:3]), None, "50 inputs and 3 targets"),
        ((OUTPUTS[:0], TARGETS[:0]), None, "0 inputs and 0 targets"),
        (torch.utils.data.DataLoader(Some(5)), None, "is a DataLoader"),
        (None, ["a"], "is a NoneType"),
        (Some(0), None, "no records"),
        ((OUTPUTS, TARGETS), ["a", "b"], "check_groups has shape [2] for 50 records"),
    ],
)
def test_data_that_cannot_be_evaluated_is_explained(data, groups, message):
    (problem,) = Evaluation(data, groups).problems("check")
    assert message in problem


def test_data_in_order_has_no_problems():
    for data in ((OUTPUTS, TARGETS), (OUTPUTS.numpy(), TARGETS.numpy()), Some(50)):
        given = Evaluation(data, ["a"] * 50)
        assert not given.problems("check")
        assert not given.trial_problems(Fixed(), functional.cross_entropy, "check")


def test_outputs_that_are_no_classes_need_a_rule():
    sequences = torch.randn(5, 3, 7)
    targets = torch.zeros(5, 7, dtype=torch.long)
    given = Evaluation((sequences, targets))
    (problem,) = given.trial_problems(Fixed(), functional.cross_entropy, "validation")
    assert "pass predict=" in problem
    with pytest.raises(ow.OwnerwiseError, match="pass predict="):
        given(Fixed(), functional.cross_entropy)
    above = Evaluation((OUTPUTS, TARGETS), predict=lambda outputs: (outputs[:, 1] > 3).long())
    assert above(Fixed(), functional.cross_entropy)["accuracy"] == 0.2
