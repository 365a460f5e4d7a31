"""One folder, one run, one process."""

import os
import signal
import subprocess
import sys

import pytest

import ownerwise as ow
from ownerwise.runs.folders import FolderLock, drop_half_written
from tools import training_tools as tools

HOLD = """
import sys, time
from pathlib import Path
from ownerwise.runs.folders import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_trainer_in_the_process_is_refused(tmp_path):
    with FolderLock(tmp_path / "run"):
        trainer = tools.make_trainer(folder=tmp_path / "run")
        with pytest.raises(ow.OwnerwiseError, match="in use: this process"):
            trainer.fit(tools.data())
        assert not (tmp_path / "run" / "config.json").exists()
    trainer.fit(tools.data())


def test_another_living_process_is_respected_and_a_dead_one_is_not(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ow.OwnerwiseError, match=f"in use: process {process.pid} "):
        tools.make_trainer(folder=tmp_path).fit(tools.data())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (tmp_path / ".holder").read_text() == f"{process.pid}\n"
    tools.make_trainer(folder=tmp_path).fit(tools.data())
    assert not (tmp_path / ".holder").exists()


def test_the_lock_is_released_when_training_fails(tmp_path):
    with pytest.raises(RuntimeError, match="boom"), FolderLock(tmp_path):
        raise RuntimeError("boom")
    with FolderLock(tmp_path):
        assert (tmp_path / ".holder").read_text() == f"{os.getpid()}\n"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ow.OwnerwiseError, match="is a file"):
        tools.make_trainer(folder=tmp_path / "run").fit(tools.data())
    assert (tmp_path / "run").read_text() == "mine"


def test_only_half_written_files_are_removed(tmp_path):
    kept = [".lock", ".gitignore", ".notes.json", "checkpoint-00000001.safetensors", "mine.json"]
    gone = [".checkpoint-00000002.safetensors.abcdefgh", ".config.json.12345678"]
    for name in kept + gone:
        (tmp_path / name).touch()
    drop_half_written(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
