import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ownerwise as ow
from ownerwise.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "budgets.csv"
REQUEST = ["--method", "sample", "--steps", "200", "--batch-size", "64"]


@pytest.fixture
def two_owners(tmp_path) -> Path:
    """A table that is planned faster than the example."""
    table = tmp_path / "two owners.csv"
    table.write_text("owner,epsilon,records\na,1,500\nb,2,500\n")
    return table


def test_the_example_plans(capsys):
    assert (
        main(["plan", str(EXAMPLE), "--method", "sample", "--steps", "2000", "--batch-size", "512"])
        == 0
    )
    out = capsys.readouterr().out
    for word in ("epsilon", "delta", "rate", "clip norm", "multiplier", "batch share", "spent"):
        assert word in out
    assert "UNIT OF PRIVACY: ONE RECORD" in out
    assert "Verified by dp-accounting" in out


def test_out_writes_a_plan_that_loads(two_owners, tmp_path, capsys):
    path = tmp_path / "new" / "plan.json"
    assert main(["plan", str(two_owners), *REQUEST, "--out", str(path)]) == 0
    plan = ow.Plan.load(path, owners=ow.Owners.from_table(two_owners))
    assert plan.hash[:12] in capsys.readouterr().out


def test_json_has_a_row_per_owner_on_request(two_owners, capsys):
    assert main(["plan", str(two_owners), *REQUEST, "--json", "--owners"]) == 0
    document = json.loads(capsys.readouterr().out)
    owners = ow.Owners.from_table(two_owners)
    assert [row["name"] for row in document["rows"]] == [str(name) for name in owners.ids]
    assert sum(row["batch_share"] for row in document["rows"]) == pytest.approx(1)


def test_levels_are_given_on_the_command_line(tmp_path, capsys):
    table = tmp_path / "b.csv"
    table.write_text("owner,epsilon,records\na,high,500\nb,low,500\n")
    assert main(["plan", str(table), *REQUEST, "--level", "high=0.5", "--level", "low=4"]) == 0
    assert "0.5" in capsys.readouterr().out
    assert main(["plan", str(table), *REQUEST, "--level", "high=0.5", "--level", "low:4"]) == 2
    assert "expected NAME=EPSILON" in capsys.readouterr().err
    assert main(["plan", str(table), *REQUEST]) == 2
    message = capsys.readouterr().err
    assert "known levels: none; pass --level NAME=EPSILON" in message
    assert "levels={" not in message


def test_delta_is_for_owners_whose_table_has_none(tmp_path, capsys):
    table = tmp_path / "b.csv"
    table.write_text("owner,epsilon,delta,records\na,1,1e-7,500\nb,2,,500\n")
    assert main(["plan", str(table), *REQUEST, "--delta", "1e-6", "--json", "--owners"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["delta"] for row in rows] == [[1e-7, 1e-7], [1e-6, 1e-6]]


def test_all_problems_at_once_exit_code_2_and_nothing_written(tmp_path, capsys):
    table = tmp_path / "bad.csv"
    table.write_text("owner,epsilon,delta,records\na,-1,1e-5,10\nb,nan,2,10\nc,1,1e-5,-1\n")
    out = tmp_path / "plan.json"
    code = main(
        ["plan", str(table), "--method", "smaple", "--steps", "0", "--batch-size", "5",
         "--out", str(out)]
    )  # fmt: skip
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("epsilon", "delta", "records", "did you mean 'sample'", "steps 0"):
        assert part in captured.err
    assert "5 problems\n" in captured.err
    assert list(tmp_path.iterdir()) == [table]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, REQUEST, "table.csv"),
        ("", REQUEST, "table.csv"),
        ("owner,epsilon\n", REQUEST, "a header but no rows"),
        ("owner;epsilon\na;0,5\n", REQUEST, "epsilon"),
        ("owner,epsilon\na,1\na,2\n", REQUEST, "more than once"),
        ("owner,epsilon,records\na,1,50\n", REQUEST, "at most the 50 declared"),
        ("owner,epsilon,records\na,1,500\n", ["--steps", "9"], "1 of steps, batch_size"),
        ("owner,epsilon,records\na,1e-9,500\n", REQUEST, "owner a: epsilon 1e-09"),
    ],
)
def test_bad_input_is_explained(tmp_path, capsys, content, arguments, message):
    table = tmp_path / "table.csv"
    if content is not None:
        table.write_text(content)
    assert main(["plan", str(table), *arguments]) == 2
    assert message in capsys.readouterr().err


NO_RECORDS = "has no records column, so one record per owner is assumed; add the column"


def test_a_table_without_records_is_planned_with_a_warning(two_owners, tmp_path, capsys):
    table = tmp_path / "b.csv"
    table.write_text("owner,epsilon\na,1\nb,2\n")
    out = tmp_path / "plan.json"
    request = ["plan", str(table), "--steps", "10", "--batch-size", "1"]
    assert main([*request, "--out", str(out)]) == 0
    assert f"ownerwise: warning: {table} {NO_RECORDS}" in capsys.readouterr().err
    assert main([*request, "--json"]) == 0
    captured = capsys.readouterr()
    assert NO_RECORDS in captured.err
    assert json.loads(captured.out)["rows"]
    assert main(["plan", str(two_owners), *REQUEST]) == 0
    assert NO_RECORDS not in capsys.readouterr().err


def test_a_batch_beyond_assumed_records(tmp_path, capsys):
    table = tmp_path / "b.csv"
    table.write_text("owner,epsilon\na,1\nb,2\n")
    assert main(["plan", str(table), *REQUEST]) == 2
    message = capsys.readouterr().err
    assert "1 problem\n" in message
    assert f"batch_size 64 exceeds the number of owners (2); {table} {NO_RECORDS}" in message
    assert "declared" not in message


def test_a_folder_as_out_is_refused(tmp_path, capsys):
    assert main(["plan", str(EXAMPLE), *REQUEST, "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_large_delta_warns(tmp_path, capsys):
    table = tmp_path / "b.csv"
    table.write_text("owner,epsilon,delta,records\na,1,0.01,500\nb,2,0.01,500\n")
    assert main(["plan", str(table), *REQUEST]) == 0
    assert "warning: delta of owner a, b is up to 0.01, above 1/1000" in capsys.readouterr().err


def test_installed_command_runs():
    command = [os.path.join(os.path.dirname(sys.executable), "ownerwise"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"ownerwise {ow.__version__}"


def test_a_reader_that_stops_early_is_no_problem(tmp_path):
    table = tmp_path / "b.csv"
    rows = (f"owner {number},{1 + number % 2},1" for number in range(2000))
    table.write_text("\n".join(["owner,epsilon,records", *rows]))
    program = Path(sys.executable).with_name("ownerwise")
    command = f"{program} plan {table} --steps 20 --batch-size 50 --owners | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_nothing_but_a_plan_is_overwritten(tmp_path, capsys):
    table = tmp_path / "b.csv"
    text = "owner,epsilon,records\na,1,100\nb,2,100\n"
    table.write_text(text)
    assert main(["plan", str(table), *REQUEST, "--out", str(table)]) == 2
    assert "already exists and is not a plan: choose another name" in capsys.readouterr().err
    assert table.read_text() == text
    assert sorted(tmp_path.iterdir()) == [table]
    for _ in range(2):
        assert main(["plan", str(table), *REQUEST, "--out", str(tmp_path / "plan.json")]) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_all_commands_and_their_options(shell, capsys):
    pytest.importorskip("shtab", reason="shtab is not installed (the extra completion)")
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    assert stopped.value.code == 0
    script = capsys.readouterr().out
    for word in ("demo", "plan", "train", "report", "--noise-multiplier", "--resume"):
        assert word in script


def test_the_script_for_a_shell_knows_every_command_and_path(monkeypatch, capsys):
    """Without shtab, too: the parser that shtab gets has all commands, and marks their paths."""
    got = []
    fake = SimpleNamespace(FILE="files", complete=lambda parser, shell: got.append(parser) or shell)
    monkeypatch.setitem(sys.modules, "shtab", fake)
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    assert capsys.readouterr().out == "bash\n"
    (commands,) = (a.choices for a in got[0]._actions if isinstance(a.choices, dict))
    assert {"demo", "plan", "train", "report"} <= set(commands)
    marked = [a.dest for a in commands["train"]._actions if hasattr(a, "complete")]
    assert set(marked) == {"config", "folder", "data_dir"}


def test_without_shtab_completion_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    said = capsys.readouterr().err
    assert "shell completion needs shtab: pip install 'ownerwise[completion]'" in said


def test_a_plan_that_pays_for_statistics(tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_text("owner,epsilon,records\na,1,500\n")
    sizes = ["--steps", "9", "--batch-size", "10"]
    assert main(["plan", str(table), *sizes, "--statistics", "0.05"]) == 0
    assert "on column statistics of all records before training" in capsys.readouterr().out
    assert main(["plan", str(table), *sizes, "--statistics", "2"]) == 2
    assert "statistics.share 2.0: expected more than 0" in capsys.readouterr().err
