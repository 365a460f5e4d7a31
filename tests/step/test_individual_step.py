"""Individual accounting in the private step: who moves the sum, by how much, and until when."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import Randomness, Standard
from ownerwise.mechanisms.individual_filter import WHOLE
from ownerwise.processes import Processes
from ownerwise.step.checks import individual_problems
from ownerwise.step.rounding import CHARGED_NORM_ERROR
from tools.step_tools import (
    double_on_one_thread,
    flat,
    one_thread,
    run_steps,
    seeded,
    weights_of,
)

RECORDS, STEPS = 24, 30
EPSILON = {0: 0.5, 1: 1.0, 2: 2.0}

single = pytest.fixture(autouse=True)(one_thread)
double = pytest.fixture(double_on_one_thread)


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(RECORDS, 5, generator=generator)
    inputs *= torch.linspace(0.05, 3.0, RECORDS)[:, None]  # small and large gradients
    return inputs, (torch.arange(RECORDS) * 7) % 3


def owners(**options) -> ow.Owners:
    return ow.Owners(np.arange(RECORDS) % 3, EPSILON, **options)


def make_plan(**options) -> ow.Plan:
    settings = {"method": "individual", "steps": STEPS, "clipped_steps": 5, "clip_norm": 0.8}
    return ow.plan(owners(), **{**settings, **options})


def make_step(plan, *, lr=0.5, **options) -> ow.PrivateStep:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"stream": seeded(), **options}
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, **options)


def batch_at(step, records) -> ow.batches.Batch:
    at = step.steps_spent
    batches = ow.PoissonBatches(records, step.plan, stream=seeded(), start=at, steps=1)
    return next(iter(batches))


def sum_of(step, records) -> torch.Tensor:
    """The sum of the next step, which is not taken."""
    return flat(step.clipped_sum(batch_at(step, records), Randomness()))


def slow_run(plan, slack: float, steps: int, lr: float) -> tuple[torch.Tensor, np.ndarray]:
    """The obvious loop over records, in float64; returns the last sum and who was active in it."""
    inputs, targets = data()
    owner = np.arange(RECORDS) % 3
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    step = make_step(plan, lr=lr)
    spent = np.zeros(RECORDS)
    gone = np.zeros(RECORDS, dtype=bool)
    for number in range(steps):
        model.load_state_dict(step.model.state_dict())
        total, active = torch.zeros(18), np.zeros(RECORDS, dtype=bool)
        for record in range(RECORDS):
            clip = float(plan.clip_norms[owner[record]])
            loss = functional.cross_entropy(model(inputs[[record]]), targets[[record]])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([part.flatten() for part in parts])
            length = float(gradient.norm())
            clipped = gradient * min(1.0, clip / (1 + slack) / length)
            change = min(clip, float(clipped.norm()) * (1 + CHARGED_NORM_ERROR) + slack * clip)
            cost = (change / plan.noise_std) ** 2 / float(plan.filter_limits[owner[record]])
            if gone[record] or spent[record] + cost > 1:
                gone[record] = True
                continue
            spent[record] += cost
            active[record] = True
            total += clipped
        if number + 1 < steps:
            step(batch_at(step, data()))
    return total, active


def test_the_sum_is_that_of_the_obvious_loop(double):
    plan = make_plan(clip_norm=2.0)
    for steps in (1, 6, 12):
        step = make_step(plan, lr=0.01)
        slow, active = slow_run(plan, step.slack, steps, lr=0.01)
        run_steps(step, data(), steps - 1, seed=5)
        torch.testing.assert_close(sum_of(step, data()), slow, rtol=1e-9, atol=1e-12)
    assert 0 < active.sum() < RECORDS


def test_a_retired_record_never_moves_the_sum_again():
    step = make_step(make_plan(), not_private=True)
    inputs, targets = data()
    retired = np.zeros(RECORDS, dtype=bool)
    compared = 0
    for number in range(STEPS):
        plain = sum_of(step, (inputs, targets))
        assert not (retired & step.filter.active).any()
        for record in np.flatnonzero(retired)[::3]:
            for value in (0.0, 1e4, float("nan")):
                other = inputs.clone()
                other[record] = value
                changed = sum_of(step, (other, targets))
                assert torch.equal(changed, plain)  # not a single bit
                compared += 1
        step(batch_at(step, (inputs, targets)))
        retired = ~step.peek.active
        assert number < 5 or retired.any()
    assert compared > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("to_remaining", [False, True])
def test_no_record_changes_the_sum_by_more_than_it_is_charged(dtype, to_remaining):
    plan = make_plan(clip_to_remaining=to_remaining)
    inputs, targets = data()
    inputs = inputs.to(dtype)
    step = make_step(plan)
    step.model.to(dtype)
    room = plan.filter_limits[np.arange(RECORDS) % 3] * plan.noise_std**2
    tight = 0
    for _ in range(12):
        whole = sum_of(step, (inputs, targets)).double()
        batch = batch_at(step, (inputs, targets))
        moved = []
        for record in range(RECORDS):
            kept = np.delete(np.arange(RECORDS), record)
            less = ow.batches.Batch(
                batch.step, kept, batch.owner_index[kept],
                (inputs[kept], targets[kept]), step.plan.hash,
            )  # fmt: skip
            moved.append(float((flat(step.clipped_sum(less, Randomness())) - whole).norm()))
        before = step.filter.spent
        step(batch)
        charged = np.sqrt((step.filter.spent - before) / WHOLE * room)
        used = np.array(moved)
        assert (used <= charged).all()
        tight += int((used > 0.95 * charged).sum())
    assert tight > 10


def test_norms_from_gram_matrices_are_charged_in_full():
    """Nearly cancelling terms make such norms imprecise; the charge must not be too small."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(RECORDS, 1, 6, generator=generator) * 300
    inputs = base + torch.randn(RECORDS, 12, 6, generator=generator)
    targets = torch.arange(RECORDS) % 3

    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 64)
            self.register_buffer("signs", torch.tensor([1.0, -1.0] * 6))
            self.register_buffer("last", torch.randn(64, 3, generator=generator))

        def forward(self, x):
            return (self.layer(x) * self.signs[:, None]).sum(1) @ self.last * 1e-3

    torch.manual_seed(0)
    model, plan = Signed(), make_plan(clip_norm=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ow.PrivateStep(
        model, plan, optimizer, functional.cross_entropy, stream=seeded(), not_private=True
    )
    step(batch_at(step, (inputs, targets)))
    exact = Signed().double()
    exact.load_state_dict(model.state_dict())
    clips = plan.clip_norms[np.arange(RECORDS) % 3]
    room = plan.filter_limits[np.arange(RECORDS) % 3] * plan.noise_std**2
    charged = np.sqrt(step.filter.spent / WHOLE * room)
    for record in range(RECORDS):
        loss = functional.cross_entropy(exact(inputs[[record]].double()), targets[[record]])
        parts = torch.autograd.grad(loss, list(exact.parameters()))
        length = float(torch.cat([part.flatten() for part in parts]).norm())
        assert charged[record] >= min(length, clips[record] / (1 + step.slack))


def test_spends_do_not_depend_on_micro_batches(double):
    spends = []
    for size in (None, 1, 7):
        step = make_step(make_plan(), performance=ow.Performance(micro_batch_size=size))
        run_steps(step, data(), 12, seed=5)
        spends.append(step.filter.spent / WHOLE)
    np.testing.assert_allclose(spends[1], spends[0], rtol=1e-9)
    np.testing.assert_allclose(spends[2], spends[0], rtol=1e-9)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole = make_step(make_plan())
    run_steps(whole, data(), STEPS, seed=5)
    first = make_step(make_plan())
    run_steps(first, data(), 11, seed=5, folder=tmp_path)
    again = make_step(make_plan())
    run_steps(again, data(), STEPS, seed=5, folder=tmp_path, restore=True)
    np.testing.assert_array_equal(again.filter.spent, whole.filter.spent)
    assert torch.equal(weights_of(again.model), weights_of(whole.model))


def spends_path(checkpoint):
    (found,) = checkpoint.parent.glob(checkpoint.name.replace("checkpoint-", "spends-")[:-12] + "*")
    return found


def checkpoint_of(tmp_path, steps: int = 3):
    step = make_step(make_plan(), stream=None)
    for batch in ow.PoissonBatches(data(), step.plan, steps=steps):
        step(batch)
    return step, step.save(tmp_path)


def test_lost_steps_are_charged_as_if_everyone_was_clipped(tmp_path):
    step, _ = checkpoint_of(tmp_path)
    stored = step.filter.spent
    for batch in ow.PoissonBatches(data(), step.plan, start=3, steps=1):
        step(batch)  # counted in the account, and not saved
    restored = make_step(make_plan(), stream=None)
    restored.restore(tmp_path)
    lost = restored.steps_spent - 3
    assert lost >= 1
    assert (restored.filter.spent >= step.filter.spent).all()
    one = (WHOLE - stored) // 5 // lost  # at most a fifth of a budget per step
    assert (restored.filter.spent - stored >= np.minimum(one, 1)).all()
    clipped = make_step(make_plan())
    clipped.filter.load(stored)
    clipped.filter.charge_lost(lost)
    np.testing.assert_array_equal(restored.filter.spent, clipped.filter.spent)


def test_spends_are_in_a_file_that_only_its_owner_can_read(tmp_path):
    step, path = checkpoint_of(tmp_path)
    spends = spends_path(path)
    assert os.stat(spends).st_mode & 0o777 == 0o600
    secret = step.filter.spent.tobytes()
    assert secret in spends.read_bytes()
    for other in tmp_path.iterdir():
        if other != spends:
            content = other.read_bytes()
            assert not any(secret[8 * i : 8 * i + 8] in content for i in range(RECORDS))


def test_only_the_spends_of_stored_checkpoints_are_kept(tmp_path):
    step = make_step(make_plan(), stream=None)
    for batch in ow.PoissonBatches(data(), step.plan, steps=4):
        step(batch)
        step.save(tmp_path)
        step.save(tmp_path)  # again, under another name
    names = sorted(path.name[:-12] for path in tmp_path.glob("checkpoint-*.safetensors"))
    assert names == ["checkpoint-00000003", "checkpoint-00000004"]
    names = sorted(path.name[:15] for path in tmp_path.glob("spends-*.safetensors"))
    assert names == ["spends-00000003", "spends-00000004"]


def test_a_crash_between_the_two_files_loses_nothing(tmp_path, monkeypatch):
    step, path = checkpoint_of(tmp_path)
    kept = path.read_bytes()
    step.save(tmp_path)  # the same number again: new spends, and then the checkpoint is lost
    monkeypatch.setattr("ownerwise.step.checkpoints.write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step.save(tmp_path)
    assert path.read_bytes() != kept
    restored = make_step(make_plan(), stream=None)
    restored.restore(tmp_path)
    np.testing.assert_array_equal(restored.filter.spent, step.filter.spent)


@pytest.mark.parametrize("harm", ["missing", "damaged", "other run", "older", "other order"])
def test_spends_that_are_not_intact_are_refused(tmp_path, harm):
    _, path = checkpoint_of(tmp_path / "run")
    spends, plan = spends_path(path), make_plan()
    if harm == "missing":
        spends.unlink()
    elif harm == "damaged":
        content = bytearray(spends.read_bytes())
        content[-1] ^= 1
        spends.write_bytes(content)
    elif harm == "other run":
        _, other = checkpoint_of(tmp_path / "other")
        spends.write_bytes(spends_path(other).read_bytes())
    elif harm == "older":
        step = make_step(make_plan(), stream=None)
        step.restore(tmp_path / "run")
        old = spends.read_bytes()
        for batch in ow.PoissonBatches(data(), step.plan, start=step.steps_spent, steps=1):
            step(batch)
        spends = spends_path(step.save(tmp_path / "run"))
        spends.write_bytes(old)
    else:
        order = (np.arange(RECORDS) + 1) % 3
        plan = ow.plan(
            ow.Owners(order, EPSILON), method="individual", steps=STEPS, clipped_steps=5,
            clip_norm=0.8,
        )  # fmt: skip
        assert plan == make_plan()  # only the order of the records differs
    step = make_step(plan, stream=None)
    before = weights_of(step.model)
    with pytest.raises(ow.OwnerwiseError, match="spends"):
        step.restore(tmp_path / "run")
    assert torch.equal(weights_of(step.model), before)


def test_what_a_zero_gradient_can_still_change_is_refused():
    plan = make_plan()
    with pytest.raises(ow.OwnerwiseError, match="gradient of 0"):
        make_step(plan, weights=ow.INO())
    with pytest.raises(ow.OwnerwiseError, match="whole clip norm"):
        make_step(plan, clipping=ow.ImportanceSampling())
    with pytest.raises(ow.OwnerwiseError, match="private"):
        make_step(plan, repair=ow.PullAdjustment(tau=1.0, counts=np.full((3, 3), 100)))


@pytest.mark.parametrize("rule", [ow.AutoS(), ow.Psac()])
def test_other_clipping_rules_are_charged_for_what_they_contribute(rule):
    step = make_step(make_plan(), clipping=rule)
    run_steps(step, data(), 5, seed=5)
    assert step.filter.active.all()
    for _ in range(3):  # both scale gradients up to nearly the clip norm, or beyond it
        step(batch_at(step, data()))
    assert not step.filter.active.any()


def test_an_owner_is_charged_for_all_records_together():
    inputs, targets = data()
    plan = ow.plan(
        owners(), method="individual", unit="owner", records_per_owner=None, steps=STEPS,
        clipped_steps=4, clip_norm=0.8, mixture=0.0,
    )  # fmt: skip
    step = make_step(plan, not_private=True)
    assert len(step.filter) == 3
    retired = np.zeros(3, dtype=bool)
    for _ in range(STEPS):
        plain = sum_of(step, (inputs, targets))
        for owner in np.flatnonzero(retired):
            other = inputs.clone()
            other[owner::3] = 1e3
            assert torch.equal(sum_of(step, (other, targets)), plain)
        step(batch_at(step, (inputs, targets)))
        retired = ~step.peek.active
    assert retired.any()


def test_the_rows_of_an_owner_do_not_depend_on_another_owner():
    from ownerwise.step.secret_rows import place

    plan = ow.plan(
        owners(records={0: 8, 1: 10, 2: 8}), method="individual", unit="owner",
        records_per_owner=None, steps=5,
    )  # fmt: skip
    batch = next(iter(ow.PoissonBatches(data(), plan)))
    rows = place(batch, plan.hardened_rows, None, plan.records)
    assert len(rows) == plan.hardened_rows == 26
    keep = batch.owner_index != 1
    less = ow.batches.Batch(
        0, batch.indices[keep], batch.owner_index[keep],
        tuple(part[torch.from_numpy(keep)] for part in batch.data), plan.hash, by_owner=True,
    )  # fmt: skip
    without = place(less, plan.hardened_rows, None, plan.records)
    same = np.repeat([True, False, True], [8, 10, 8])
    assert torch.equal(without.inputs[same], rows.inputs[same])
    assert (without.inputs[~same] == 0).all()
    np.testing.assert_array_equal(without.occupied, [1, 0, 1])


def test_several_processes_are_refused():
    """Each would know the spends of its own records only."""
    plan = SimpleNamespace(filter="ordinary")
    (problem,) = individual_problems(Standard(), None, None, plan, Processes(0, 2))
    assert "2 processes with individual accounting" in problem
    assert not list(individual_problems(Standard(), None, None, plan, Processes()))
