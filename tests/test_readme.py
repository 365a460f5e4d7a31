"""What the README shows runs, and says what the code says."""

import re
import tomllib
from pathlib import Path

import ownerwise as ow
from ownerwise.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 11
    exec(compile(code, "README.md", "exec"), {})
    assert "UNIT OF PRIVACY" in capsys.readouterr().out
    assert ow.Plan.load(tmp_path / "plan.json").steps == 500


def test_the_command_runs(tmp_path, monkeypatch):
    (line,) = re.findall(r"^ {4}ownerwise (plan .*)$", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / w) if w.startswith("examples/") else w for w in line.split()]
    assert main(words) == 0
    assert (tmp_path / "plan.json").exists()


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_version_is_written_in_one_place_and_cited():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/ownerwise/__init__.py"
    assert f"version: {ow.__version__}" in (ROOT / "CITATION.cff").read_text()
