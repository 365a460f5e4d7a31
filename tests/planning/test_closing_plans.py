"""Plans that pay for a release from all records after training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds

import ownerwise as ow
from ownerwise.accounting import ClosingRelease, gaussian_mu

DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class Closing:
    """A tenth of the squared mu of the strictest owner, or of `full` if others give less."""

    count: int = 3
    full: float | None = None
    pull: bool = False

    def closing(self, epsilon, delta, records):
        full = epsilon.min() if self.full is None else self.full
        mu = gaussian_mu(float(full), float(delta.min()))
        std = np.sqrt(self.count / 0.1) / mu
        if self.pull:
            largest = gaussian_mu(float(epsilon.max()), float(delta.min()))
            return ClosingRelease(float(std * mu / largest), self.count, mu, largest)
        return ClosingRelease(float(std), self.count, 0.0 if self.full is None else mu)


def make(method="sample", epsilon=(1.0, 3.0, 8.0), full=None, pull=False, **options):
    owners = ow.Owners(np.repeat(np.arange(len(epsilon)), 400), np.array(epsilon), DELTA)
    options = {"steps": 60, "batch_size": 60, **options}
    return ow.plan(owners, method, calibration=Closing(full=full, pull=pull), **options)


def by_dp_accounting(plan, owner, width=1e-4):
    options = {"value_discretization_interval": width}
    rate = float(plan.sampling_rates[owner])
    sampled = plds.from_gaussian_mechanism(
        float(plan.noise_multipliers[owner]), sampling_prob=rate, **options
    )
    composed = sampled.self_compose(plan.steps)
    for number in range(plan.closing_count):
        length = float(plan.closing_lengths(number)[owner])
        composed = composed.compose(
            plds.from_gaussian_mechanism(plan.closing_std / length, **options)
        )
    return composed.get_epsilon_for_delta(DELTA)


@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
@pytest.mark.parametrize(("full", "pull"), [(None, False), (3.0, False), (None, True), (3.0, True)])
def test_every_owner_spends_the_budget_and_no_more(method, full, pull):
    """Every closing sum is composed by itself, with its own length."""
    plan = make(method, full=full, pull=pull)
    assert (plan.closing_shares is None) == (full is None and not pull)
    assert (plan.closing_pulls is None) == (not pull)
    spent = [by_dp_accounting(plan, owner) for owner in range(3)]
    assert (np.array(spent) <= plan.targets).all()
    least = spent[:1] if method == "uniform" else spent
    assert (np.array(least) >= 0.99 * plan.targets[: len(least)]).all()
    np.testing.assert_allclose(plan.epsilon(), spent, rtol=2e-3)


def test_the_release_counts_once_all_steps_are_taken():
    """On the safe side: even if it has not been made yet."""
    plan = make()
    before = plan.epsilon(steps=60, closed=False)
    assert (before < plan.epsilon(steps=60)).all()
    assert (plan.epsilon(steps=60) == plan.epsilon()).all()
    assert (plan.epsilon(steps=59) <= before).all()
    only = plan.epsilon(steps=0, closed=True)
    share = np.sqrt(0.1) * gaussian_mu(1.0, DELTA)
    assert gaussian_mu(float(only[0]), DELTA) == pytest.approx(share, rel=5e-3)
    assert (plan.epsilon(steps=0) == 0).all()


def test_it_leaves_less_for_the_steps():
    owners = ow.Owners(np.repeat(np.arange(3), 400), np.array([1.0, 3.0, 8.0]), DELTA)
    alone = ow.plan(owners, "sample", steps=60, batch_size=60)
    assert make().noise_std > alone.noise_std
    assert alone.closing is None


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_many_budgets_with_a_pull(accountant):
    rng = np.random.default_rng(1)
    epsilon = np.exp(rng.uniform(np.log(0.3), np.log(8), 3000))
    owners = ow.Owners(np.arange(3000), epsilon, DELTA)
    plan = ow.plan(
        owners, "sample", steps=50, batch_size=150, calibration=Closing(pull=True, full=1.0),
        accountant=accountant,
    )  # fmt: skip
    assert plan.closing_pulls is not None
    order = np.argsort(epsilon)
    assert (np.diff(plan.closing_pulls[order]) >= 0).all()
    assert plan.closing_pulls.max() <= 1
    strict = epsilon < 1
    np.testing.assert_allclose(plan.closing_pulls[strict], plan.closing_shares[strict])
    ratio = plan.epsilon() / epsilon
    assert ratio.max() <= 1
    assert ratio.min() > 0.99


def test_pulls_are_stored_hashed_and_verified(tmp_path):
    plan = make(pull=True)
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert (again.closing_pulls == plan.closing_pulls).all()
    assert dataclasses.replace(plan, closing_pulls=None).hash != plan.hash
    with pytest.raises(ow.PlanError, match="spend"):
        dataclasses.replace(plan, closing_pulls=np.ones(3)).verified()
    for change in (
        {"closing_pulls": np.array([1.0, 2.0, 1.0])},
        {"closing_pulls": np.array([-0.1, 0.2, 1.0])},
        {"closing_shares": None},
    ):
        with pytest.raises(ow.PlanError, match="expected"):
            dataclasses.replace(plan, **change).verified()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_many_budgets(accountant):
    """With shares of their own, and far more budgets than the curves have nodes."""
    rng = np.random.default_rng(1)
    epsilon = np.exp(rng.uniform(np.log(0.3), np.log(8), 3000))
    owners = ow.Owners(np.arange(3000), epsilon, DELTA)
    plan = ow.plan(
        owners, "sample", steps=50, batch_size=150, calibration=Closing(full=2.0),
        accountant=accountant,
    )  # fmt: skip
    assert plan.closing_shares is not None
    assert (plan.closing_shares[epsilon > 2.1] == 1).all()
    order = np.argsort(epsilon)
    assert (np.diff(plan.closing_shares[order]) >= 0).all()
    ratio = plan.epsilon() / epsilon
    assert ratio.max() <= 1
    assert ratio.min() > 0.99


def test_it_is_stored_hashed_and_verified(tmp_path):
    plan = make(full=3.0)
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert (again.closing_shares == plan.closing_shares).all()
    assert again.closing_count == 3
    for change in (
        {"closing_std": plan.closing_std / 2},
        {"closing_count": 12},
        {"closing_shares": None},
        {"closing_shares": np.ones(3)},
    ):
        with pytest.raises(ow.PlanError, match="spend"):
            dataclasses.replace(plan, **change).verified()
    for change in (
        {"closing_std": None},
        {"closing_count": 0},
        {"closing_std": -1.0},
        {"closing_shares": np.array([1.0, 2.0, 1.0])},
    ):
        with pytest.raises(ow.PlanError, match="expected"):
            dataclasses.replace(plan, **change).verified()
    assert "3 sums over all records after training" in plan.describe()


def test_what_is_no_release_is_refused():
    with pytest.raises(ow.PlanError, match="calibration=3: expected a release after training"):
        ow.plan(ow.Owners([0, 1], [1.0, 1.0]), steps=2, batch_size=1, calibration=3)
