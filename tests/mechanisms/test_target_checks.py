"""Common mistakes with data are named with the call that mends them, before anything is spent."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ownerwise.evaluation import (
    trial_problems,
)
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

X = torch.randn(40, 5)
Y = torch.arange(40) % 3
BINARY = Y % 2
BCE = functional.binary_cross_entropy_with_logits


def problems(inputs, targets, loss=functional.cross_entropy, model=None):
    return trial_problems(model or nn.Linear(5, 3), loss, (inputs, targets), None, "the data")


@pytest.mark.parametrize(
    ("inputs", "targets", "given", "call"),
    [
        (X.double(), Y, "inputs are float64 [records, 5]", "X.float()"),
        (X.long(), Y, "inputs are int64 [records, 5]", "X.float()"),
        (X.double().numpy(), Y.numpy(), "inputs are float64", "X.astype('float32')"),
        (
            X,
            Y[:, None],
            "targets are int64 [records, 1]; expected classes, int64 [records]",
            "y.squeeze(1)",
        ),
        (X, Y.int(), "targets are int32 [records]; expected classes, int64 [records]", "y.long()"),
        (X, Y.float(), "targets are float32 [records]", "y.long()"),
        (X, Y.float()[:, None], "targets are float32 [records, 1]", "y.squeeze(1).long()"),
        (X, functional.one_hot(Y), "targets are int64 [records, 3]", "y.argmax(1)"),
        (X, Y[:, None, None], "targets are int64 [records, 1, 1]", "pass y in this shape"),
    ],
)
def test_classes(inputs, targets, given, call):
    (problem,) = problems(inputs, targets)
    assert problem.startswith("the data: ")
    assert given in problem
    assert call.replace("X.astype", ".astype") in problem


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "call"),
    [
        (BCE, 1, BINARY, "pass y[:, None].float()"),
        (BCE, 1, BINARY.float(), "pass y[:, None]"),
        (BCE, 1, BINARY[:, None], "pass y.float()"),
        (nn.BCEWithLogitsLoss(), 1, BINARY, "pass y[:, None].float()"),
        (BCE, 2, BINARY.float(), "as many outputs as a record has targets"),
        (functional.mse_loss, 1, X[:, 0], "pass y[:, None]"),
        (functional.cross_entropy, 1, BINARY, "loss=binary_cross_entropy_with_logits with y[:, N"),
    ],
)
def test_shapes_of_outputs_and_targets(loss, outputs, targets, call):
    (problem,) = problems(X, targets, loss, nn.Linear(5, outputs))
    assert call in problem


def test_other_dtypes_and_shapes_of_inputs():
    (problem,) = problems(X, Y, model=nn.Embedding(4, 3))
    assert "an embedding needs int64 inputs: X.long()" in problem
    (problem,) = problems(X, Y, model=nn.Linear(5, 3).double())
    assert "a model with float64 parameters needs X.to(torch.float64)" in problem
    (problem,) = problems(X, Y, model=nn.Linear(4, 3))
    assert "inputs are float32 [records, 5]; error (not private): mat1 and mat2" in problem


class Stored(Dataset):
    """Records that are not in memory as arrays: only the first ones are tried."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return X[index], self.targets[index]


@pytest.mark.parametrize("wrong", [3, 17, -1])
@pytest.mark.parametrize("at", [0, 39])
@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss()]
)
def test_no_class_is_beyond_the_outputs_anywhere_in_the_data(wrong, at, loss):
    targets = Y.clone()
    targets[at] = wrong
    for data in ((X, targets), (X.numpy(), targets.numpy()), TensorDataset(X, targets)):
        (problem,) = trial_problems(nn.Linear(5, 3), loss, data, None, "the data")
        assert "some targets are not classes from 0 to 2" in problem
        assert "17" not in problem, "a record's class is private"
    found = trial_problems(nn.Linear(5, 3), loss, Stored(targets), None, "the data")
    assert len(found) == (at == 0)


def test_records_that_torch_would_ignore_in_silence_are_refused():
    targets = Y.clone()
    targets[30] = -100
    for loss in (functional.cross_entropy, nn.CrossEntropyLoss()):
        (problem,) = problems(X, targets, loss)
        assert "torch silently ignores" in problem
    assert not problems(X, targets, partial(functional.cross_entropy, ignore_index=-100))
    targets[30] = 9
    assert not problems(X, targets, nn.CrossEntropyLoss(ignore_index=9))


def test_ignored_tokens_are_usual():
    targets = torch.randint(0, 3, (40, 7))
    targets[:, 4:] = -100
    model = nn.Sequential(nn.Linear(5, 21), nn.Unflatten(1, (3, 7)))
    assert not problems(X, targets, model=model)
    targets[9, 2] = 3
    assert "not classes from 0 to 2" in problems(X, targets, model=model)[0]


@pytest.mark.parametrize("wrong", [-1.0, 2.0, float("nan")])
def test_binary_targets_lie_between_0_and_1(wrong):
    targets = BINARY.float()[:, None].clone()
    assert not problems(X, targets, BCE, nn.Linear(5, 1))
    targets[33] = wrong
    for given in (targets, targets.numpy()):
        (problem,) = problems(X, given, BCE, nn.Linear(5, 1))
        assert "some targets are outside the range of binary cross-entropy, 0 to 1" in problem


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (functional.cross_entropy, 3, torch.full((40, 3), 1 / 3)),
        (functional.cross_entropy, 3, Y.to(torch.uint8)),
        (functional.cross_entropy, 256, torch.full((40,), 156, dtype=torch.uint8)),
        (functional.mse_loss, 5, X.double()),
        (lambda out, y: (out[:, 0] - y).square(), 1, 100 + Y),
    ],
)
def test_matching_targets_are_accepted(loss, outputs, targets):
    assert not problems(X, targets, loss, nn.Linear(5, outputs))


def test_errors_of_other_code_are_marked():
    def broken(outputs, targets):
        raise RuntimeError(f"no rule for {int(targets[0])}")

    (problem,) = problems(X, Y, broken)
    assert re.search(r"error \(not private\): no rule for 0", problem)
