"""Training under constraints: they are met, lines tell of them, and a resumed run goes on."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.mechanisms import constraints as rates
from ownerwise.training import (
    Trainer,
)
from tools import step_tools
from tools import training_tools as tools

one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)
PART = ow.Partition({"sex": ("F", "M")}, classes=2)
BOUND = 0.05


@cache
def population(records=6000):
    """Two groups that differ in how often the label is 1. The last input is the group."""
    random = np.random.default_rng(1)
    sex = random.choice(["F", "M"], records, p=[0.4, 0.6])
    inputs = np.column_stack([random.normal(size=(records, 3)), sex == "M"])
    labels = (inputs @ [1, 1, 1, 1.5] + random.normal(size=records) > 0.9).astype(int)
    return torch.from_numpy(inputs).float(), labels, sex


def data(part=PART):
    inputs, labels, sex = population()
    return inputs, part.targets(labels, {"sex": sex})


@cache
def owners(individual=False):
    ids = np.arange(len(population()[1])) % 2
    return ow.Owners(ids, {0: 4.0, 1: 16.0 if individual else 4.0}, delta=1e-5)


def fair(bound=BOUND, **options):
    listed = rates.demographic_parity(PART, "sex", max_gap=bound)
    return ow.RateConstraints(listed, **{"hard": True, **options})


@cache
def make_plan(method="uniform", steps=60, **options):
    individual = owners(method != "uniform")
    options = {"steps": steps, "batch_size": 1500, "hardened": True, **options}
    return ow.plan(individual, method, constraints=fair(), **options)


def make_trainer(constraints=None, plan=None, **options):
    torch.manual_seed(0)
    constraints = constraints or fair()
    settings = {"lr": 2.0, "schedule": "linear", "seed": tools.SEED, "progress": False, **options}
    return Trainer(nn.Linear(4, 2), plan or make_plan(), constraints=constraints, **settings)


def gap(run):
    return max(abs(value) for value in run.history[-1]["validation"]["constraints"].values())


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ({}, {}),
        ({"release_noise": "laplace"}, {}),
        ({"method": "sample"}, {}),
        ({"method": "scale"}, {}),
        ({"method": "sample"}, {"weights": ow.INO(tail=0.3)}),
    ],
    ids=["gaussian", "laplace", "sample", "scale", "INO"],
)
def test_the_constraint_is_met_where_a_plain_model_breaks_it(plan, options):
    run = make_trainer(plan=make_plan(**plan), **options).fit(data(), validation=data())
    assert gap(run) < BOUND + 0.03
    if not plan:
        loose = make_trainer(fair(1.0)).fit(data(), validation=data())
        assert gap(loose) > 0.25
        accuracy = [r.history[-1]["validation"]["accuracy"] for r in (loose, run)]
        assert accuracy[1] > accuracy[0] - 0.08


def test_balanced_predictions_take_the_tilt_of_the_budgets_out():
    """Owner 0 is strict and has class 0, so the plain model predicts it too rarely."""
    random = np.random.default_rng(2)
    labels = np.repeat([0, 1], 3000)
    inputs = random.normal(size=(6000, 2)) + 0.7 * labels[:, None]
    x, part = torch.from_numpy(inputs).float(), ow.Partition({"label": (0, 1)})
    bands = ow.RateConstraints(rates.balanced_predictions(part, 0.01), damping=0.0)
    budgets = ow.Owners(labels, {0: 1.0, 1: 8.0}, delta=1e-5)
    gaps = []
    for constraints in (None, bands):
        options = {"steps": 60, "batch_size": 1500}
        plan = ow.plan(budgets, "sample", constraints=constraints, **options)
        torch.manual_seed(0)
        targets = torch.from_numpy(labels) if constraints is None else part.targets(labels)
        model = nn.Linear(2, 2)
        Trainer(model, plan, lr=2.0, seed=tools.SEED, constraints=constraints, progress=False).fit(
            (x, targets)
        )
        gaps.append(abs(float((model(x).argmax(1) == 1).float().mean()) - 0.5))
    assert gaps[0] > 0.15
    assert gaps[1] < gaps[0] / 2


def test_any_model_can_be_constrained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    trainer = Trainer(
        model, make_plan(), lr=1.0, schedule="linear", constraints=fair(), seed=3, progress=False,
        performance=ow.Performance(micro_batch_size=700),
    )  # fmt: skip
    assert gap(trainer.fit(data(), validation=data())) < BOUND + 0.05


def test_lines_of_history_hold_values_noise_and_multipliers(tmp_path):
    run = make_trainer(folder=tmp_path / "run", evaluate_every=20).fit(data(), validation=data())
    names = fair().names
    first, *rest = ow.Run.load(tmp_path / "run").history
    assert first["constraints"] is None
    for line in rest:
        for kind in ("values", "noise", "multipliers"):
            assert list(line["constraints"][kind]) == names
        assert list(line["validation"]["constraints"]) == names
    assert run.config["constraints"]["cap"] == 10.0
    assert [one["bound"] for one in run.config["constraints"]["constraints"]] == [BOUND, -BOUND]
    assert run.label == "DP-SGD constrained"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["loss"] == "cross_entropy"


def test_values_on_validation_data_are_hard_rates():
    trainer = make_trainer()
    run = trainer.fit(data(), validation=data())
    inputs, _, sex = population()
    predicted = trainer.model(inputs).argmax(dim=1).numpy()
    expected = predicted[sex == "F"].mean() - predicted[sex == "M"].mean()
    for value in run.history[-1]["validation"]["constraints"].values():
        assert value == pytest.approx(expected)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, noise):
    """Multipliers and smoothed denominators come back from the checkpoint."""
    plan = make_plan(steps=12, release_noise=noise)

    class Stop(Exception):
        pass

    class Stopping:
        def start(self, run): ...

        def finish(self, run): ...

        def log(self, line):
            if line["step"] == 8:
                raise Stop

    def trainer(folder, **options):
        return make_trainer(plan=plan, folder=folder, evaluate_every=4, **options)

    whole = trainer(tmp_path / "whole")
    whole.fit(data(), validation=data())
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", loggers=[Stopping()]).fit(data(), validation=data())
    again = trainer(tmp_path / "cut")
    again.fit(data(), validation=data(), resume=True)
    assert tools.same(tools.weights_of(whole.model), tools.weights_of(again.model))
    histories = [ow.Run.load(tmp_path / name).history for name in ("whole", "cut")]
    assert tools.timeless(histories[0]) == tools.timeless(histories[1])


def test_everything_wrong_is_listed_before_training():
    inputs, labels, _ = population()
    unpaid = ow.plan(owners(), "uniform", steps=5, batch_size=100)
    with pytest.raises(
        ow.OwnerwiseError, match=r"does not account for a release: .*constraints=\)"
    ):
        make_trainer(plan=unpaid).fit(data())
    torch.manual_seed(0)
    with pytest.raises(
        ow.OwnerwiseError, match=r"accounts for a release, but none was passed: .* constraints=\)"
    ):
        Trainer(nn.Linear(4, 2), make_plan(), lr=1.0).fit((inputs, torch.from_numpy(labels)))
    with pytest.raises(ow.OwnerwiseError, match="the data: some targets are not classes from"):
        make_trainer().fit((inputs, data()[1] + torch.tensor([1, 0])))
    with pytest.raises(ow.OwnerwiseError, match=r"some records have a cell outside .* 0 to"):
        make_trainer().fit((inputs, data()[1] + torch.tensor([0, 5])))
    with pytest.raises(ow.OwnerwiseError, match="class and cell"):
        make_trainer().fit((inputs, torch.from_numpy(labels)))
    with pytest.raises(ow.OwnerwiseError, match=r"validation: .* class and cell"):
        make_trainer().fit(data(), validation=(inputs, torch.from_numpy(labels)))
