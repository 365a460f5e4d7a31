"""Attacks on the release after training: its account, and models and plugs that mix records."""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ownerwise as ow

RECORDS, CLASSES = 300, 3


def setting(steps=20, micro_batch_size=None, model=None, **options):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(0, 1, (RECORDS, 4)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, CLASSES, RECORDS))
    owners = ow.Owners(np.arange(RECORDS) % 3, np.array([1.0, 2.0, 4.0]), 1e-5)
    plan = ow.plan(owners, steps=steps, batch_size=30, calibration=ow.Calibration())
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES) if model is None else model
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
        performance=ow.Performance(micro_batch_size=micro_batch_size), **options,
    )  # fmt: skip
    return step, x, y


def test_a_commit_that_failed_leaves_nothing_uncounted(tmp_path):
    """Another connection holds the account while calibration begins; then it is tried again."""
    step, x, y = setting()
    batches = iter(ow.PoissonBatches((x, y), step.plan))
    for _ in range(5):
        step(next(batches))
    step.save(tmp_path)
    step._account._connection = None
    other = sqlite3.connect(tmp_path / "account.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    connect = sqlite3.connect

    def impatient(*arguments, **keywords):
        return connect(*arguments, **{**keywords, "timeout": 0.05})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", impatient)
        with pytest.raises(ow.OwnerwiseError, match="locked"):
            step.calibrate((x, y))
    other.execute("ROLLBACK")
    other.close()
    step.calibrate((x, y))
    assert step._account.balance.spent == step.plan.steps + step.plan.closing_count
    again, *_ = setting()
    step.save(tmp_path)
    again.restore(tmp_path)
    assert again.steps_spent == step.plan.steps
    assert not again.to_calibrate


class MixesInEvaluation(nn.Linear):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs if self.training else outputs - 1e3 * outputs.mean(dim=0)


class KeepsTheLargest(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return super().forward(x)


@pytest.mark.parametrize("kind", [MixesInEvaluation, KeepsTheLargest])
def test_models_that_mix_or_keep_records_in_evaluation_mode_are_refused(kind):
    """Steps run in training mode, and so do their checks."""
    model = kind(4, CLASSES)
    step, x, y = setting(model=model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ow.OwnerwiseError, match="records"):
        step.calibrate((x, y))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert step.calibration.shift is None


class Remembers(nn.Linear):
    """Adds what the largest input of earlier calls was, kept in an attribute, to its outputs."""

    carried: ClassVar[list[float]] = []  # of the class, so that nothing restores it

    def __init__(self, kind):
        super().__init__(4, CLASSES)
        self.kind = kind
        self.kept: Any = {"float": 0.0, "tensor": torch.zeros(()), "list": [0.0]}[kind]

    def forward(self, x):
        before = float(self.kept[-1] if self.kind == "list" else self.kept)
        self.carried.append(before)
        if not self.training:
            largest = x.abs().max()
            if self.kind == "list":
                self.kept.append(largest)
            else:
                self.kept = float(largest) if self.kind == "float" else largest
        return super().forward(x) + before


@pytest.mark.parametrize("kind", ["float", "tensor", "list"])
def test_what_a_model_keeps_in_attributes_does_not_reach_the_next_records(kind):
    """Records of later pieces were moved by up to 178 times the sensitivity."""
    step, x, y = setting(model=Remembers(kind), micro_batch_size=64)
    Remembers.carried.clear()
    step.calibrate((x, y))
    assert set(Remembers.carried) == {0.0}


class RemembersInPlace(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.kept = torch.zeros(())  # no buffer

    def forward(self, x):
        outputs = super().forward(x) + self.kept
        if not self.training:
            self.kept.copy_(x.abs().max())
        return outputs


def test_a_model_that_keeps_numbers_in_place_is_refused():
    step, x, y = setting(model=RemembersInPlace(4, CLASSES), micro_batch_size=64)
    with pytest.raises(ow.OwnerwiseError, match="kept"):
        step.calibrate((x, y))
    assert step.calibration.released == 0


class CountsCalls(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_model_that_counts_its_calls_is_not_refused():
    """Steps accept it; a refusal after the last step would cost the whole run."""
    step, x, y = setting(model=CountsCalls(4, CLASSES), micro_batch_size=64)
    step.calibrate((x, y))
    assert step.calibration.released == step.plan.closing_count


class OneRow(ow.Calibration):
    def contributions(self, outputs, targets):
        return super().contributions(outputs, targets).mean(dim=0, keepdim=True)


class Counts(ow.Calibration):
    calls = 0

    def contributions(self, outputs, targets):
        self.calls += 1
        return super().contributions(outputs, targets) / self.calls


class ChangesItsMind(ow.Calibration):
    def contributions(self, outputs, targets):
        rows = super().contributions(outputs, targets)
        return rows if len(rows) == 128 else rows[:, :2]


@pytest.mark.parametrize(
    ("kind", "size"), [(OneRow, None), (Counts, None), (Counts, 1), (ChangesItsMind, 128)]
)
def test_contributions_that_are_no_rows_of_single_records_are_refused(kind, size):
    step, x, y = setting(calibration=kind(), micro_batch_size=size)
    with pytest.raises(ow.OwnerwiseError):
        step.calibrate((x, y))


def test_a_collate_that_mixes_records_is_refused():
    def scaled(samples):
        x, y = torch.utils.data.default_collate(samples)
        return x / x.abs().max(), y

    step, x, y = setting()
    with pytest.raises(ow.OwnerwiseError, match="collate"):
        step.calibrate(TensorDataset(x, y), collate=scaled)


def test_a_restored_shift_is_not_subtracted_twice(tmp_path):
    model = nn.Linear(4, CLASSES, bias=False)
    step, x, y = setting(model=model)
    step.calibrate((x, torch.zeros_like(y)))  # a tilt that is far above the noise
    assert step.calibration.shift.abs().max() > 1
    step.save(tmp_path)
    expected = model(x)
    again, *_ = setting(model=model)  # the same module, which has the hook already
    again.restore(tmp_path)
    assert torch.allclose(model(x), expected)


def test_more_records_than_declared_are_refused_before_the_first_step():
    """Not after the last one, at the price of a sum for each attempt."""
    owners = ow.Owners(np.arange(90) % 3, np.array([1.0, 2.0, 4.0]), 1e-5, records=[20, 20, 20])
    plan = ow.plan(owners, steps=4, batch_size=10, calibration=ow.Calibration())
    model = nn.Linear(4, CLASSES)
    with pytest.raises(ow.OwnerwiseError, match="more records than were declared"):
        ow.PrivateStep(
            model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy
        )


def test_a_used_calibration_begins_anew(tmp_path):
    step, x, y = setting(model=nn.Linear(4, CLASSES, bias=False))
    step.calibrate((x, torch.zeros_like(y)))
    assert step.calibration.outside
    other, *_ = setting(calibration=step.calibration)
    other.save(tmp_path)
    again, *_ = setting()
    again.restore(tmp_path)
    assert again.to_calibrate


class ReactsToAnOutlier(nn.Linear):
    """Shifts every output of a call in evaluation mode if one input is huge."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs if self.training or x.abs().max() < 1e3 else outputs + outputs.roll(1, 1)


def test_one_outlier_in_any_piece_is_noticed():
    """The model was checked on pieces 0, 1, 2, 4, 8, 16 and 32 only, which missed most of them."""
    refused = 0
    for run in range(10):
        step, x, y = setting(micro_batch_size=8, model=ReactsToAnOutlier(4, CLASSES))
        x[run] = 1e4
        try:
            step.calibrate((x, y))
        except ow.OwnerwiseError as error:
            refused += "changes with the other records" in str(error)
    assert refused == 10


class Forgets(ow.Calibration):
    """Every sum claims to be the first one, in which lax owners may contribute more."""

    released = 0  # type: ignore[assignment]


def test_a_release_that_miscounts_its_sums_is_refused():
    """All sums had the lengths of the first one: the laxest owner paid for one, and gave three."""
    owners = ow.Owners(np.arange(RECORDS) % 3, np.array([1.0, 2.0, 4.0]), 1e-5)
    plan = ow.plan(owners, steps=20, batch_size=30, calibration=ow.Calibration(pull=True))
    assert float(plan.closing_lengths(0)[2]) > 3 * float(plan.closing_lengths(1)[2])
    model = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, calibration=Forgets())
    with pytest.raises(ow.OwnerwiseError, match="released is 0; expected 1"):
        step.calibrate((torch.randn(RECORDS, 4), torch.randint(0, CLASSES, (RECORDS,))))


def test_a_changed_plan_without_a_pull_is_refused():
    """It passed, and the model was shifted by nan."""
    owners = ow.Owners(np.arange(RECORDS) % 3, np.array([1.0, 2.0, 4.0]), 1e-5)
    plan = ow.plan(owners, steps=20, batch_size=30, calibration=ow.Calibration(pull=True))
    assert plan.closing_pulls is not None
    with pytest.raises(ow.PlanError, match="closing_pulls: 0; expected numbers above 0"):
        dataclasses.replace(plan, closing_pulls=0 * plan.closing_pulls).verified()
    with pytest.raises(ow.PlanError, match="closing_shares are all 0"):
        dataclasses.replace(plan, closing_shares=0 * plan.closing_shares).verified()
