"""Attacks on individual accounting: what is shown about records, and what others can change."""

import json
import os
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import ownerwise as ow
from ownerwise.audit.trade_off import TradeOff
from ownerwise.mechanisms import ClippingRule, IndividualFilter, Sensitivity
from ownerwise.mechanisms.individual_filter import WHOLE
from ownerwise.step.spends_file import save_spends
from tools.step_tools import flat, one_thread, seeded
from tools.step_tools import make_step as step_of

RECORDS = 60

single = pytest.fixture(autouse=True)(one_thread)


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(RECORDS, 4, generator=generator)
    return inputs, torch.arange(RECORDS) % 2


def make_plan(**options) -> ow.Plan:
    owners = ow.Owners(np.arange(RECORDS), np.resize([1.0, 3.0], RECORDS))
    settings = {"method": "individual", "steps": 20, "clipped_steps": 4, "clip_norm": 0.6}
    return ow.plan(owners, **{**settings, **options})


def make_step(model, plan, loss=functional.cross_entropy, **options) -> ow.PrivateStep:
    return step_of(model, loss, plan=plan, **options)


def trained(folder) -> ow.Run:
    torch.manual_seed(0)
    trainer = ow.Trainer(nn.Linear(4, 2), make_plan(), lr=0.05, seed=3, folder=folder, name="run")
    return trainer.fit(data(), validation=data())


def shown(run, folder) -> dict[str, str]:
    """What a run shows, without times and the random name of the run."""
    run.card(folder / "card.md")
    found = {}
    for name in ("card.md", "history.jsonl", "plan.json"):
        text = (folder / name).read_text()
        found[name] = re.sub(r'"seconds": [\d.e-]+|"run_id": "\w+"', "", text)
    return found


def test_no_output_shows_who_is_active(tmp_path, monkeypatch, capsys):
    first = shown(trained(tmp_path / "a"), tmp_path / "a")
    console = capsys.readouterr()

    def other(self) -> np.ndarray:
        return np.arange(len(self), dtype=np.int64) + 12345

    monkeypatch.setattr(IndividualFilter, "spent", property(other))
    monkeypatch.setattr(IndividualFilter, "active", property(lambda self: other(self) > 3))
    second = shown(trained(tmp_path / "b"), tmp_path / "b")
    assert first == second
    assert capsys.readouterr().out == console.out
    assert not any("active" in json.dumps(line) for line in trained(None).history)


def test_spends_are_shown_only_on_request(tmp_path):
    run = trained(tmp_path / "run")
    with pytest.raises(ow.OwnerwiseError, match="not_private=True"):
        run.individual_spends()
    shares = run.individual_spends(not_private=True)
    assert shares.shape == (RECORDS,)
    assert 0 < shares.min() < shares.max() == 1.0
    assert ow.Run.load(tmp_path / "run").individual_spends(not_private=True).max() == 1.0


def test_a_crafted_record_cannot_retire_another_by_the_last_bit():
    """Removing a record must not change a bit of anyone's charge, whatever its contents are."""
    inputs, targets = data()
    plan = make_plan()
    kept = np.arange(1, RECORDS)
    spends = []
    for value in (0.0, 1e6, 1e-30, float("inf")):
        other = inputs.clone()
        other[0] = value
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, stream=seeded())
        batches = ow.PoissonBatches((other, targets), plan, stream=seeded(), steps=3)
        for batch in batches:
            step(batch)
        spends.append(step.filter.spent[kept])
    for other in spends[1:]:
        np.testing.assert_array_equal(other, spends[0])


def test_an_attack_is_capped_by_the_budget():
    plan = make_plan()
    for owner in (0, 1):
        cap = TradeOff.of(plan, owner)
        assert 0.99 * plan.targets[owner] <= cap.epsilon(1e-5) <= plan.targets[owner] * 1.001


def test_an_owner_with_more_records_than_declared_does_not_decide_about_the_step():
    """Such an owner once emptied every step, so removing them added everyone else, uncharged."""
    inputs, targets = data()
    ids = np.repeat([0, 1, 2], [30, 15, 15])
    owners = ow.Owners(ids, {0: 1.0, 1: 2.0, 2: 3.0}, records={0: 15, 1: 15, 2: 15})
    plan = ow.plan(
        owners, method="individual", unit="owner", records_per_owner=None, steps=6,
        clipped_steps=3, clip_norm=0.5,
    )  # fmt: skip
    step = make_step(nn.Linear(4, 2), plan)
    batch = next(iter(ow.PoissonBatches((inputs, targets), plan, stream=seeded())))
    whole = flat(step.clipped_sum(batch))
    keep = torch.from_numpy(batch.owner_index != 0)
    less = ow.batches.Batch(
        0, batch.indices[keep], batch.owner_index[keep], tuple(part[keep] for part in batch.data),
        plan.hash, by_owner=True,
    )  # fmt: skip
    without = flat(step.clipped_sum(less))
    assert float(without.norm()) > plan.clip_norms[0]  # what the others add
    assert float((whole - without).norm()) <= plan.clip_norms[0]


@pytest.mark.parametrize("lengths", [0.0, -0.1])
def test_the_last_contribution_of_a_record_warns_about_nothing(lengths):
    individual = IndividualFilter(make_plan(clip_to_remaining=True), Sensitivity(1e-5, 7e-3))
    individual.load(np.full(RECORDS, WHOLE - 1))
    individual.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        individual.admit(np.arange(RECORDS), np.full(RECORDS, lengths))


class Reversed(ClippingRule):
    """Turns every gradient around, within its clip norm."""

    def factors(self, norms, clip_norms, stream):
        return -clip_norms / torch.maximum(norms, clip_norms)


def test_a_negative_factor_is_charged_like_a_positive_one():
    spends = []
    for rule in (None, Reversed()):
        torch.manual_seed(0)
        step = make_step(nn.Linear(4, 2), make_plan(), clipping=rule)
        for batch in ow.PoissonBatches(data(), step.plan, stream=seeded(), steps=1):
            step(batch)
        spends.append(step.filter.spent)
    np.testing.assert_allclose(spends[1] / WHOLE, spends[0] / WHOLE, rtol=1e-6)


NETWORKS = {
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten()),
    "sequence": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.Flatten()),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_computes_as_much_however_many_records_are_active(network):
    """Rows with the factor 0 were left out of sums, so the time of a step told how many retired."""
    lean = ow.Performance(lean=True)
    step = make_step(NETWORKS[network](), make_plan(), performance=lean)
    batch = next(iter(ow.PoissonBatches(data(), step.plan, stream=seeded())))
    step.clipped_sum(batch)  # the first one checks the model as well
    counts = []
    for spent in (0, WHOLE):
        step.filter.load(np.full(RECORDS, spent, dtype=np.int64))
        with FlopCounterMode(display=False) as counter:
            step.clipped_sum(batch)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_look_at_the_sum_during_a_step_does_not_undo_its_charges():
    """Another thread may ask for a sum while a step is under way."""
    step, looks = None, []

    def loss(outputs, targets, reduction="none"):
        if step is not None and not looks:
            looks.append(threading.Thread(target=step.clipped_sum, args=(empty,)))
        elif len(looks) == 1 and not step.filter.active.all():  # some are charged already
            looks[0].start()
            looks[0].join(timeout=0.2)
            looks.append(None)
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    plan = make_plan(clipped_steps=1, clip_norm=1e-3)
    none = np.zeros(0, dtype=np.int64)
    empty = ow.batches.Batch(0, none, none, data())
    made = make_step(
        nn.Linear(4, 2), plan, loss=loss, performance=ow.Performance(micro_batch_size=20)
    )
    batch = next(iter(ow.PoissonBatches(data(), plan, stream=seeded())))
    step = made
    step.filter.load(np.full(RECORDS, WHOLE // 2))  # the step is too much for everyone
    step(batch)
    looks[0].join()
    assert not step.filter.active.any()


def test_only_the_user_can_read_spends_while_they_are_written(tmp_path, monkeypatch):
    modes = []
    written = Path.write_bytes

    def watched(path, content):
        written(path, content)
        modes.extend(each.stat().st_mode & 0o777 for each in tmp_path.iterdir())

    monkeypatch.setattr(Path, "write_bytes", watched)
    before = os.umask(0)
    try:
        save_spends(tmp_path, 3, "a run", np.arange(5))
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert [*modes, path.stat().st_mode & 0o777] == [0o600, 0o600]


def test_spends_that_a_killed_process_left_half_written_are_deleted(tmp_path):
    step = make_step(nn.Linear(4, 2), make_plan())
    step.save(tmp_path)
    left = tmp_path / ".spends-00000001-0123456789abcdef.safetensors.abcd_123"
    left.write_bytes(b"spends")
    step.save(tmp_path)
    assert not left.exists()
