"""A mistake gets the same sentence from every front end: calls, commands, files and the estimator.

The sentences may differ in two places: where the value stands (a mapping, a row of a file, or a
section of a configuration), and the hint that names what the user of this front end can write. Both
are replaced before comparing. A front end is left out of a row if its users cannot make the
mistake: `ownerwise plan` reads no records and trains no model, and the estimator reads no files,
ignores owners without records and takes few settings.
"""

import csv
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.config import prepare_run
from ownerwise.config.reading import make_config
from ownerwise.estimators import PrivateClassifier
from ownerwise.mechanisms import CLIPPING_RULES, WEIGHTS

EPSILON = "expected a positive, finite number (typically 0.1 to 10)"
DELTA = "expected a number above 0 and below 1, well below 1/records (typically 1e-5)"
COUNT = "expected a whole number of at least 1, or 0 for a plan with unit='owner'"
COLUMNS = (
    "expected owner, epsilon and, optionally, delta and records, each once: rename or remove "
    "columns"
)
ALIKE = (
    r"SOURCE: owner ids 'Zo\xeb' and 'Zo\xeb\u200b' look the same but differ in invisible "
    "characters, spaces or Unicode form; expected one spelling per owner: correct the ids"
)

HINTS = {
    "API": {
        "record_owner": "IDS",
        "pass levels={'high': 0.5, ...}": "LEVELS",
        "declare the numbers of records with records=": "RECORDS",
    },
    "command line": {"pass --level NAME=EPSILON": "LEVELS", "add a records column": "RECORDS"},
    "configuration": {
        "the data": "IDS",
        "column who": "IDS",
        "set owners.levels = { high = 0.5, ... }": "LEVELS",
        "set owners.budgets to a file with a records column": "RECORDS",
    },
    "estimator": {"owners": "IDS", "the estimators accept only numbers": "LEVELS"},
}


@dataclass(frozen=True)
class Mistake:
    """Budgets by owner and the owners of the records, and what every front end says about them."""

    says: tuple[str, ...]
    epsilon: dict[str, Any] = field(default_factory=lambda: {"ann": 1.0, "bob": 2.0})
    delta: dict[str, float] | float = 1e-5
    record_owner: tuple = ("ann", "bob")
    file: str | None = None
    """The file, if it cannot be written from the mappings."""
    without: tuple[str, ...] = ()
    """Front ends whose users cannot make the mistake."""

    def write(self, path):
        """Write the table of budgets; a single delta is passed as an argument instead."""
        header, columns = ["owner", "epsilon"], [self.epsilon, self.epsilon.values()]
        if isinstance(self.delta, dict):
            header, columns = [*header, "delta"], [*columns, self.delta.values()]
        with path.open("w", encoding="utf-8", newline="") as out:
            if self.file is None:
                csv.writer(out).writerows([header, *zip(*columns, strict=True)])
            else:
                out.write(self.file)
        return path

    @property
    def other_delta(self):
        """The delta for owners whose row has none."""
        return None if isinstance(self.delta, dict) else self.delta


def by_epsilon(value, shown, expected=EPSILON):
    return Mistake((f"epsilon of owner bob ({shown}): {expected}",), {"ann": 1.0, "bob": value})


def by_delta(value):
    says = f"delta of owner bob ({value!r}): {DELTA}"
    # a configuration holds one delta for all; deltas of owners are in a file
    return Mistake((says,), delta={"ann": 1e-5, "bob": value}, without=("configuration, mapping",))


def in_file(text, *says):
    return Mistake(says, file=text, without=("API, mapping", "configuration, mapping", "estimator"))


MISTAKES = {
    "unknown owner": Mistake(
        ("no budget for owner cem; add a budget, or leave out their records",),
        record_owner=("ann", "bob", "cem"),
        without=("command line",),
    ),
    "missing owner": Mistake(
        ("owner without records: bob has a budget but no records; remove the owner, or RECORDS",),
        record_owner=("ann", "ann"),
        without=("command line", "estimator"),
    ),
    "ids of another type": Mistake(
        (
            "owner ids are int in IDS (such as 1) and str in the budgets (such as 'ann'); "
            "expected the same type in both: convert those in IDS to str",
        ),
        record_owner=(1, 2),
        # keys in TOML are text, so the configuration has a sentence of its own for them
        without=("command line", "configuration, mapping"),
    ),
    "record without an id": Mistake(
        (
            "SOURCE: no owner id in record 1; expected an int or a str in each: add the id, or "
            "leave out the entry",
        ),
        {"ann": 1.0},
        record_owner=("ann", ""),
        without=("command line",),
    ),
    "negative epsilon": by_epsilon(-1.0, "-1.0"),
    "epsilon of zero": by_epsilon(0.0, "0.0"),
    "epsilon that is NaN": by_epsilon(float("nan"), "nan"),
    "infinite epsilon": by_epsilon(float("inf"), "inf"),
    "epsilon that is text": by_epsilon(
        "high",
        "'high'",
        "neither a number nor a known level; correct it (known levels: none; LEVELS)",
    ),
    "delta of 0": by_delta(0.0),
    "delta of 1": by_delta(1.0),
    "delta of 0 for all": Mistake(
        (f"delta of all owners (0.0): {DELTA}",),
        delta=0.0,
        # refused with the other keys when the configuration is read
        without=("configuration, table", "configuration, mapping"),
    ),
    "lookalike ids": Mistake(
        (ALIKE,),
        {"Zo\u00eb": 1.0, "Zo\u00eb\u200b": 2.0},
        record_owner=("Zo\u00eb", "Zo\u00eb\u200b"),
    ),
    "duplicate id": in_file(
        "owner,epsilon\nann,1\nbob,2\nann,3\n",
        "SOURCE: owner ann appears more than once; expected one entry per owner: remove the "
        "duplicates",
    ),
    "row without an id": in_file(
        "owner,epsilon\nann,1\nbob,2\n,3\n",
        "SOURCE: no owner id in row 4; expected an int or a str in each: add the id, or leave out "
        "the entry",
    ),
    "wrong column name": in_file(
        "owner,epsilom\nann,1\nbob,2\n",
        f"SOURCE: unknown column epsilom (did you mean 'epsilon'?); {COLUMNS}",
        f"SOURCE: no column epsilon; {COLUMNS}",
    ),
    "column name in capitals": in_file(
        "Owner,epsilon\nann,1\nbob,2\n",
        "SOURCE: column Owner: expected lower-case names; rename to owner",
    ),
    "table without rows": in_file(
        "owner,epsilon\n", "SOURCE has a header but no rows; expected one row per owner"
    ),
    "empty file": in_file("", "SOURCE is empty; expected a header (owner, epsilon) and rows"),
    "negative declared count": in_file(
        "owner,epsilon,records\nann,1,5\nbob,2,-1\n", f"records of owner bob (-1.0): {COUNT}"
    ),
}


def problems_of(call):
    with pytest.raises(ow.OwnerwiseError) as error:
        call()
    return error.value.problems


def printed_problems(arguments, capsys):
    assert main(list(map(str, arguments))) == 2
    return re.findall(r"^  \d+\. (.*)$", capsys.readouterr().err, re.MULTILINE)


def api_table(mistake, folder, capsys):
    path = mistake.write(folder / "b.csv")
    return problems_of(lambda: ow.Owners(mistake.record_owner, path, mistake.other_delta))


def api_mapping(mistake, folder, capsys):
    return problems_of(lambda: ow.Owners(mistake.record_owner, mistake.epsilon, mistake.delta))


def command_line(mistake, folder, capsys):
    path = mistake.write(folder / "b.csv")
    delta = [] if mistake.other_delta is None else ["--delta", mistake.other_delta]
    return printed_problems(["plan", path, "--steps", 3, "--batch-size", 1, *delta], capsys)


def configuration(owners, mistake, folder, capsys):
    """Return what `ownerwise train` prints for a configuration with this text about owners."""
    rows = [(name, at, at % 2) for at, name in enumerate(mistake.record_owner)]
    with (folder / "t.csv").open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([("who", "x", "y"), *rows])
    (folder / "run.toml").write_text(
        '[data]\nfile = "t.csv"\ntarget = "y"\nowner = "who"\nclasses = ["0", "1"]\n'
        f"features = {{ x = [0, 9] }}\ntest_share = 1e-9\n[owners]\n{owners}\n"
        '[plan]\nsteps = 3\nbatch_size = 1\n[model]\nname = "mlp"\n[training]\nlr = 0.1\n'
    )
    return printed_problems(["train", folder / "run.toml", "--folder", folder / "run"], capsys)


def configuration_table(mistake, folder, capsys):
    path = mistake.write(folder / "b.csv")
    return configuration(f"budgets = '{path}'", mistake, folder, capsys)


def configuration_mapping(mistake, folder, capsys):
    pairs = [
        f"{json.dumps(name)} = {json.dumps(value) if isinstance(value, str) else value}"
        for name, value in mistake.epsilon.items()
    ]
    return configuration(f"epsilon = {{ {', '.join(pairs)} }}", mistake, folder, capsys)


def estimator(mistake, folder, capsys):
    rows = [[float(at)] for at in range(len(mistake.record_owner))]
    classifier = PrivateClassifier(mistake.epsilon, mistake.delta, classes=[0, 1])
    labels = [at % 2 for at in range(len(rows))]
    return problems_of(lambda: classifier.fit(rows, labels, owners=list(mistake.record_owner)))


FRONT_ENDS = {
    "API, table": api_table,
    "API, mapping": api_mapping,
    "command line": command_line,
    "configuration, table": configuration_table,
    "configuration, mapping": configuration_mapping,
    "estimator": estimator,
}


def plain(sentence, front_end, folder):
    """Return a sentence without its place, and with this front end's hints replaced."""
    for hint, name in HINTS[front_end.partition(",")[0]].items():
        if name == "IDS":
            sentence = re.sub(rf"\bin {hint}\b", "in IDS", sentence)
            sentence = re.sub(rf"^{hint}:", "SOURCE:", sentence)
        else:
            sentence = sentence.replace(hint, name)
    path = re.escape(str(folder / "b.csv"))
    sentence = re.sub(rf", row \d+\)| in {path}", lambda at: ")" * at[0].endswith(")"), sentence)
    return re.sub(rf"^({path}|the mapping epsilon)", "SOURCE", sentence)


@pytest.mark.parametrize(
    ("mistake", "front_end"),
    [
        pytest.param(mistake, front_end, id=f"{name}: {front_end}")
        for name, mistake in MISTAKES.items()
        for front_end in FRONT_ENDS
        if front_end not in mistake.without
    ],
)
def test_every_front_end_says_the_same(mistake, front_end, tmp_path, capsys):
    found = FRONT_ENDS[front_end](mistake, tmp_path, capsys)
    assert {plain(sentence, front_end, tmp_path) for sentence in found} == set(mistake.says)


RECORDS = 80
LIMIT = f" and at most the {RECORDS} declared records"
STEPS = "expected a whole number from 1 to 10000000"


@dataclass(frozen=True)
class Setting:
    """A wrong setting, and what every front end in which it can be made says about it."""

    says: tuple[str, ...]
    api: Any = None
    """Calls with the owners and the data."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Arguments of `ow.plan`, options of `ownerwise plan` and keys of the section [plan]."""
    config: dict[str, Any] = field(default_factory=dict)
    """Other keys of the configuration, as "section.key"."""
    estimator: dict[str, Any] | None = None
    only: tuple[str, ...] = ("API", "command line", "configuration", "estimator")
    limit_if_known: bool = False
    """Whether a front end that knows the number of records adds it as a limit."""


def of_plan(says, estimator=True, only=None, limit_if_known=False, **plan):
    ends = ("API", "command line", "configuration", *(["estimator"] if estimator else []))
    only = only or ends
    return Setting((says,), plan=plan, estimator=plan, only=only, limit_if_known=limit_if_known)


def of_training(says, api=None, estimator=None, **config):
    ends = ("API", "configuration", *(["estimator"] if estimator else []))
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return Setting((says,), api, config=keys, estimator=estimator, only=ends)


def trained(**options):
    def call(plan, data):
        model = ow.models.build("mlp", inputs=1, classes=2, hidden=[])
        ow.Trainer(model, plan, **{"lr": 0.1, **options}).fit(data)

    return call


SETTINGS = {
    "unknown method": of_plan(
        "method is 'smaple'; did you mean 'sample'? Known names: uniform, sample, scale, both, "
        "individual",
        method="smaple",
    ),
    "unknown accountant": of_plan(
        "accountant is 'pdl'; did you mean 'pld'? Known names: pld, rdp", accountant="pdl"
    ),
    "no steps": of_plan(f"steps 0: {STEPS}", steps=0),
    "no batch": of_plan(
        "batch_size 0: expected a number above 0", limit_if_known=True, batch_size=0
    ),
    "batch above all records": of_plan(
        f"batch_size {RECORDS + 1}: expected a number above 0{LIMIT}",
        batch_size=RECORDS + 1,
    ),
    "no clip norm": of_plan(
        "clip_norm 0.0: expected 1e-06 to 1e+06, so that its square fits in float32, or 'adaptive'",
        clip_norm=0.0,
    ),
    "mixture of one method": of_plan(
        "mixture 0.5: only method='both' and method='individual' use a mixture",
        estimator=False,
        mixture=0.5,
    ),
    "three sizes": of_plan(
        "3 of steps, batch_size and noise_multiplier were given; expected two (the third follows "
        "from the budgets)",
        estimator=False,
        noise_multiplier=1.0,
    ),
    "unknown noise schedule": of_plan(
        "noise_schedule is 'exponentail'; did you mean 'exponential'? Known names: constant, "
        "exponential, time, step, polynomial",
        only=("API", "configuration"),
        noise_schedule="exponentail",
    ),
    "negative learning rate": of_training(
        "lr is -1.0; expected a positive, finite number",
        trained(lr=-1.0), {"lr": -1.0}, training__lr=-1.0,
    ),
    "learning rate that is text": of_training(
        "lr is 'fast'; expected a positive, finite number",
        trained(lr="fast"), {"lr": "fast"}, training__lr="fast",
    ),
    "no learning rate": Setting(
        ("lr is None; expected a positive, finite number",), trained(lr=None),
        estimator={"lr": None}, only=("API", "estimator"),
    ),
    "averaging of all steps": of_training(
        "averaging is 1.0; expected a decay of at least 0 and below 1, such as 0.99",
        trained(averaging=1.0), training__averaging=1.0,
    ),
    "no evaluation": of_training(
        "evaluate_every is 0; expected a whole number of at least 1",
        trained(evaluate_every=0, checkpoint_every=1), run__evaluate_every=0,
    ),
    "seed that is no whole number": of_training(
        "seed is 0.5; expected a whole number, which makes the run NOT PRIVATE; leave it out for "
        "private data",
        trained(seed=0.5), run__seed=0.5,
    ),
    "unknown schedule": of_training(
        "schedule is 'cosin'; did you mean 'cosine'? Known names: constant, linear, cosine, step",
        trained(schedule="cosin"), training__schedule="cosin",
    ),
    "option of a schedule": of_training(
        "schedule cosine: floor is 2; expected a number from 0 to 1",
        trained(schedule={"name": "cosine", "floor": 2}),
        training__schedule={"name": "cosine", "floor": 2},
    ),
    "unknown logger": of_training(
        "logger is 'tensorbord'; did you mean 'tensorboard'? Known names: tensorboard, wandb, "
        "mlflow",
        trained(loggers=["tensorbord"]), run__loggers=["tensorbord"],
    ),
    "unknown model": of_training(
        "model is 'mpl'; did you mean 'mlp'? Known names: MODELS",
        lambda plan, data: ow.models.build("mpl"), model={"name": "mpl"},
    ),
    "unknown option of a model": of_training(
        "mlp has no option hiden; did you mean 'hidden'? Known names: inputs, classes, hidden, "
        "activation",
        lambda plan, data: ow.models.build("mlp", hiden=[3]), model__hiden=[3],
    ),
    "hidden layers that are text": of_training(
        "hidden='wide': expected a list of sizes, such as [wide]",
        lambda plan, data: ow.models.build("mlp", hidden="wide"), {"hidden": "wide"},
        model__hidden="wide",
    ),
    "unknown data set": of_training(
        "data set is 'digit'; did you mean 'digits'? Known names: DATA",
        lambda plan, data: ow.data.load("digit"),
        data={"name": "digit"}, owners={"assignment": {"kind": "by_class", "budgets": [1, 2]}},
    ),
    "negative kappa": of_training(
        "kappa must be a finite number of at least 0, got -1.0",
        lambda plan, data: WEIGHTS.make({"kind": "ino", "kappa": -1.0}), weights__kappa=-1.0,
    ),
    "two tails": of_training(
        "pass tail (a fraction) or tail_length (absolute), not both",
        lambda plan, data: WEIGHTS.make({"kind": "ino", "tail": 0.4, "tail_length": 1.0}),
        weights={"kind": "ino", "tail": 0.4, "tail_length": 1.0},
    ),
    "unknown weights": of_training(
        "weights is 'inn'; did you mean 'ino'? Known names: ino",
        lambda plan, data: WEIGHTS.make("inn"), {"weights": "inn"}, weights__kind="inn",
    ),
    "constant of a clipping rule": of_training(
        "r must be at least 1e-06 and finite, got -1",
        lambda plan, data: CLIPPING_RULES.make({"kind": "psac", "r": -1}),
        training__clipping={"kind": "psac", "r": -1},
    ),
}  # fmt: skip


def setting_api(setting, folder, capsys):
    ids = ["ann"] * (RECORDS // 2) + ["bob"] * (RECORDS // 2)
    owners = ow.Owners(ids, {"ann": 1.0, "bob": 2.0})
    request = {"steps": 3, "batch_size": 10} | setting.plan
    if setting.plan:
        return problems_of(lambda: ow.plan(owners, **request))
    data = (torch.zeros(RECORDS, 1), torch.arange(RECORDS) % 2)
    return problems_of(lambda: setting.api(ow.plan(owners, **request), data))


def setting_command_line(setting, folder, capsys):
    path = folder / "b.csv"
    path.write_text(f"owner,epsilon,records\nann,1,{RECORDS // 2}\nbob,2,{RECORDS // 2}\n")
    request = {"steps": 3, "batch_size": 10} | setting.plan
    flags = [x for key, value in request.items() for x in (f"--{key.replace('_', '-')}", value)]
    return printed_problems(["plan", path, *flags], capsys)


def setting_configuration(setting, folder, capsys):
    rows = [("ann" if at < RECORDS // 2 else "bob", at % 9, at % 2) for at in range(RECORDS)]
    with (folder / "t.csv").open("w", newline="") as out:
        csv.writer(out).writerows([("who", "x", "y"), *rows])
    content = {
        "data": {
            "file": str(folder / "t.csv"), "target": "y", "owner": "who", "classes": ["0", "1"],
            "features": {"x": [0, 9]}, "test_share": 1e-9,
        },
        "owners": {"epsilon": {"ann": 1.0, "bob": 2.0}},
        "plan": {"steps": 3, "batch_size": 10} | setting.plan,
        "model": {"name": "mlp"},
        "training": {"lr": 0.1},
        "weights": {"kind": "ino"},
        "run": {},
    }  # fmt: skip
    for place, value in setting.config.items():
        section, _, key = place.partition(".")
        content[section] = {**content[section], key: value} if key else value
    return problems_of(lambda: prepare_run(make_config(content), folder=folder / "run"))


def setting_estimator(setting, folder, capsys):
    options = {"steps": 3, "batch_size": 10, "hidden": [4]} | setting.estimator
    owners = ["ann" if at < RECORDS // 2 else "bob" for at in range(RECORDS)]
    classifier = PrivateClassifier({"ann": 1.0, "bob": 2.0}, classes=[0, 1], **options)
    rows, labels = [[float(at)] for at in range(RECORDS)], [at % 2 for at in range(RECORDS)]
    return problems_of(lambda: classifier.fit(rows, labels, owners=owners))


SETTING_FRONT_ENDS = {
    "API": setting_api,
    "command line": setting_command_line,
    "configuration": setting_configuration,
    "estimator": setting_estimator,
}
PLACES = {
    "model.name": "model", "data.name": "data set", "run.loggers": "logger",
    "weights.kind": "weights", "training.clipping.": "", "no option model.": "no option ",
}  # fmt: skip
SECTION = re.compile(r"^(plan|training|weights|run)(\.|: )")


def plain_setting(sentence):
    """Return a sentence without its place in a configuration, and without lists of all names."""
    for place, word in PLACES.items():
        sentence = sentence.replace(place, word)
    sentence = SECTION.sub("", sentence)
    for names, word in ((ow.models.BUILDERS, "MODELS"), (ow.data.LOADERS, "DATA")):
        sentence = sentence.replace(", ".join(names), word)
    return sentence


@pytest.mark.parametrize(
    ("setting", "front_end"),
    [
        pytest.param(setting, front_end, id=f"{name}: {front_end}")
        for name, setting in SETTINGS.items()
        for front_end in setting.only
    ],
)
def test_every_front_end_says_the_same_of_settings(setting, front_end, tmp_path, capsys):
    found = SETTING_FRONT_ENDS[front_end](setting, tmp_path, capsys)
    said = {plain_setting(sentence) for sentence in found}
    if setting.limit_if_known:
        said = {sentence.removesuffix(LIMIT) for sentence in said}
    assert said == set(setting.says)
