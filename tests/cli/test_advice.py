"""`ownerwise plan --advise`: one screen, a page, JSON, and the warning about useless plans."""

import json

import pytest

from ownerwise.cli.main import main


@pytest.fixture
def budgets(tmp_path):
    path = tmp_path / "budgets.csv"
    path.write_text("owner,epsilon,records\n<a>,1,200\nb,4,400\n")
    return path


def test_one_screen_and_a_page(budgets, tmp_path, capsys):
    out = tmp_path / "advice.html"
    assert main(["plan", str(budgets), "--method", "uniform", "--advise", "--out", str(out)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"Written to {out}."
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("Try --steps") for line in lines)
    page = out.read_text()
    assert page.count("<td") == 4 * 5
    assert page.count("class=best") == 1
    assert "<a>" not in page


def test_json_has_the_numbers(budgets, capsys):
    assert main(["plan", str(budgets), "--method", "uniform", "--advise", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["signal"] > 10
    assert [cell["steps"] for cell in found["cells"][0]] == [100, 300, 1000, 3000, 10000]


def test_what_cannot_be_combined(budgets, tmp_path, capsys):
    asked = ["plan", str(budgets), "--advise", "--steps", "5", "--out", str(tmp_path / "plan.json")]
    assert main([*asked, "--method", "sampel"]) == 2
    message = capsys.readouterr().err
    assert "3 problems" in message
    for words in ("--steps with --advise", "did you mean 'sample'", "ends in .html"):
        assert words in message


def test_a_useless_plan_is_announced(budgets, tmp_path, capsys):
    budgets.write_text("owner,epsilon,records\na,0.001,50\n")
    options = ["--steps", "50", "--batch-size", "10"]
    assert main(["plan", str(budgets), *options]) == 0
    assert "OF NO USE: the noise hides what the steps can teach" in capsys.readouterr().out
    assert main(["plan", str(budgets), *options, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "warning: plan of no use: the noise hides" in captured.err
