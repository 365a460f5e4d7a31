"""Runs of several processes: one account, one folder, one history, and the run of one process."""

import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.runs import Run
from ownerwise.step import read_account
from tools import groups
from tools import training_tools as tools

pytestmark = pytest.mark.filterwarnings("ignore:this process has already:ownerwise.PrivacyWarning")


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def fitted(folder, plan, model_seed=0, **options):
    """A run of twelve steps with everything that is written, in float64."""
    x, y = tools.data()
    trainer = tools.make_trainer(
        model=make_model(model_seed), plan=plan, folder=folder, weights=ow.INO(), averaging=0.9,
        optimizer=torch.optim.Adam, **{"lr": 0.05, "progress": False, **options},
    )  # fmt: skip
    given = tools.validation()
    given["validation"] = (given["validation"][0].double(), given["validation"][1])
    run = trainer.fit((x.double(), y), **given, resume=True)
    run.report(folder / "report.html")
    run.card(folder / "CARD.md")
    return tools.weights_of(trainer.model), run.history, run.identity


class Failing(tools.NoLogger):
    def log(self, line):
        if line["step"] == 4:
            raise ZeroDivisionError


def fit_and_resume(folder, plan):
    """Every process has another model at first; the runs are seeded, private, and refused."""
    rank = torch.distributed.get_rank()
    found = {"seeded": fitted(folder / "seeded", plan, model_seed=7 * rank)}
    found["private"] = fitted(folder / "private", plan, seed=None)
    model = make_model(rank)
    messages = []
    for options in ({"lr": 0.5 if rank else 0.1}, {"lr": -1.0 if rank else 0.1}):
        with pytest.raises(ow.OwnerwiseError) as error:
            tools.make_trainer(model=model, plan=plan, **options).fit(tools.data())
        messages.append(str(error.value))
    trainer = tools.make_trainer(model=make_model(0), plan=plan, loggers=[Failing()])
    with pytest.raises((ZeroDivisionError, ow.OwnerwiseError)) as error:
        trainer.fit((tools.data()[0].double(), tools.data()[1]))
    return {**found, "messages": messages, "failed": type(error.value).__name__}


def test_two_processes_make_one_run(tmp_path):
    plan = tools.make_plan()
    found = groups.in_group(fit_and_resume, 2, tmp_path, plan)
    expected, history, _ = fitted(tmp_path / "alone", plan)
    for one in found:
        weights, lines, identity = one["seeded"]
        assert tools.same(weights, found[0]["seeded"][0])
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
        assert lines == found[0]["seeded"][1]
        for line, alone in zip(lines, history, strict=True):
            assert line["validation"]["accuracy"] == alone["validation"]["accuracy"]
        assert identity == Run.load(tmp_path / "seeded").identity
        assert tools.same(one["private"][0], found[0]["private"][0])
        assert one["messages"] == found[0]["messages"]
        assert "differ in the optimizer" in one["messages"][0]
        assert "lr is -1" in one["messages"][1]
    assert [one["failed"] for one in found] == ["ZeroDivisionError", "OwnerwiseError"]
    for name in ("seeded", "private"):
        run = Run.load(tmp_path / name)
        assert read_account(tmp_path / name).spent == run.steps_spent == plan.steps
        assert tools.timeless(tools.lines(tmp_path / name)) == tools.timeless(run.history)
        assert run.config["processes"] == 2
        assert {"report.html", "CARD.md"} < {path.name for path in (tmp_path / name).iterdir()}
    assert Run.load(tmp_path / "private").private
    resumed, _, _ = fitted(tmp_path / "seeded", plan, model_seed=3)  # by one process
    assert tools.same(resumed, found[0]["seeded"][0])
