"""The how-to page from a hospital's table to a report: every command, with the output it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.cli.main import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "hospital.md"
FENCE = re.compile(r"^```(toml|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TABLES = ("heart.csv", "heart-budgets.csv", "voices.csv", "voices-budgets.csv")


def matches(shown: str, printed: str) -> bool:
    """Whether the output is as shown; "..." stands for any text."""
    pattern = ".*?".join(map(re.escape, shown.rstrip("\n").split("...")))
    return re.fullmatch(pattern, printed.rstrip("\n"), re.DOTALL) is not None


def test_a_different_output_is_noticed():
    assert matches("a ... c\n...\nz", "a b c\nd\ne\nz")
    assert not matches("a ... c", "a b d")
    assert not matches("a\nc", "a\nb\nc")


def test_the_page_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    for name in TABLES:
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    monkeypatch.chdir(tmp_path)
    commands = 0
    for kind, text in FENCE.findall(PAGE.read_text()):
        if kind == "toml":
            (tmp_path / text.split()[1]).write_text(text)  # named in the first line
            continue
        line, shown = text.split("\n", 1)
        words = shlex.split(line.removeprefix("$ ownerwise "), comments=False)
        refused = "problems\n" in shown.splitlines(keepends=True)[0]
        assert main(words) == (2 if refused else 0), line
        printed = capsys.readouterr()
        assert matches(shown, printed.err if refused else printed.out), printed
        assert ("statistics of no use" in printed.err) == ("plan.statistics=true" in line)
        commands += 1
    assert commands == 8
    for name in ("heart", "voices", "heart-statistics"):
        run = ow.Run.load(tmp_path / "runs" / name)
        assert run.private
        assert (run.epsilon() <= run.plan.targets).all()
        assert (tmp_path / "runs" / name / "report.html").exists()
        assert "**Private" in (tmp_path / "runs" / name / "CARD.md").read_text()
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert len(lines) == len((ROOT / "examples" / "voices.csv").read_text().splitlines())


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_have_a_stated_source(name):
    assert name in (ROOT / "docs" / "examples.md").read_text()
