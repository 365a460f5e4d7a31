"""The Trainer: the same updates as a loop of one's own, and nothing un-noised leaves."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ownerwise as ow
from ownerwise.training import (
    Trainer,
)
from ownerwise.training.interruption import Interrupted
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


def test_the_trainer_does_what_a_loop_of_ones_own_does():
    plan, stream = tools.make_plan(), ow.SecretStream.from_seed(tools.SEED)
    model = tools.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = ow.PrivateStep(
        model, plan, optimizer, functional.cross_entropy, weights=ow.INO(), stream=stream
    )
    for batch in ow.PoissonBatches(tools.data(), plan, stream=stream):
        step(batch)
    trainer = tools.make_trainer(optimizer_options={"momentum": 0.9}, weights=ow.INO())
    run = trainer.fit(tools.data(), **tools.validation())
    assert tools.same(tools.weights_of(model), tools.weights_of(trainer.model))
    assert (run.steps_spent, run.updates) == (12, 12)
    assert (run.epsilon() <= plan.targets).all()
    assert run.epsilon().tolist() == plan.epsilon().tolist()


def test_history_is_of_validation_data_alone():
    """Pitfall 26: no training loss, no norms, no batch sizes."""
    run = tools.make_trainer().fit(
        tools.data(), **tools.validation(), test=tools.data(), test_groups=tools.task()[2]
    )
    assert [line["step"] for line in run.history] == [0, 4, 8, 12]
    assert [line["updates"] for line in run.history] == [0, 4, 8, 12]
    keys = {"step", "updates", "seconds", "learning_rate", "validation"}
    assert all(set(line) == keys for line in run.history[:-1])
    assert set(run.history[-1]) == keys | {"test"}
    seconds = [line["seconds"] for line in run.history]
    assert seconds == sorted(seconds)
    groups = run.history[-1]["validation"]["groups"]
    assert {name: group["records"] for name, group in groups.items()} == {
        "ann": 15, "bob": 15, "eve": 15,
    }  # fmt: skip
    assert sum(g["records"] for g in run.history[-1]["test"]["groups"].values()) == 120


def test_without_validation_data_lines_have_none():
    run = tools.make_trainer().fit(tools.data())
    assert [line["validation"] for line in run.history] == [None] * 4


def test_config_says_what_was_asked_for():
    trainer = tools.make_trainer(
        weights=ow.INO(tail=0.3, score_by=ow.BudgetAware(2.0)),
        clipping=ow.AutoS(),
        optimizer=torch.optim.Adam,
        optimizer_options={"betas": (0.8, 0.9)},
        schedule={"name": "cosine", "warmup": 2},
        notes={"data": "made up", "study": 3},
    )
    config = trainer.fit(tools.data(), **tools.validation()).config
    assert config == json.loads(json.dumps(config))
    assert config["label"] == "INO-SGD budget-aware"
    assert config["weights"] == {"kind": "INO", "tail": 0.3, "alpha": 1, "beta": 1, "kappa": 2}
    assert config["clipping"] == {"kind": "AutoS", "stability": 0.01}
    assert config["optimizer"] == {"name": "Adam", "lr": 0.5, "betas": [0.8, 0.9]}
    assert config["loss"] == "cross_entropy"
    assert config["data"] == "made up"
    assert config["study"] == 3
    assert config["groups_are"] == "owners"
    assert config["group_budgets"] == tools.OWNERS


def test_notes_cannot_change_what_the_trainer_says_of_itself():
    trainer = tools.make_trainer(notes={"seed": None, "not_private": ["scaling"]})
    run = trainer.fit(tools.data())
    assert run.seed == tools.SEED
    assert run.not_private == [f"fixed seed {tools.SEED}", "scaling"]


@pytest.mark.parametrize(
    ("method", "weights", "label"),
    [
        ("uniform", None, "DP-SGD"),
        ("sample", None, "IDP-SGD"),
        ("scale", None, "IDP-SGD (scale)"),
        ("sample", ow.INO(), "INO-SGD"),
        ("uniform", ow.INO(), "INO-SGD (uniform)"),
    ],
)
def test_methods_have_a_label_of_their_own(method, weights, label):
    """Runs with one label are averaged: two methods must not share one."""
    assert tools.make_trainer(plan=tools.make_plan(method=method), weights=weights).label == label


def test_groups_are_classes_if_not_given_and_classes_are_not_mistaken_for_owners():
    inputs, targets = tools.data()
    owners = ow.Owners(np.arange(120) % 3, {0: 1.0, 1: 2.0, 2: 4.0})
    plan = ow.plan(owners, steps=2, batch_size=20)
    run = tools.make_trainer(plan=plan).fit((inputs, targets), validation=(inputs, targets))
    assert run.config["groups_are"] == "classes"
    assert run.group_budgets == {}
    assert list(run.history[0]["validation"]["groups"]) == ["0", "1", "2"]
    trainer = tools.make_trainer(plan=plan, group_budgets={0: 1.0, 2: 4.0})
    run = trainer.fit((inputs, targets), validation=(inputs, targets))
    assert run.group_budgets == {"0": 1.0, "2": 4.0}


def test_where_every_record_is_an_owner_groups_are_not_owners():
    owners = ow.Owners(None, np.linspace(1, 2, 120))
    plan = ow.plan(owners, steps=2, batch_size=20)
    run = tools.make_trainer(plan=plan).fit(
        tools.data(), validation=tools.data(), validation_groups=np.arange(120) % 4
    )
    assert run.config["groups_are"] == "groups"
    assert run.group_budgets == {}


def test_a_fixed_seed_marks_the_run_and_no_seed_is_private(capfd):
    run = tools.make_trainer(progress=True).fit(tools.data(), **tools.validation())
    assert not run.private
    assert run.not_private == [f"fixed seed {tools.SEED}"]
    bar = capfd.readouterr().err
    assert "NOT PRIVATE" in bar
    assert "12/12" in bar
    assert f"accuracy {run.history[-1]['validation']['accuracy']:.3f}" in bar
    run = tools.make_trainer(seed=None, progress=True).fit(tools.data())
    assert run.private
    assert run.seed is None
    assert "NOT PRIVATE" not in capfd.readouterr().err


def test_two_private_runs_differ_and_two_with_one_seed_do_not():
    """Pitfall 28: the default randomness is secret."""

    def end(seed):
        trainer = tools.make_trainer(seed=seed)
        trainer.fit(tools.data())
        return tools.weights_of(trainer.model)

    assert tools.same(end(3), end(3))
    assert not tools.same(end(3), end(4))
    first = end(None)
    with pytest.warns(ow.errors.PrivacyWarning, match=r"already trained on owners .*\(once\)"):
        assert not tools.same(first, end(None))


def test_evaluation_changes_nothing_in_training():
    """Dropout and the modes of the model's parts are as they were, whatever is evaluated."""
    ends = []
    for every, held_out in ((1, tools.validation()), (12, {})):
        model = tools.make_model()
        model[2].eval()
        torch.manual_seed(9)
        tools.make_trainer(model=model, evaluate_every=every).fit(tools.data(), **held_out)
        assert [module.training for module in model.children()] == [True, True, False, True]
        ends.append((tools.weights_of(model), torch.random.get_rng_state()))
    assert tools.same(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


class Pairs(Dataset):
    """A Dataset of dictionaries, which a collate function makes into (x, y)."""

    def __init__(self):
        self.inputs, self.targets = tools.data()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "y": self.targets[index]}


def collate(samples):
    return torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples])


def test_arrays_that_cannot_be_written_to_are_fine():
    arrays = tuple(tensor.numpy() for tensor in tools.data())
    for array in arrays:
        array.flags.writeable = False
    trainer = tools.make_trainer()
    run = trainer.fit(arrays, validation=arrays)
    assert run.history[-1]["validation"]["accuracy"] > 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_with_collate_trains_like_arrays(num_workers):
    ends = []
    for source, options in (
        (tools.data(), {}),
        (TensorDataset(*tools.data()), {}),
        (Pairs(), {"collate": collate, "num_workers": num_workers}),
    ):
        trainer = tools.make_trainer()
        run = trainer.fit(source, validation=source, **options)
        ends.append((tools.weights_of(trainer.model), tools.timeless(run.history)))
    for end in ends[1:]:
        assert tools.same(ends[0][0], end[0])
        assert ends[0][1] == end[1]


def test_the_learning_rate_follows_the_schedule():
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    run = tools.make_trainer(optimizer=Watched, schedule=lambda step: 1 / (1 + step)).fit(
        tools.data()
    )
    assert seen == pytest.approx([0.5 / (1 + step) for step in range(12)])
    rates = [line["learning_rate"] for line in run.history]
    assert rates == pytest.approx([0.5, 0.5 / 4, 0.5 / 8, 0.5 / 12])


def test_all_problems_at_once_before_anything_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    inputs, targets = tools.data()
    trainer = Trainer(
        model,
        tools.make_plan(),
        lr=-1,
        optimizer=torch.optim.LBFGS,
        schedule="cosin",
        seed=1.5,  # pyright: ignore[reportArgumentType]
        evaluate_every=0,
        group_budgets={"ann": -1},
        loggers=["tensorbord"],
        folder=tmp_path / "run",
    )
    with pytest.raises(ow.OwnerwiseError) as caught:
        trainer.fit(
            (inputs[:100], targets),
            validation=(inputs[:10], targets[:9]),
            test=(inputs, targets),
            test_groups=["a"],
        )
    message = str(caught.value)
    for part in (
        "lr is -1", "evaluate_every is 0", "checkpoint_every is 0", "schedule is 'cosin'",
        "seed is 1.5", "group_budgets: 'ann'", "BatchNorm", "LBFGS evaluates", "100 rows",
        "10 inputs and 9 targets",
        "test_groups has shape [1]", "logger is 'tensorbord'",
    ):  # fmt: skip
        assert part in message, part
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(5, 3)}, r"the data: the model fails .* float32 \[records, 4\]; error"),
        ({"optimizer_options": {"momentun": 0.9}}, "optimizer SGD: .*momentun"),
        ({"optimizer_options": {"momentum": -1}}, "optimizer SGD: Invalid momentum"),
        ({"plan": "unowned"}, "has no owners"),
        ({"plan": "unattached"}, "owners have no records"),
        ({"plan": "releasing"}, "accounts for a release"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, change, message):
    if "plan" in change:
        owners = ow.Owners(None, tools.OWNERS, records=40)
        plans = {
            "unattached": lambda: ow.plan(owners, steps=3, batch_size=20),
            "releasing": lambda: tools.make_plan(release_std=5.0),
            "unowned": lambda: _reloaded(tmp_path),
        }
        change = {"plan": plans[change["plan"]]()}
    with pytest.raises(ow.OwnerwiseError, match=message):
        tools.make_trainer(**change).fit(tools.data())


def _reloaded(folder):
    tools.make_plan().save(folder / "plan.json")
    return ow.Plan.load(folder / "plan.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda x, y: (x,), "1 arrays; expected two"),
        (lambda x, y: (x.where(x < 2, torch.nan), y), "array 0 in the data .* NaN"),
        (lambda x, y: DataLoader(TensorDataset(x, y)), "forms its own batches"),
        (lambda x, y: (x, y.float()), r"the data: targets are float32 .*: pass y.long\(\)"),
        (lambda x, y: (x, y.where(y.cumsum(0) < 90, 17)), "the data: some targets are not classes"),
        (lambda x, y: (x.numpy(), (y + 1).numpy()), "the data: some targets are not classes"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data, message):
    with pytest.raises(ow.OwnerwiseError, match=message):
        tools.make_trainer().fit(data(*tools.data()))


def test_classes_of_validation_data_are_checked_too():
    x, y = tools.data()
    with pytest.raises(ow.OwnerwiseError, match="validation: some targets are not classes"):
        tools.make_trainer().fit((x, y), validation=(x, y.where(y.cumsum(0) < 90, 17)))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"weights": "ino"}, r"weights='ino': expected an object, such as ow.INO\(\)"),
        ({"weights": ow.INO}, r"weights=INO: expected an object, such as ow.INO\(\)"),
        ({"clipping": "auto_s"}, r"clipping='auto_s': expected an object, such as ow.AutoS\(\)"),
        ({"clipping": ow.AutoS}, r"clipping=AutoS: expected an object, such as ow.AutoS\(\)"),
        ({"optimizer": "adam"}, "optimizer='adam': expected a class, such as torch.optim.Adam"),
        (
            {"optimizer": torch.optim.Adagrad(nn.Linear(2, 2).parameters())},
            "optimizer=<Adagrad object>: expected a class, such as torch.optim.Adagrad",
        ),
        ({"loss": "crossentropy"}, "loss='crossentropy': expected a function, such as"),
        ({"loss": nn.CrossEntropyLoss}, r"loss=CrossEntropyLoss: .* CrossEntropyLoss\(\)"),
    ],
)
def test_names_and_classes_are_no_objects(option, message):
    with pytest.raises(ow.OwnerwiseError, match=message.replace(" .* ", ".*")):
        tools.make_trainer(**option).fit(tools.data())


def test_a_model_is_not_trained_twice_by_one_trainer():
    """A second pass over the data would spend every budget again."""
    trainer = tools.make_trainer()
    trainer.fit(tools.data())
    with pytest.raises(ow.OwnerwiseError, match="spend the budgets again"):
        trainer.fit(tools.data())


@pytest.fixture
def usual_ctrl_c():
    """Ctrl-C as in a terminal; a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class StopAt:
    """A logger that presses Ctrl-C when a line is written."""

    def __init__(self, step):
        self.step = step
        self.events = []

    def start(self, run):
        self.events.append("start")

    def log(self, line):
        if line["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the interpreter meets the signal here

    def finish(self, run):
        self.events.append("finish")


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_leaves_a_run_that_goes_on_bit_for_bit(tmp_path):
    whole = tools.make_trainer(folder=tmp_path / "whole")
    whole.fit(tools.data(), **tools.validation())
    stop = StopAt(4)
    trainer = tools.make_trainer(folder=tmp_path / "run", loggers=[stop], checkpoint_every=12)
    with pytest.raises(Interrupted, match=r"stopped after 4 of 12 steps.*resume=True"):
        trainer.fit(tools.data(), **tools.validation())
    assert stop.events == ["start", "finish"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert max((tmp_path / "run").glob("checkpoint-*")).name == "checkpoint-00000004.safetensors"
    again = tools.make_trainer(folder=tmp_path / "run", model=tools.make_model(seed=1))
    run = again.fit(tools.data(), **tools.validation(), resume=True)
    assert tools.same(tools.weights_of(again.model), tools.weights_of(whole.model))
    assert tools.timeless(run.history) == tools.timeless(tools.lines(tmp_path / "whole"))


def test_ctrl_c_stays_ignored_where_the_shell_ignores_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = tools.make_trainer(loggers=[StopAt(4)]).fit(tools.data())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.updates == run.plan.steps


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_in_memory_says_that_the_run_is_lost():
    with pytest.raises(KeyboardInterrupt, match="cannot be resumed") as caught:
        tools.make_trainer(loggers=[StopAt(4)]).fit(tools.data())
    assert not isinstance(caught.value, Interrupted)


def test_owners_on_both_sides_are_refused_with_unit_owner():
    owners = ow.Owners(np.arange(120), np.full(120, 4.0))
    plan = ow.plan(owners, unit="owner", steps=2, batch_size=20)
    data = tools.data()
    with pytest.raises(ow.OwnerwiseError) as caught:
        tools.make_trainer(plan=plan).fit(
            data, validation=data, validation_owners=np.arange(119, 239)
        )
    (problem,) = caught.value.problems
    assert problem.startswith("validation: owner 119 is also in the plan")
    assert "hold out whole owners (split_by 'owner')" in problem
    run = tools.make_trainer(plan=plan).fit(
        data, validation=data, validation_owners=np.arange(200, 320)
    )
    assert run.config["held_out_owners"] == {"unprotected": 120, "in_plan": 0}
    assert run.config["groups_are"] == "classes"  # no budgets are known to show results by
    assert run.history[-1]["validation"]["owners"] == 120


def test_owners_of_evaluated_records_are_checked():
    with pytest.raises(ow.OwnerwiseError) as caught:
        tools.make_trainer().fit(
            tools.data(), validation=tools.data(), validation_owners=["ann", None] * 60
        )
    (problem,) = caught.value.problems
    assert "validation_owners: no name in record 1, record 3, record 5 and 57 more" in problem
