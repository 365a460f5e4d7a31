"""`ownerwise train`, on scikit-learn's digits."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ownerwise.cli import train as train_command
from ownerwise.cli.main import main
from ownerwise.runs import (
    Run,
)
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"


CLASSES = '{low = ["0", "1", "2", "3", "4"], high = ["5", "6", "7", "8", "9"]}'
HALVES = f'{{kind = "by_classes", classes = {CLASSES}, budgets = [1, 5]}}'
CHANGES = ("plan.steps=12", "run.seed=1", "plan.method=uniform", f"owners.assignment={HALVES}")
QUICK = [part for change in CHANGES for part in ("--set", change)]


def train(folder, *arguments):
    return main(["train", str(EXAMPLE), "--folder", str(folder), *arguments])


def no_report(monkeypatch):
    """Leave out what has tests of its own and takes seconds."""
    monkeypatch.setattr(Run, "report", lambda self, path: None)
    monkeypatch.setattr(Run, "card", lambda self, path: None)


def test_the_example_trains_and_leaves_a_whole_folder(tmp_path, capsys):
    assert train(tmp_path / "run") == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {
        "config.json", "plan.json", "plan.safetensors", "history.jsonl", "account.db",
        "environment.json", "report.html", "CARD.md", "checkpoint-00000200.safetensors",
    }  # fmt: skip
    run = Run.load(tmp_path / "run")
    assert run.private
    assert (run.name, run.label) == ("digits", "INO-SGD")
    assert run.history[-1]["validation"]["accuracy"] > 0.8
    assert (run.epsilon() <= run.plan.targets).all()
    last = capsys.readouterr().out.splitlines()[-4:]
    assert re.match(
        r"validation accuracy 0\.\d+ \(always '\d': 0\.\d+\), worst group \d 0\.\d+ \(no guarantee",
        last[0],
    )
    assert re.match(r"test accuracy 0\.\d+ \(always '\d': 0\.\d+\), worst group", last[1])
    assert re.match(
        r"epsilon spent per record 0\.99\d* to 9\.99\d*, budgets 1 to 10; unit", last[2]
    )
    assert last[3] == f"Written to {tmp_path / 'run'}: report.html, CARD.md, history.jsonl"
    assert "<html" in (tmp_path / "run" / "report.html").read_text()[:200].lower()
    assert "digits" in (tmp_path / "run" / "CARD.md").read_text()


def test_a_fixed_seed_is_said_to_be_not_private(tmp_path, capsys):
    assert train(tmp_path, *QUICK) == 0
    assert "NOT PRIVATE: fixed seed 1" in capsys.readouterr().out
    assert "NOT PRIVATE" in (tmp_path / "CARD.md").read_text().upper()


def test_bad_configurations_list_everything_and_write_nothing(tmp_path, capsys):
    code = train(
        tmp_path / "run", "--set", "training.lrr=1", "--set", "plan.steps=-1", "--set", "data=3"
    )
    assert code == 2
    error = capsys.readouterr().err
    assert "3 problems\n" in error
    assert "did you mean 'lr'?" in error
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused(tmp_path, capsys, monkeypatch):
    no_report(monkeypatch)
    assert train(tmp_path, *QUICK) == 0
    assert train(tmp_path, *QUICK) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert train(tmp_path, *QUICK, "--resume") == 0
    assert train(tmp_path, *QUICK, "--resume", "--set", "training.lr=0.1") == 2
    assert "optimizer.lr was 1.0 and is now 0.1" in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_resume_ends_like_the_whole_run(tmp_path, monkeypatch):
    """A real Ctrl-C: the end is bit for bit that of the run that was left alone."""
    command = os.path.join(os.path.dirname(sys.executable), "ownerwise")
    options = [*QUICK, "--set", "plan.steps=150", "--set", "run.evaluate_every=5"]
    process = subprocess.Popen(
        [command, "train", str(EXAMPLE), *options, "--folder", str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # as in a terminal, also where the tests themselves run with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    history, end = tmp_path / "run" / "history.jsonl", time.monotonic() + 100
    while time.monotonic() < end and not (history.exists() and history.read_text().count("\n") > 1):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(r"stopped after \d+ of 150 steps; no progress is lost: .*--resume", error)
    assert not (tmp_path / "run" / "CARD.md").exists()
    no_report(monkeypatch)
    for folder in ("run", "whole"):
        assert train(tmp_path / folder, *options, "--resume") == 0
    assert tools.same(tools.stored(tmp_path / "run"), tools.stored(tmp_path / "whole"))
    one, other = (tools.timeless(tools.lines(tmp_path / name)) for name in ("run", "whole"))
    assert one == other


def test_a_folder_without_a_run_is_named_when_one_is_to_be_resumed(tmp_path, capsys, monkeypatch):
    no_report(monkeypatch)
    assert train(tmp_path / "mistyped", *QUICK, "--resume") == 0
    assert "mistyped: starting a new one" in capsys.readouterr().err
    assert train(tmp_path / "mistyped", *QUICK, "--resume") == 0
    assert "starting a new one" not in capsys.readouterr().err


def test_ctrl_c_before_anything_began_exits_with_130(monkeypatch, capsys, tmp_path):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ownerwise.config.prepare_run", stop)
    assert train(tmp_path / "run") == 130
    assert capsys.readouterr().err == "ownerwise: stopped\n"


def test_without_plotly_the_card_is_written_and_the_report_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert train(tmp_path, *QUICK) == 0
    captured = capsys.readouterr()
    assert "pip install 'ownerwise[report]'" in captured.err
    assert "Written to" in captured.out
    assert (tmp_path / "CARD.md").exists()


def test_sigterm_stops_a_command_like_ctrl_c(monkeypatch, capsys):
    """And only while the command runs."""

    def stopped(options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train_command, "_run", stopped)
    assert main(["train", "config.toml"]) == 130
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
