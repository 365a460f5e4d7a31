"""A mistake about owners or budgets gets the same sentence from every front end.

The sentences may differ in two places: where the value stands (a mapping, or a row of a file), and
the hint that names what the user of this front end can write. Both are replaced before comparing.
A front end is left out of a row if its users cannot make the mistake: `ownerwise plan` reads no
records, and the estimator reads no files and ignores owners without records.
"""

import csv
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.estimators import PrivateClassifier

EPSILON = "expected a positive, finite number (typically 0.1 to 10)"
DELTA = "expected a number above 0 and below 1, well below 1/records (typically 1e-5)"
COUNT = "expected a whole number of at least 1; leave out owners who have none"
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
    "estimator": {"owners": "IDS", "PrivateClassifier accepts only numbers": "LEVELS"},
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
    "declared count of 0": in_file(
        "owner,epsilon,records\nann,1,5\nbob,2,0\n", f"records of owner bob (0.0): {COUNT}"
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
