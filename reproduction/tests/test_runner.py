"""Results are kept and found again; what was killed goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ownerwise.errors import OwnerwiseError
from ownerwise.training.interruption import Interrupted
from ownerwise_reproduction import methods, results, runner, settings
from ownerwise_reproduction.results import Store, data_files, is_current, trial_hash
from ownerwise_reproduction.runner import FailedRuns, run_one, run_trials
from ownerwise_reproduction.trials import Trial

DIGITS = settings.setting("digits")
TINY = ("plan.steps=10", "run.evaluate_every=2", 'plan.accountant="rdp"')


def trial(spec="ino", seed=0, changes=TINY, setting=DIGITS):
    (method,) = methods.parse(spec)
    return Trial(setting, method, seed, "paper", changes)


def timeless(result):
    """A result without what differs from run to run."""
    kept = {key: value for key, value in result.items() if not key.endswith("_seconds")}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in result["history"]]
    return kept | {"history": lines}


class Killed(Exception):
    """Stands for a process that ends in the middle."""


def killed_at(step):
    def report(steps):
        if steps == step:
            raise Killed

    return report


def test_a_result_is_not_made_twice(tmp_path, monkeypatch, capsys):
    store = Store(tmp_path / "results")
    (path,) = run_trials([trial()], store)
    assert path == tmp_path / "results" / "digits" / "ino" / path.name
    assert not path.with_suffix("").exists()  # the run folder is gone
    assert "1 of 1: digits ino seed 0" in capsys.readouterr().err
    written = path.read_bytes()
    monkeypatch.setattr(runner, "run_trial", None)  # nothing is run
    assert run_trials([trial()], store) == [path]
    assert path.read_bytes() == written
    assert "1 of 1 runs are already done" in capsys.readouterr().err
    (result,) = store.read()
    assert result["hash"] == path.stem.rpartition("-")[2]
    assert is_current(result)
    assert not is_current(result | {"changes": ["plan.steps=10"]})


def test_a_result_stored_under_another_heading_is_reported(tmp_path, capsys):
    setting = replace(DIGITS, short=TINY)
    (method,) = methods.parse("ino")
    store = Store(tmp_path)
    short, given = Trial(setting, method, 0, "short"), Trial(setting, method, 0, changes=TINY)
    for asked in (short, short):
        (path,) = run_trials([asked], store)
        assert "already done as" not in capsys.readouterr().err
    assert run_trials([given], store) == [path]
    said = "digits ino seed 0: already done as digits (short profile)\n"
    assert said in capsys.readouterr().err
    run_trials([given], store, quiet=True)
    assert not capsys.readouterr().err


def test_a_result_is_current_until_what_it_was_made_from_changes(tmp_path, monkeypatch):
    private, plain = (
        run_one(trial(spec), tmp_path / spec / "seed-0-x.json") for spec in ("ino", "nonprivate")
    )
    earlier = {k: v for k, v in plain.items() if k not in ("format", "label_noise", "plain_lr")}

    def current():
        return [is_current(result) for result in (private, plain, earlier)]

    assert current() == [True, True, True]
    assert not is_current(earlier | {"config": {}})
    with monkeypatch.context() as patch:
        patch.setattr(settings, "setting", lambda name: replace(DIGITS, plain_lr=0.3))
        assert current() == [True, False, True]
    with monkeypatch.context() as patch:
        patch.setattr(settings, "setting", lambda name: replace(DIGITS, label_noise=0.2))
        assert current() == [False, False, True]
    with monkeypatch.context() as patch:
        patch.setattr(results, "FORMAT", results.FORMAT + 1)
        assert current() == [False, False, False]


def test_names_of_results_stay(monkeypatch):
    """A setting of its own: those of the catalogue may change."""
    text = """
    [experiment]
    title = "a"
    source = "b"
    label_noise = 0.1
    [data]
    name = "digits"
    [owners]
    assignment = { kind = "by_class", evenly = [0.5, 5, 10] }
    delta = 1e-5
    [plan]
    steps = 60
    batch_size = 128
    [model]
    name = "mlp"
    [training]
    lr = 1.0
    """
    monkeypatch.setattr(results, "data_files", lambda name, data_dir: {"file": 7})
    made = trial("nonprivate", setting=settings.make_setting("X", text))
    assert trial_hash(made)[:12] == "efbe4f571ff3"


def test_what_changes_a_result_changes_its_hash(tmp_path, monkeypatch, data_dir):
    mnist = settings.setting("MN-PC")
    same = trial_hash(trial(setting=mnist))
    others = [
        trial(seed=1, setting=mnist),
        trial("idp", setting=mnist),
        trial("ino:0.3", setting=mnist),
        trial(changes=(*TINY, "training.lr=3"), setting=mnist),
    ]
    hashes = {same, *map(trial_hash, others)}
    assert len(hashes) == 5
    # a tail means nothing to IDP-SGD
    assert trial_hash(others[1]) == trial_hash(
        trial("idp", changes=(*TINY, "weights.tail=0.1"), setting=mnist)
    )
    other_data = tmp_path / "data"
    (other_data / "mnist").mkdir(parents=True)
    for file in (data_dir / "mnist").iterdir():
        (other_data / "mnist" / file.name).write_bytes(file.read_bytes() + b"0")
    assert trial_hash(trial(setting=mnist), other_data) not in hashes
    assert trial_hash(trial(setting=mnist), data_dir) == same


def test_folders_count_with_all_their_files(data_dir):
    found = data_files("cifar10", data_dir)
    assert set(found) == {
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
    }
    assert set(data_files("digits")) == {"scikit-learn"}


@pytest.mark.parametrize(
    ("spec", "step"), [("ino", 6), ("ino-order:random", 6), ("sequential:lax-first", 4)]
)
def test_a_killed_run_resumes_with_the_same_result(tmp_path, spec, step):
    whole = run_one(trial(spec), tmp_path / "whole" / "seed-0-x.json")
    path = tmp_path / "killed" / "seed-0-x.json"
    with pytest.raises(Killed):
        run_one(trial(spec), path, report=killed_at(step))
    assert not path.exists()
    assert path.with_suffix("").is_dir()
    steps = []
    resumed = run_one(trial(spec), path, report=steps.append)
    assert min(steps) >= step  # earlier steps are not taken again
    assert timeless(resumed) == timeless(whole)
    assert resumed["train_seconds"] == resumed["history"][-1]["seconds"] > 0


@pytest.mark.long
def test_a_killed_process_can_be_resumed(tmp_path, data_dir):
    """A real kill: nothing of the process can clean up."""
    options = ("--steps", "3000", "--set", "run.evaluate_every=20", "--seeds", "1")
    command = [
        sys.executable,
        "-c",
        "from ownerwise.cli.main import main; raise SystemExit(main())",
    ]
    command += ["experiments", "run", "digits", "--method", "idp", *options]
    results = tmp_path / "results"
    process = subprocess.Popen([*command, "--results", str(results)])
    while not list(results.glob("*/*/seed-0-*/checkpoint-*")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not list(results.glob("*/*/*.json"))
    subprocess.run([*command, "--results", str(results)], check=True)
    subprocess.run([*command, "--results", str(tmp_path / "whole")], check=True)
    (resumed,), (whole,) = Store(results).read(), Store(tmp_path / "whole").read()
    assert timeless(resumed) == timeless(whole)


def test_run_folders_can_be_kept(tmp_path):
    path = tmp_path / "seed-0-x.json"
    run_one(trial(), path, keep_runs=True)
    assert (path.with_suffix("") / "history.jsonl").exists()


@pytest.mark.long
def test_processes_come_to_the_same_results(tmp_path, capfd):
    trials = [trial(seed=1), trial(seed=2)]
    before = os.environ.get("OMP_NUM_THREADS")
    paths = run_trials(trials, Store(tmp_path / "two"), jobs=2)
    assert os.environ.get("OMP_NUM_THREADS") == before
    results = [json.loads(path.read_text()) for path in paths]
    assert [result["seed"] for result in results] == [1, 2]
    assert {result["environment"]["threads"] for result in results} == {1}
    alone = run_one(trials[0], tmp_path / "one" / paths[0].name)
    close = [line["accuracy"] for line in alone["history"]]
    assert [line["accuracy"] for line in results[0]["history"]] == pytest.approx(close, abs=0.02)
    assert "2 of 2" in capfd.readouterr().err


def test_a_run_that_fails_does_not_stop_others(tmp_path):
    impossible = trial(changes=(*TINY, "plan.batch_size=5000"))
    store = Store(tmp_path)
    with pytest.raises(FailedRuns, match="digits ino seed 0: batch_size 5000"):
        run_trials([impossible, trial()], store, quiet=True)
    assert len(store.read()) == 1


def test_stopping_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_trial", stop)
    with pytest.raises(Interrupted, match="run the same command to resume"):
        run_trials([trial()], Store(tmp_path), quiet=True)


def test_missing_data_is_said_before_anything_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    trials = [trial(setting=settings.setting(name)) for name in ("MN-PC", "CA-MLP")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ownerwise_reproduction.data.sources.fetch", _no_network)
        with pytest.raises(OwnerwiseError) as error:
            run_trials(trials, Store(tmp_path), data_dir=tmp_path / "empty")
    assert {text.split(":")[0] for text in error.value.problems} == {"MN-PC", "CA-MLP"}


def _no_network(item, path):
    raise OwnerwiseError("no network")


def test_a_damaged_result_is_named(tmp_path):
    path = tmp_path / "digits" / "idp" / "seed-0-x.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(OwnerwiseError, match="is corrupted: delete it"):
        Store(tmp_path).read()
    with pytest.raises(OwnerwiseError, match="experiments run`"):
        Store(tmp_path / "nothing").read()
