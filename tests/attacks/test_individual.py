"""Attacks on individual accounting: what is shown about records, and what others can change."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.audit.trade_off import TradeOff
from ownerwise.mechanisms import IndividualFilter
from tools.step_tools import one_thread, seeded

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


def test_audits_that_assume_canaries_stay_active_are_refused():
    with pytest.raises(ow.OwnerwiseError, match="retire"):
        ow.audit.conformance(make_plan(), canaries=20)
    with pytest.raises(ow.OwnerwiseError, match="retire"):
        ow.audit.one_run(None, make_plan(), canaries=20)


def test_an_attack_is_capped_by_the_budget():
    plan = make_plan()
    for owner in (0, 1):
        cap = TradeOff.of(plan, owner)
        assert 0.99 * plan.targets[owner] <= cap.epsilon(1e-5) <= plan.targets[owner] * 1.001
