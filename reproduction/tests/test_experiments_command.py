"""`ownerwise experiments` from the command line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ownerwise.cli.main import EXIT_BAD_INPUT, main, make_parser

ROOT = Path(__file__).parents[2]

FAST = ["--steps", "3", "--accountant", "rdp", "--set", "run.evaluate_every=1"]


def test_commands_shown_in_the_documentation_are_known():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = [
        line
        for page in pages
        for line in re.findall(r"^ {4,8}ownerwise (experiments .+)$", page.read_text(), re.M)
    ]
    assert shown
    for line in shown:
        make_parser().parse_args(shlex.split(line.partition("#")[0]))


def test_list(capsys):
    assert main(["experiments", "list"]) == 0
    out = capsys.readouterr().out
    assert "MN-PC" in out
    assert "ino-budget" in out


def test_runs_and_searches_become_pages(tmp_path, capsys):
    run = ["experiments", "run", "digits", "--method", "idp,ino", *FAST, "--clipping", "auto-s"]
    assert main([*run, "--seeds", "1"]) == 0
    assert "NOT PRIVATE" in capsys.readouterr().out
    (stored,) = Path("results/digits/ino").glob("*.json")
    config = json.loads(stored.read_text())["config"]
    assert config["plan"]["steps"] == 3
    assert config["plan"]["accountant"] == "rdp"
    assert config["training"]["clipping"] == "auto_s"

    assert main(["experiments", "table", "--out", "reproduction/results", "--no-figures"]) == 0
    assert "IDP-SGD" in Path("reproduction/results/README.md").read_text()
    capsys.readouterr()
    stale = json.loads(stored.read_text()) | {"changes": []}
    stored.write_text(json.dumps(stale))
    assert main(["experiments", "table", "digits"]) == 0
    shown = capsys.readouterr()
    assert "1 results are left out" in shown.err
    assert "| IDP-SGD |" in shown.out
    assert "| INO-SGD |" not in shown.out

    tune = ["experiments", "tune", "digits", "--method", "ino", "--trials", "2", "--seeds", "1"]
    assert main([*tune, *FAST]) == 0
    found = json.loads(Path("results/tuning/digits.json").read_text())
    assert len(found["methods"]["ino"]["points"]) == 2
    assert Path("results/tuning/digits.svg").exists()
    assert found["command"].startswith("ownerwise experiments tune digits --method ino --seeds 1 ")
    assert main(["experiments", "table", "--out", "reproduction/results", "--no-figures"]) == 0
    assert "published results of INO-SGD are dropped" in capsys.readouterr().err
    assert "(digits/tuning/index.md)" in Path("reproduction/results/README.md").read_text()
    assert not list(Path("reproduction/results").rglob("*.svg"))


def test_plans_are_written_without_training(capsys):
    plans = ["experiments", "plans", "digits", "--out", "reproduction/results"]
    assert main(plans) == 0
    assert "reproduction/results/plans/index.md" in capsys.readouterr().out
    page = Path("reproduction/results/plans/index.md").read_text()
    assert page.count("| digits, ε 0.5 |") == 3
    assert f"    ownerwise {' '.join(plans)}" in page
    assert main(["experiments", "plans", "digitz", "MN", "--out", "x"]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert "digitz" in err
    assert "'MN'" in err


def test_all_problems_at_once(capsys):
    command = ["experiments", "run", "digitz", "MN-PC", "--method", "idp,foo", "--seeds", "0"]
    assert main([*command, "--set", "training.lrr=1"]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    for word in ("digitz", "foo", "--seeds 0"):
        assert word in err
    assert main(["experiments", "run", "digits", "--set", "training.lrr=1"]) == EXIT_BAD_INPUT
    assert "lrr" in capsys.readouterr().err
    assert main(["experiments", "table"]) == EXIT_BAD_INPUT
    assert not Path("results").exists()


def test_failed_runs_are_named_at_the_end(capsys):
    command = ["experiments", "run", "digits", "--method", "idp", "--seeds", "1", *FAST]
    with pytest.raises(SystemExit) as end:
        main([*command, "--set", "plan.batch_size=5000"])
    assert end.value.code == EXIT_BAD_INPUT
    assert "digits idp seed 0: batch_size 5000" in capsys.readouterr().err
