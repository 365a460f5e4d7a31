"""Run folders and checkpoints of version 0.1.0, kept as files, load with the same content.

When a format changes, keep these files: upgrade them on reading, or refuse them with one sentence
and say so here.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.step import read_account

FILES = Path(__file__).parents[1] / "files" / "run-0.1.0"
EPSILON = [0.99906521, 3.99592929]
LAST_LOSS = 0.4501561373704874


def data():
    inputs = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy((inputs[:, 0] > 0).astype(np.int64))


def owners():
    return ow.Owners(["anna"] * 20 + ["ben"] * 40, {"anna": 1.0, "ben": 4.0}, delta=1e-5)


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def resume(folder):
    plan = ow.Plan.load(folder / "plan.json", owners=owners())
    trainer = ow.Trainer(
        model(), plan, lr=0.5, optimizer_options={"momentum": 0.9}, weights=ow.INO(tail=0.4),
        seed=7, folder=folder, name="tiny", evaluate_every=2, progress=False,
    )  # fmt: skip
    inputs, labels = data()
    copies = (inputs[:10].clone(), labels[:10].clone())
    return trainer.fit((inputs, labels), validation=copies, resume=True)


@pytest.fixture
def stopped(tmp_path):
    return Path(shutil.copytree(FILES / "stopped", tmp_path / "stopped"))


def test_a_run_folder_of_0_1_0_is_read_with_its_history_and_epsilon():
    run = ow.Run.load(FILES / "trained")
    assert [line["step"] for line in run.history] == [0, 2, 4, 6, 8]
    assert run.history[-1]["validation"]["loss"] == LAST_LOSS
    assert (run.steps_spent, run.updates, run.seed) == (8, 8, 7)
    np.testing.assert_allclose(run.epsilon(), EPSILON, rtol=1e-8)
    fresh = model()
    fresh.load_state_dict(run.state_dict())
    inputs, labels = data()
    loss = functional.cross_entropy(fresh(inputs[:10]), labels[:10])
    assert float(loss.detach()) == pytest.approx(LAST_LOSS)


def test_a_run_of_0_1_0_resumes_from_where_it_stopped(stopped):
    """Lines so far stay; later ones differ a little, as sums and noise now lie on a grid."""
    before = ow.Run.load(stopped)
    run = resume(stopped)
    finished = ow.Run.load(FILES / "trained")
    assert run.steps_spent == 8
    assert read_account(stopped).spent == 8
    assert not (stopped / "steps.json").exists()
    np.testing.assert_array_equal(run.epsilon(), finished.epsilon())
    assert run.history[: len(before.history)] == before.history
    for line, expected in zip(run.history, finished.history, strict=True):
        assert line["step"] == expected["step"]
        assert line["validation"]["loss"] == pytest.approx(expected["validation"]["loss"], rel=0.3)


def test_a_checkpoint_of_0_1_0_from_an_own_loop_is_restored(tmp_path):
    folder = Path(shutil.copytree(FILES / "own-loop", tmp_path / "own-loop"))
    plan = ow.Plan.load(FILES / "trained" / "plan.json", owners=owners())
    network, stream = model(), ow.SecretStream.from_seed(7)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    step = ow.PrivateStep(
        network, plan, optimizer, functional.cross_entropy, weights=ow.INO(), stream=stream
    )
    step.restore(folder)
    assert step.steps_spent == step.updates == 3
    np.testing.assert_array_equal(step.epsilon(), plan.epsilon(steps=3))
    assert not torch.equal(network.weight, model().weight)
    for batch in ow.PoissonBatches(data(), plan, stream=stream, start=3):
        step(batch)
    assert step.steps_spent == 8


def test_a_run_folder_says_its_format_and_a_future_one_is_refused(stopped):
    path = stopped / "config.json"
    resume(stopped)
    config = json.loads(path.read_text())
    assert config["run_format"] == 2
    assert config["run_id"] == read_account(stopped).run
    assert "run_format" not in ow.Run.load(stopped).config
    path.write_text(json.dumps({**config, "run_format": 3}))
    sentence = (
        r"config.json has format 3, but this version of ownerwise reads format 2 and older ones"
    )
    for attempt in (ow.Run.load, resume):
        with pytest.raises(ow.OwnerwiseError, match=sentence) as caught:
            attempt(stopped)
        assert len(caught.value.problems) == 1


def test_an_account_of_0_1_0_is_upgraded_once_and_never_used_again(stopped):
    """A kill between the two files leaves both: the new account counts."""
    old = (stopped / "steps.json").read_bytes()
    resume(stopped)
    (stopped / "steps.json").write_bytes(old)
    assert ow.Run.load(stopped).steps_spent == 8
    (stopped / "account.db").unlink()
    with pytest.raises(ow.OwnerwiseError, match="account next to the checkpoint is missing"):
        ow.Run.load(stopped)
    with pytest.raises(ow.OwnerwiseError, match="account next to the checkpoint is missing"):
        resume(stopped)


def test_a_folder_of_0_1_0_without_its_account_is_refused(stopped):
    (stopped / "steps.json").unlink()
    for attempt in (ow.Run.load, resume):
        with pytest.raises(ow.OwnerwiseError, match=r"account .* is missing"):
            attempt(stopped)
