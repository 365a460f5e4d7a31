"""The examples in docstrings run and show what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()]


def name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_examples_of_a_module_run(path, monkeypatch):
    monkeypatch.chdir(ROOT)  # examples read files of examples/
    results = doctest.testmod(
        importlib.import_module(name(path)), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert results.attempted > 0
    assert results.failed == 0


def test_examples_are_doctests():
    """A heading `Example:` is followed by lines that can be run, not by code nobody runs."""
    for path in sorted(SOURCE.rglob("*.py")):
        lines = path.read_text().splitlines()
        headings = [at for at, line in enumerate(lines) if line.strip() == "Example:"]
        assert all(lines[at + 1].strip().startswith(">>> ") for at in headings), path.name
