"""Every example runs, shows what each owner spent, and says what is private."""

import runpy
from pathlib import Path

import pytest

from ownerwise.config import (
    read_config,
)
from ownerwise.owners import UNITS
from tools import text_tools

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:peft")
def test_the_example_runs(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write reports
    if "MiniLM" in path.read_text():  # a made-up network, as the weights are an extra
        text_tools.install(monkeypatch, tmp_path / "site")
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    unit = UNITS["owner" if path.stem == "patients" else "record"]
    for words in ("spent", unit, "guarantee"):
        assert words in shown


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_example_says_what_is_private(path):
    text = path.read_text()
    assert f"python examples/{path.name}" in text
    assert "\nPRIVATE: " in text
    assert "\nNOT PRIVATE: " in text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_configuration_is_accepted(path):
    assert read_config(path)["plan"]["steps"] > 0


def test_each_kind_of_data_has_an_example():
    assert {path.stem for path in SCRIPTS} >= {
        "images", "own_loop", "patients", "sklearn_pipeline", "tabular", "text",
    }  # fmt: skip
