"""The release from all records after training: sums, noise, account, and resuming."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ownerwise as ow
from ownerwise.batches import rows_of
from ownerwise.mechanisms import Closing
from ownerwise.randomness import SecretStream
from ownerwise.step.closing import closing_problems, closing_sum
from ownerwise.step.rounding import GRID_ROOM, GRID_TOLERANCE, LARGEST_SLACK

CLASSES = 4


def setting(records=60, epsilon=(0.5, 4.0), declared=None, steps=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(0, 1, (records, 5)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, CLASSES, records))
    index = np.arange(records) % len(epsilon)
    counts = None if declared is None else np.full(len(epsilon), declared)
    owners = ow.Owners(index, np.array(epsilon), 1e-5, records=counts)
    plan = ow.plan(owners, steps=steps, batch_size=8, calibration=ow.Calibration(**options))
    torch.manual_seed(1)
    return plan, x, y, nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def stream(step=0, seed=3):
    return SecretStream.from_seed(seed).child("test").at_step(step)


def sum_of(plan, model, x, y, closing, at_once=16, seed=3):
    index = plan.owners.record_owner_index
    rows = rows_of((x, y), len(index), None)
    return closing_sum(model, plan, closing, rows, stream(0, seed), stream(1, seed), at_once)


@pytest.mark.parametrize("at_once", [1, 7, 16, 512])
@pytest.mark.parametrize("full", [None, 2.0])
@pytest.mark.parametrize("pull", [False, True])
def test_the_sum_is_that_of_a_float64_loop(at_once, full, pull):
    """Whatever the pieces; each row has the owner's share, or the owner's pull at first."""
    epsilon = (0.02, 4.0) if full else (0.5, 4.0)
    plan, x, y, model = setting(epsilon=epsilon, records=61, pull=pull)
    if full or pull:
        assert plan.closing_shares is not None
    closing = ow.Calibration().bind(plan)
    for number in range(2 + pull):
        shares = plan.closing_shares
        if number == 0 and pull:
            shares = plan.closing_pulls
        if shares is None:
            shares = np.ones(2)
        found = sum_of(plan, model, x, y, closing, at_once)
        expected = np.zeros(CLASSES)
        double = copy.deepcopy(model).double()
        for at in range(len(x)):
            outputs = double(x[at : at + 1].double()).detach()
            row = closing.contributions(outputs, y[at : at + 1]).numpy()[0]
            expected += shares[at % 2] * row / max(1.0, np.linalg.norm(row))
        np.testing.assert_allclose(found.numpy(), expected, rtol=2e-4, atol=1e-4)
        closing.observe(found)


def test_one_record_moves_a_sum_by_at_most_its_share():
    """Every record removed in turn, with the same rows for the others; rounding included."""
    plan, x, y, model = setting(records=40, epsilon=(0.02, 4.0))
    closing = ow.Calibration().bind(plan)
    closing.observe(torch.tensor([10.0, 3.0, 20.0, 7.0]))
    whole = sum_of(plan, model, x, y, closing)
    rows = closing.contributions(model(x).detach(), y)
    for out in range(40):
        share = plan.closing_shares[out % 2]
        without = np.zeros(CLASSES)
        for at in range(40):
            if at != out:
                without += plan.closing_shares[at % 2] * rows[at].double().numpy()
        assert np.linalg.norm(whole.numpy() - without / (1 + 1e-4)) <= share * (1 + 1e-4)


@pytest.mark.parametrize("sampling", ["record", "owner"])
def test_an_owner_moves_all_sums_together_by_at_most_what_is_paid(sampling):
    """Every record, or every owner with all records, removed in turn; extreme outputs; the squared
    lengths over all sums, as they are accounted for, whatever was released before."""
    rng = np.random.default_rng(5)
    x = torch.tensor(rng.normal(0, 50, (40, 5)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, CLASSES, 40))
    index = np.arange(40) % 4
    epsilon = np.array([0.3, 1.0, 3.0, 8.0])
    unit = "owner" if sampling == "owner" else "record"
    given = {"unit": unit, "steps": 4, "batch_size": 2, "calibration": ow.Calibration(pull=True)}
    plan = ow.plan(ow.Owners(index, epsilon, 1e-5), **given)
    assert plan.closing_pulls is not None
    assert np.ptp(plan.closing_pulls) > 0.5
    model = nn.Linear(5, CLASSES)
    with torch.no_grad():
        model.weight.mul_(100)
    moves = range(40) if sampling == "record" else range(4)
    squared = np.zeros(len(moves))
    closing = ow.Calibration().bind(plan)
    for _ in range(plan.closing_count):
        whole = sum_of(plan, model, x, y, closing)
        rows = closing.contributions(model(x).detach(), y).double().numpy()
        shares = plan.closing_lengths(closing.released)
        shares = shares / (10 if sampling == "owner" else 1)
        for at, out in enumerate(moves):
            gone = index == out if sampling == "owner" else np.arange(40) == out
            without = (rows * shares[index, None])[~gone].sum(axis=0)
            squared[at] += ((whole.numpy() - without / (1 + 1e-9)) ** 2).sum()
        closing.observe(torch.tensor(rng.normal(0, 30, CLASSES)))
    paid = plan.closing_count * plan.closing_sensitivities**2
    owner = np.array([out if sampling == "owner" else index[out] for out in moves])
    assert (squared <= paid[owner] * (1 + 1e-4)).all()
    assert (squared.max() >= 0.3 * paid[owner]).any()


class Long(ow.Calibration):
    """Contributions of any length, and some that are not numbers."""

    def contributions(self, outputs, targets):
        rows = 1e3 * super().contributions(outputs, targets)
        rows[targets == 1] = torch.nan
        rows[targets == 2] = torch.inf
        return rows


def test_contributions_are_clipped_whatever_a_release_returns():
    """Those that are not finite add nothing; a model's outputs can overflow for one record, too."""
    plan, x, y, model = setting(records=40, epsilon=(4.0, 4.0))
    total = sum_of(plan, model, x, y, Long().bind(plan))
    expected = np.bincount(y, minlength=CLASSES) * [1, 0, 0, 1]
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-3)
    closing = ow.Calibration().bind(plan)
    closing.observe(total)  # the next sum is one of predictions
    rest = sum_of(plan, model, x, y, closing)
    x[3] = torch.inf
    found = sum_of(plan, model, x, y, closing)
    assert found.isfinite().all()
    assert torch.linalg.vector_norm(found - rest) <= 1


def test_removing_a_record_changes_no_bit_of_the_others():
    """The data set without record 0, whose row stays empty, computed in the same rows."""
    plan, x, y, model = setting(records=30)
    huge = x * 1e6  # last bits decide
    seen = []

    class Watching(ow.Calibration):
        def contributions(self, outputs, targets):
            seen.append(outputs.clone())
            return super().contributions(outputs, targets)

    for data in (huge, torch.cat([huge[:1] * 0, huge[1:]])):
        seen.clear()
        sum_of(plan, model, data, y, Watching().bind(plan), at_once=8)
        pieces = [piece for piece in seen if len(piece) == 8][:3]
        if data is huge:
            before = torch.cat(pieces)
        else:
            same = (torch.cat(pieces) == before).all(dim=1)
            assert int((~same).sum()) <= 1


def test_every_sum_places_records_in_other_secret_rows():
    """Records in their own order, or before the empty rows, would move if one were removed. By
    chance, two orders of 60 records agree in 10 places with probability below 1e-6."""
    plan, x, y, model = setting(records=60, declared=40)
    marked = torch.cat([x[:, :4], torch.arange(1.0, 61.0)[:, None]], dim=1)
    seen = []

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            if len(x) == 80:
                seen.append(x[:, 4].clone())
            return self.inner(x)

    orders = []
    for seed in (3, 4):
        seen.clear()
        sum_of(plan, Marked(), marked, y, ow.Calibration().bind(plan), at_once=80, seed=seed)
        orders.append(seen[-1])  # after those of the check
    own = torch.cat([torch.arange(1.0, 61.0), torch.zeros(20)])
    for one, other in ((orders[0], orders[1]), (orders[0], own), (orders[1], own)):
        assert int(((one == other) & (one > 0)).sum()) < 10
        assert int((one[60:] > 0).sum()) > 0  # empty rows are anywhere


def test_fewer_rows_than_declared_are_fine_and_more_are_refused():
    plan, x, y, model = setting(records=30, declared=25, epsilon=(2.0, 2.0))
    total = sum_of(plan, model, x, y, ow.Calibration().bind(plan))
    np.testing.assert_allclose(total.numpy(), np.bincount(y, minlength=CLASSES), rtol=1e-3)
    plan, x, y, model = setting(records=30, declared=14)
    with pytest.raises(ow.OwnerwiseError, match="more records than were declared"):
        sum_of(plan, model, x, y, ow.Calibration().bind(plan))


class Mixing(ow.Calibration):
    def contributions(self, outputs, targets):
        rows = super().contributions(outputs, targets)
        return rows - rows.mean(dim=0)


def test_contributions_that_mix_records_are_refused():
    plan, x, y, model = setting()
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        sum_of(plan, model, x, y, Mixing().bind(plan))


def make_step(plan, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, **options)


def train(step, data, start=0):
    for batch in ow.PoissonBatches(data, step.plan, start=start):
        step(batch)


def test_an_own_loop_calibrates_once():
    plan, x, y, model = setting(records=300)
    step = make_step(plan, model)
    train(step, (x, y))
    before = copy.deepcopy(model.state_dict())
    step.calibrate((x, y))
    shift = step.calibration.shift
    bias = before["2.bias"] - model.state_dict()["2.bias"]
    assert torch.allclose(bias, shift.float(), atol=1e-6)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items() if n != "2.bias")
    assert step.private
    assert (step.epsilon() == plan.epsilon()).all()
    with pytest.raises(ow.PlanError, match="already been calibrated"):
        step.calibrate((x, y))


def test_steps_that_were_not_taken_count_as_spent():
    plan, x, y, model = setting()
    step = make_step(plan, model)
    step.calibrate(TensorDataset(x, y))
    assert step.steps_spent == plan.steps
    with pytest.raises(ow.PlanError, match="all 4 planned steps"):
        train(step, (x, y))


def test_a_plan_without_a_release_has_no_calibration():
    plan, x, y, model = setting()
    plain = ow.plan(plan.owners, steps=4, batch_size=8)
    with pytest.raises(ow.PlanError, match="does not account for a release after training"):
        make_step(plain, model).calibrate((x, y))
    with pytest.raises(ow.OwnerwiseError, match="does not account for a release after training"):
        make_step(plain, model, calibration=ow.Calibration())


def test_the_noise_has_the_std_of_the_plan():
    """400 sums of 4 numbers; the variance is within 20% (five standard errors: 18%)."""
    plan, _, _, model = setting(records=40)
    noises = []
    for _ in range(400):
        step = make_step(plan, model)
        noises.append(step._randomness.closing(0, torch.zeros(CLASSES, dtype=torch.float64)))
    assert torch.cat(noises).var().sqrt().item() == pytest.approx(plan.closing_std, rel=0.1)


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_a_sum_is_never_released_twice(tmp_path, killed_after):
    """A crash after sums that were paid for: they are lost, and the account has no room left."""
    plan, x, y, model = setting(records=300)
    step = make_step(plan, model)
    step.open_account(tmp_path)
    train(step, (x, y))
    step.save(tmp_path)
    released = []
    original = step._randomness.closing

    def noised(number, total):
        if len(released) == killed_after:
            raise KeyboardInterrupt  # after the sum was counted, before its noise
        released.append(number)
        return original(number, total)

    step._randomness.closing = noised
    with pytest.raises(KeyboardInterrupt):
        step.calibrate((x, y), after_sum=lambda: step.save(tmp_path, stays_open=True))
    torch.manual_seed(1)
    again = make_step(plan, nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)))
    again.restore(tmp_path)
    assert again.steps_spent == plan.steps
    assert again.to_calibrate
    again.calibrate((x, y))
    sums = again.calibration.state()["sums"]
    assert len(sums) == plan.closing_count
    assert [total is None for total in sums] == [
        number == killed_after for number in range(plan.closing_count)
    ]
    assert (again.calibration.shift is None) == (killed_after == 0)
    assert again._account.balance.spent == plan.steps + plan.closing_count


def test_a_shift_without_a_bias_survives_a_restore(tmp_path):
    plan, x, y, _ = setting(records=300, epsilon=(8.0, 8.0))
    y = torch.where(torch.arange(300) % 5 > 0, 0, y)  # far from what the model predicts

    def build():
        torch.manual_seed(2)
        return nn.Linear(5, CLASSES, bias=False)

    model = build()
    step = make_step(plan, model)
    train(step, (x, y))
    step.calibrate((x, y))
    step.save(tmp_path)
    again = make_step(plan, build())
    again.restore(tmp_path)
    assert not again.to_calibrate
    assert torch.allclose(again.model(x), model(x))
    assert not torch.allclose(model(x), functional.linear(x, model.weight))


def test_what_is_no_closing_release_is_refused():
    plan, _, _, model = setting()
    with pytest.raises(ow.OwnerwiseError, match=r"calibration=True|calibration=<bool"):
        make_step(plan, model, calibration=True)
    assert issubclass(ow.Calibration, Closing)


def test_tiny_shares_are_refused_before_anything_is_spent():
    """The grid would be too fine for float64, which was found out only after a sum was charged."""
    plan = setting()[0]
    shares = np.array([1e-9, 1.0])
    tiny = dataclasses.replace(plan, closing_shares=shares)
    (problem,) = closing_problems(tiny)
    assert "who contribute 1e-09 per record" in problem
    assert closing_problems(dataclasses.replace(tiny, closing_shares=None)) == []


@pytest.mark.parametrize("slack", [GRID_TOLERANCE, 1e-3, 0.016, LARGEST_SLACK])
def test_the_grid_fits_into_the_slack(slack):
    assert (1 + slack - GRID_TOLERANCE) / (1 + slack) + GRID_ROOM <= 1 + 1e-16
