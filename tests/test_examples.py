"""Every example runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert "spent" in capsys.readouterr().out


def test_there_are_examples():
    assert EXAMPLES
