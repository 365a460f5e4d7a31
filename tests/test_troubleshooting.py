"""The page on troubleshooting shows the messages that the code gives, word for word.

Each case makes a mistake; the page names the case in a comment, followed by its message. After a
message has changed, `python tests/test_troubleshooting.py` writes the new one into the page.
"""

import os
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.config import prepare_run, read_config

PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"
TABLE = """id,ward,age,outcome
p1,day,50,home
p2,night,61,admitted
p3,day,47,home
"""
CONFIG = {
    "data": {
        "file": "visits.csv",
        "target": "outcome",
        "owner": "id",
        "classes": ["home", "admitted"],
        "features": {"age": [0, 110], "ward": ["day", "night"]},
    },
    "owners": {"epsilon": {"p1": 1.0, "p2": 2.0, "p3": 4.0}, "delta": 1e-5},
    "plan": {"steps": 5, "batch_size": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"lr": 0.5},
}


def configured(**changes):
    """Prepare a run from the configuration with some values changed."""
    lines = []
    for section, values in CONFIG.items():
        lines.append(f"[{section}]")
        for key, value in {**values, **changes.get(section, {})}.items():
            lines.append(f"{key} = {toml(value)}")
    Path("visits.toml").write_text("\n".join(lines), encoding="utf-8")
    return prepare_run(read_config(Path("visits.toml"), []))


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def table(text):
    Path("visits.csv").write_text(text, encoding="utf-8")
    return configured


def small_plan(records=100, **options):
    owners = ow.Owners(np.arange(records), 2.0, 1e-5)
    return ow.plan(owners, **{"steps": 5, "batch_size": 20, **options})


def arrays(dtype=torch.float32):
    return torch.zeros(100, 4, dtype=dtype), torch.arange(100) % 2


def train(model=None, data=None, **options):
    model = nn.Linear(4, 2) if model is None else model
    fit = {key: options.pop(key) for key in ("validation",) if key in options}
    trainer = ow.Trainer(model, small_plan(), **{"lr": 0.1, "progress": False, **options})
    return trainer.fit(arrays() if data is None else data, **fit)


def twice_in_a_folder():
    train(folder="runs/first")
    train(folder="runs/first")


def loaded_without_model():
    train(folder="runs/first")
    ow.Run.load("runs/first").predict(np.zeros((2, 4)))


CASES = {
    "budgets": lambda: configured(owners={"epsilon": {"p1": 1.0, "p3": 4.0}}),
    "ids that do not match": lambda: ow.Owners(["7", "8"], {"007": 1.0, "008": 2.0}, 1e-5),
    "epsilon": lambda: ow.Owners(["a", "b"], {"a": 0.0, "b": -1.0}, 1e-5),
    "unknown key": lambda: configured(plan={"step": 5}),
    "unknown category": lambda: table(TABLE + "p1,evening,33,home\n")(),
    "unknown class": lambda: table(TABLE + "p1,day,33,dead\n")(),
    "text in a numeric column": lambda: table(TABLE + "p1,day,33 years,home\n")(),
    "missing column": lambda: configured(data={"features": {"agee": [0, 110]}}),
    "batch size": lambda: small_plan(batch_size=500),
    "two of three": lambda: ow.plan(ow.Owners(np.arange(100), 2.0, 1e-5), batch_size=20),
    "batch normalisation": lambda: train(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))),
    "inputs in double precision": lambda: train(data=arrays(torch.float64)),
    "targets as floats": lambda: train(data=(arrays()[0], arrays()[1].float())),
    "too many classes": lambda: train(data=(arrays()[0], torch.arange(100) % 3)),
    "other number of records": lambda: train(data=(torch.zeros(90, 4), torch.arange(90) % 2)),
    "a data loader": lambda: train(
        data=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*arrays()), shuffle=True)
    ),
    "missing numbers": lambda: train(data=(torch.full((100, 4), torch.nan), arrays()[1])),
    "the folder holds a run": twice_in_a_folder,
    "prediction without a network": loaded_without_model,
    "export without inputs": lambda: train().export("exported"),
    "unknown optimizer": lambda: configured(training={"optimizer": "sdg"}),
}


_BLOCK = re.compile(r"<!-- case: (?P<case>.+?) -->\n\n```text\n(?P<message>.*?)\n```", re.DOTALL)


def message_of(name: str) -> str:
    """Make a mistake in an empty folder with a small table, and return its message."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            Path("visits.csv").write_text(TABLE, encoding="utf-8")
            CASES[name]()
        except ow.OwnerwiseError as error:
            return "\n".join(error.problems)
        finally:
            os.chdir(before)
    raise AssertionError(f"{name}: no error was raised")


def shown() -> dict[str, str]:
    """Return the messages in the page, by case."""
    return {block["case"]: block["message"] for block in _BLOCK.finditer(_page())}


def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_the_page_shows_the_message(name):
    assert shown().get(name) == message_of(name), "run: python tests/test_troubleshooting.py"


def test_every_message_has_a_case_and_a_remedy():
    assert list(shown()) == list(CASES)
    assert _page().count("```text") == len(CASES)
    for part in _BLOCK.split(_page())[3::3]:
        remedy = part.split("\n## ")[0]
        assert len(remedy.split()) > 8, part


if __name__ == "__main__":
    page = _BLOCK.sub(
        lambda found: (
            f"<!-- case: {found['case']} -->\n\n```text\n{message_of(found['case'])}\n```"
        ),
        _page(),
    )
    PAGE.write_text(page, encoding="utf-8")
