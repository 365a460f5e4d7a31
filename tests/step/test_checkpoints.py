"""Checkpoints: a run killed at any time resumes within its budgets."""

import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.randomness import (
    SecretStream,
)
from ownerwise.randomness import stream as random
from ownerwise.step import checkpoint_file, checkpoints, read_account
from tools import step_tools as tools
from tools.orders import Shuffled
from tools.processes import fresh_processes

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.5}]),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
}


def data():
    torch.manual_seed(1)
    return torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))


def new_step(seed=None, optimizer="sgd", plan=None, width=5, dtype=torch.float32):
    """A fresh step, always from the same initial model; private without a seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, 3)).to(dtype)
    return ow.PrivateStep(
        model, plan or tools.make_plan(), OPTIMIZERS[optimizer](list(model.parameters())),
        functional.cross_entropy, stream=None if seed is None else tools.seeded(seed),
    )  # fmt: skip


def go_on(step, steps=None, seed=None):
    """Take the next steps, with batches as a resumed run draws them."""
    left = step.plan.steps - step.steps_spent
    stream = None if seed is None else tools.seeded(seed)
    for batch in ow.PoissonBatches(
        data(), step.plan, stream=stream, start=step.steps_spent, steps=min(steps or left, left)
    ):
        step(batch)
    return step


def states(step):
    """All tensors of model and optimizer, by name; and the rest of the optimizer's state."""
    found = dict(step.model.state_dict())
    state = step.optimizer.state_dict()
    for number, values in state["state"].items():
        found |= {f"{number}.{name}": torch.as_tensor(v) for name, v in values.items()}
    return {n: t.clone() for n, t in found.items()}, state["param_groups"]


def assert_same(one, other):
    tensors, groups = states(one)
    tensors_there, groups_there = states(other)
    assert tensors.keys() == tensors_there.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == tensors_there[name].dtype
        assert torch.equal(tensor, tensors_there[name]), name
    assert groups == groups_there


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", [None, 3])
def test_a_round_trip_keeps_everything(tmp_path, optimizer, seed):
    """Pitfall 16: model, optimizer and what is spent, bit for bit."""
    step = go_on(new_step(seed, optimizer), 3, seed)
    path = step.save(tmp_path / "new" / "folder")
    other = new_step(seed, optimizer)
    other.restore(path.parent)
    assert_same(step, other)
    assert (other.updates, other.steps_spent) == (3, 3)
    np.testing.assert_array_equal(other.epsilon(), step.epsilon())
    assert other.private == (seed is None)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("at", [0, 2, 5, 6])
def test_a_resumed_run_with_a_fixed_seed_is_the_uninterrupted_one(tmp_path, optimizer, at):
    """Pitfall 15: no noise, batch or mask is used again or left out."""
    whole = go_on(new_step(8, optimizer), seed=8)
    first = new_step(8, optimizer)
    if at:
        go_on(first, at, seed=8)
    first.save(tmp_path)
    go_on(first, seed=8)  # lost steps are redrawn, not skipped
    assert read_account(tmp_path).spent == 6
    second = new_step(8, optimizer)
    second.restore(tmp_path)
    assert second.steps_spent == at
    assert_same(go_on(second, seed=8), whole)


def test_a_fixed_seed_goes_on_after_a_step_that_failed(tmp_path):
    """The lost step stays lost in both runs: step numbers, not updates, name the noise."""

    def broken_start():
        step = go_on(new_step(8), 1, seed=8)
        with pytest.raises(ow.OwnerwiseError):
            step(ow.Batch(1, np.arange(2), np.zeros(2, dtype=np.int64), (torch.zeros(3, 4),) * 2))
        return go_on(step, 1, seed=8)

    whole = go_on(broken_start(), seed=8)
    broken_start().save(tmp_path)
    resumed = new_step(8)
    resumed.restore(tmp_path)
    assert (resumed.updates, resumed.steps_spent) == (2, 3)
    assert_same(go_on(resumed, seed=8), whole)


def test_lost_steps_of_a_private_run_stay_spent(tmp_path):
    """The model was in the caller's hands after each; the run ends that many updates early."""
    step = go_on(new_step(), 2)
    step.save(tmp_path)
    go_on(step, 2)
    other = new_step()
    other.restore(tmp_path)
    assert (other.updates, other.steps_spent) == (2, 4)
    np.testing.assert_array_equal(other.epsilon(), other.plan.epsilon(steps=4))
    go_on(other)
    assert (other.updates, other.steps_spent) == (4, 6)
    inputs, labels = data()
    with pytest.raises(ow.PlanError, match="all 6 planned steps"):
        other(tools.batch_of(inputs[:3], labels[:3], 6))
    other.save(tmp_path)
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-00000004.safetensors"
    again = new_step()
    again.restore(tmp_path)
    assert (again.updates, again.steps_spent) == (4, 6)


def test_every_restore_counts_the_steps_already_spent(tmp_path):
    """Whoever restores counts on: all models that were ever seen stay within one plan."""
    taken = go_on(new_step(), 1)
    taken.save(tmp_path)
    go_on(taken)
    for _ in range(2):
        step = new_step()
        step.restore(tmp_path)
        assert (step.updates, step.steps_spent) == (1, 6)


def test_two_private_runs_from_one_checkpoint_draw_other_noise(tmp_path):
    """Pitfall 15: a fresh key on resume, so that no (key, counter) is used twice."""
    go_on(new_step(), 1).save(tmp_path)
    found = []
    for _ in range(2):
        step = new_step()
        step.restore(tmp_path)
        inputs, labels = data()
        step(tools.batch_of(inputs[:0], labels[:0], step.steps_spent))
        found.append(tools.weights_of(step.model))
    assert not torch.isclose(found[0], found[1]).all()  # single ones may agree by chance


def test_the_account_is_written_before_the_checkpoint(tmp_path, monkeypatch):
    """Killed in between, the steps are counted; what was there before stays readable."""
    step = go_on(new_step(), 1)
    step.save(tmp_path)

    def fail(contents, file, metadata):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_file, "save_file", fail)
    go_on(step, 2)
    with pytest.raises(KeyboardInterrupt):
        step.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "account.db",
        "checkpoint-00000001.safetensors",
    ]
    other = new_step()
    other.restore(tmp_path)
    assert (other.updates, other.steps_spent) == (1, 3)


def test_no_key_of_a_private_run_is_in_any_file(tmp_path, monkeypatch):
    """Who holds key and position can subtract the noise."""
    keys, derive = [], random._derive

    def noted(secret, info):
        keys.extend([secret, derive(secret, info)])
        return keys[-1]

    monkeypatch.setattr(random, "_derive", noted)
    root = ow.SecretStream()
    model = nn.Linear(4, 3)
    step = ow.PrivateStep(
        model, tools.make_plan(), OPTIMIZERS["adam"](list(model.parameters())),
        functional.cross_entropy, stream=root,
    )  # fmt: skip
    go_on(step, 2)
    step.save(tmp_path)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    assert len(set(keys)) >= 8  # of the root, the batches, the noise
    for key in set(keys):
        for form in (key, key[::-1], key.hex().encode(), repr(key).encode(), key[:8]):
            assert form not in content
    with safe_open(checkpoints.latest(tmp_path), "pt") as file:
        assert json.loads(file.metadata()["ownerwise"])["seed"] is None


def rewrite(path, change):
    """Store a checkpoint again after `change(header, tensors)`, with a right hash."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["ownerwise"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    header["tensors"] = checkpoint_file.tensors_hash(hashlib.sha256(), tensors)
    text = json.dumps(header)
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, metadata={"ownerwise": text, "sha256": digest})


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def shorten(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def account(checkpoint):
    return checkpoint.parent / "account.db"


def replace_account(checkpoint):
    (checkpoint.parent / "other" / "account.db").replace(account(checkpoint))


def go_on_after_copying(checkpoint):
    """Take and store another step; return the account from before."""
    before = account(checkpoint).read_bytes()
    step = new_step()
    step.restore(checkpoint.parent)
    go_on(step, 1).save(checkpoint.parent)
    return before


DAMAGES = {
    "empty": (lambda p: p.write_bytes(b""), "corrupted or not an ownerwise checkpoint"),
    "half": (lambda p: shorten(p, 0.5), "corrupted or not an ownerwise checkpoint"),
    "one byte short": (lambda p: shorten(p, 0.9999), "corrupted or not an ownerwise checkpoint"),
    "a weight": (lambda p: flip(p, -1), "does not match its hash"),
    "the steps": (
        lambda p: p.write_bytes(p.read_bytes().replace(b'steps_spent\\": 2', b'steps_spent\\": 1')),
        "does not match its hash",
    ),
    "foreign": (
        lambda p: save_file({"a": torch.zeros(1)}, p),
        "corrupted or not an ownerwise checkpoint",
    ),
    "text": (
        lambda p: p.write_text("not a checkpoint at all"),
        "corrupted or not an ownerwise checkpoint",
    ),
    "format": (
        lambda p: rewrite(p, lambda h, _: h.update(format=9)),
        "has format 9, but this version of ownerwise reads format 2 and older ones",
    ),
    "tensor lost": (lambda p: rewrite(p, lambda _, t: t.pop("model.0.bias")), "0.bias is missing"),
    "no account": (lambda p: account(p).unlink(), "account .* is missing"),
    "account cut": (lambda p: shorten(account(p), 0.5), "account .* (corrupted|cannot be used)"),
    "account empty": (lambda p: account(p).write_bytes(b""), "account .* is missing"),
    "account of others": (
        lambda p: go_on(new_step(), 2).save(p.parent / "other") and replace_account(p),
        "the account belongs to run .* one of them is from another folder",
    ),
    "account of the past": (
        lambda p: account(p).write_bytes(go_on_after_copying(p)),
        "an old copy that lacks the newest steps was restored",
    ),
    "gone": (lambda p: p.unlink(), "no checkpoint in"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_and_foreign_files_are_refused(tmp_path, name):
    """Refused with the reason, and neither model nor optimizer is touched."""
    change, message = DAMAGES[name]
    path = go_on(new_step(), 2).save(tmp_path)
    before = path.read_bytes()
    change(path)
    assert not path.exists() or path.read_bytes() != before or "account" in name
    assert_refused(new_step(), tmp_path, message)


def assert_refused(step, folder, message):
    fresh = new_step(None, width=step.model[0].out_features, dtype=step.model[0].weight.dtype)
    with pytest.raises(ow.OwnerwiseError, match=message):
        step.restore(folder)
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(tensor, fresh.model.state_dict()[name])
    assert not step.optimizer.state
    assert step.steps_spent == step.updates == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"seed": 3},
            r"a run with a secret key, but this run has the fixed seed 3 \(not private\)",
        ),
        (
            {"width": 6},
            r"a different model: 0.bias is torch.float32 \[5\] in the file .* \[6\] here",
        ),
        ({"dtype": torch.float64}, "a different model: 0.bias is torch.float32"),
        ({"optimizer": "adam"}, "contains the state of SGD, but this run has Adam"),
        ({"optimizer": "groups"}, "contains the state of SGD, but this run has AdamW"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, other, message):
    """Pitfalls 15 and 16: other stream, model or optimizer."""
    go_on(new_step(), 2).save(tmp_path)
    assert_refused(new_step(**other), tmp_path, message)


def test_all_reasons_are_given_at_once(tmp_path):
    go_on(new_step(4), 2, seed=4).save(tmp_path)
    (tmp_path / "account.db").unlink()
    step = new_step(None, plan=tools.make_plan(steps=7), width=6)
    with pytest.raises(ow.OwnerwiseError) as caught:
        step.restore(tmp_path)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in ("belongs to plan", "the fixed seed 4", "account", "a different model"):
        assert part in text


def test_other_groups_of_parameters_are_refused(tmp_path):
    model = nn.Linear(4, 3)

    def step(order):
        groups = [{"params": [p]} for p in list(model.parameters())[::order]]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return ow.PrivateStep(model, tools.make_plan(), optimizer, functional.cross_entropy)

    go_on(step(1), 1).save(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match="different parameter groups"):
        step(-1).restore(tmp_path)
    step(1).restore(tmp_path)


def test_restoring_comes_first(tmp_path):
    step = go_on(new_step(), 1)
    step.save(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match="before its first step"):
        step.restore(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match="no checkpoint in"):
        new_step().restore(tmp_path / "nowhere")


def child(folder: Path, seed: str, ends: str, at: int) -> None:
    """A run in a process of its own that dies: in the middle of a file, or between two steps."""
    torch.set_num_threads(1)
    chosen = None if seed == "None" else int(seed)
    step = new_step(chosen, "adam")
    if checkpoints.latest(folder):
        step.restore(folder)
    if ends == "writing":
        real = checkpoint_file.save_file

        def half(contents, file, metadata):
            if json.loads(metadata["ownerwise"])["updates"] < at:
                return real(contents, file, metadata=metadata)
            real(contents, file, metadata=metadata)
            shorten(Path(file), 0.6)
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint_file.save_file = half
    stream = None if chosen is None else tools.seeded(chosen)
    batches = ow.PoissonBatches(data(), step.plan, stream=stream, start=step.steps_spent)
    for batch in batches:
        step(batch)
        if ends == "between" and step.steps_spent == at:
            os._exit(1)
        if step.updates % 2 == 0:
            step.save(folder)


def run_child(*arguments):
    """Run `child` in a fresh process and return how it ended; imports are done once for all."""
    context = fresh_processes(__name__)
    process = context.Process(target=child, args=arguments)
    process.start()
    process.join(timeout=120)
    return process.exitcode


@pytest.mark.parametrize(("ends", "at"), [("writing", 4), ("between", 3)])
def test_a_run_that_was_killed_goes_on(tmp_path, ends, at):
    """SIGKILL in the middle of writing, or between steps: a half-written file is never read.

    With a fixed seed the end is bit for bit that of the uninterrupted run; a private run has
    spent what its account says, and ends early by the updates that were lost.
    """
    for seed in (6, None):
        folder = tmp_path / str(seed)
        assert run_child(folder, str(seed), ends, at) == (-9 if ends == "writing" else 1)
        assert checkpoints.latest(folder) == folder / "checkpoint-00000002.safetensors"
        if ends == "writing":
            assert any(path.name.startswith(".checkpoint-00000004") for path in folder.iterdir())
        step = new_step(seed, "adam")
        step.restore(folder)
        lost = 0 if seed else at - 2
        assert (step.updates, step.steps_spent) == (2, 2 + lost)
        go_on(step, seed=seed)
        assert (step.updates, step.steps_spent) == (6 - lost, 6)
        if seed:
            assert_same(step, go_on(new_step(seed, "adam"), seed=seed))


@pytest.mark.parametrize("how", ["batches", "peek", "order"])
def test_a_run_that_was_not_private_once_is_not_after_restoring(tmp_path, how):
    data = (torch.randn(90, 3), torch.zeros(90, dtype=torch.int64))
    owners = ow.Owners(np.arange(90) % 3, {0: 0.5, 1: 2.0, 2: 8.0}, 1e-5)
    plan = ow.plan(owners, "sample", steps=6, batch_size=20)

    def step(**options):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, **options)

    known = ow.INO(score_by=Shuffled(SecretStream.from_seed(0)))
    first = step(not_private=how == "peek", weights=known if how == "order" else None)
    stream = SecretStream.from_seed(1) if how == "batches" else None
    for batch in ow.PoissonBatches(data, plan, stream=stream, steps=3):
        first(batch)
    assert not first.private
    first.save(tmp_path)
    secret = ow.INO(score_by=Shuffled())
    second = step(weights=secret if how == "order" else None)
    second.restore(tmp_path)
    assert not second.private
    assert "NOT PRIVATE" in repr(second)


class Forgets(ow.mechanisms.Weights):
    """Cannot load its state."""

    def weights(self, losses, clip_norms, owner_index):
        return np.ones(len(losses))

    def score_slack(self, roundoff):
        return 0.0

    def state(self):
        return {"a": 1}

    def load_state(self, state):
        raise KeyError("b")


@pytest.mark.parametrize("weights", [None, Forgets()], ids=["no plug", "a plug that fails"])
def test_a_restore_that_is_refused_changes_nothing(tmp_path, weights):
    """Else the model of a run that is not private could be trained further as a private one."""

    def make(weights, **options):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return ow.PrivateStep(
            model, tools.make_plan(), optimizer, functional.cross_entropy, weights=weights,
            **options,
        )  # fmt: skip

    stored = make(Forgets(), not_private=True)
    go_on(stored, 2)
    stored.save(tmp_path)
    step = make(weights)
    before = tools.weights_of(step.model).clone()
    with pytest.raises(ow.OwnerwiseError, match="build the step as in the original run"):
        step.restore(tmp_path)
    assert torch.equal(tools.weights_of(step.model), before)
    assert not step.optimizer.state_dict()["state"]
    assert step.private
    assert step.steps_spent == 0
