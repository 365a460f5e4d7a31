"""Averages of the models on the way: against a plain sum, in evaluation, and as the result."""

import pytest
import torch
from safetensors.torch import load_file

from ownerwise.errors import OwnerwiseError
from ownerwise.step import checkpoints
from ownerwise.training import (
    Trainer,
)
from ownerwise.training.averaging import Averaging
from tools import training_tools as tools


class Kept:
    """A logger that keeps the model as every step left it."""

    def __init__(self, model):
        self.model, self.models, self.lines = model, [], []

    def start(self, run):
        pass

    def log(self, line):
        self.lines.append(line)
        self.models.append(tools.weights_of(self.model))

    def finish(self, run):
        pass


def train(averaging: float | None, **options) -> tuple[Trainer, Kept]:
    model = tools.make_model()
    kept = Kept(model)
    trainer = tools.make_trainer(
        model=model,
        averaging=averaging,
        evaluate_every=1,
        loggers=[kept],
        progress=False,
        **options,
    )
    trainer.run = trainer.fit(tools.data(), **tools.validation(), test=tools.data())
    return trainer, kept


def averages(models: list[dict], decay: float) -> dict:
    """The slow way: weights of all iterates, from the recursion's definition."""
    weights = torch.ones(len(models), dtype=torch.float64)
    for number in range(1, len(models) + 1):
        new = max(1 - decay, 1 / number)
        weights[: number - 1] *= 1 - new
        weights[number - 1] = new
    assert weights.sum() == pytest.approx(1)
    return {
        name: sum(w * model[name].double() for w, model in zip(weights, models, strict=True))
        for name in models[0]
    }


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_the_result_is_the_average_of_the_plain_iterates(decay):
    _, plain = train(None)
    trainer, kept = train(decay)
    expected = averages(plain.models[1:], decay)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.allclose(tensor.double(), expected[name], atol=1e-6)
    for one, other in zip(plain.models[:-1], kept.models[:-1], strict=True):
        assert tools.same(one, other)  # training itself goes on from the iterates


def test_lines_evaluate_the_average():
    _, plain = train(None)
    _, kept = train(0.9)
    at = 7
    model = tools.make_model()
    found = averages(plain.models[1 : at + 1], 0.9)
    model.load_state_dict({name: tensor.float() for name, tensor in found.items()})
    inputs, targets = tools.validation()["validation"]
    model.eval()
    accuracy = (model(inputs).argmax(1) == targets).double().mean().item()
    assert kept.lines[at]["validation"]["accuracy"] == pytest.approx(accuracy)
    assert kept.lines[at]["validation"] != plain.lines[at]["validation"]


def test_the_last_checkpoint_holds_the_average_as_the_model(tmp_path):
    trainer, _ = train(0.9, folder=tmp_path / "run")
    stored = load_file(checkpoints.latest(tmp_path / "run"))
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(stored[f"model.{name}"], tensor)
    assert not any(name.endswith(".average") for name in stored)
    assert trainer.run.config["averaging"] == 0.9


def test_evaluating_leaves_iterates_and_averages_as_they_were():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    average = Averaging(0.75)
    with average.applied(optimizer):
        assert parameter.item() == 1  # nothing to apply yet
    for number, value in enumerate([2.0, 4.0], 1):
        parameter.data.fill_(value)
        average.update(optimizer, number)
    with average.applied(optimizer):
        assert parameter.item() == 3
    assert parameter.item() == 4
    average.finish(optimizer)
    average.finish(optimizer)
    assert parameter.item() == 3


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", float("nan")])
def test_a_decay_lies_below_one(decay):
    with pytest.raises(OwnerwiseError, match=r"averaging is .*expected a decay"):
        train(decay)
