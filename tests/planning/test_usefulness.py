"""Plans that cannot be of use say so, with what would help; advice on steps, batch and noise."""

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.planning import PlanRequest, advise
from ownerwise.planning.usefulness import LEAST_SIGNAL, signal_of, signal_to_noise


def owners(epsilon, count=300, **options):
    return ow.Owners(np.arange(count), np.full(count, epsilon), **options)


def test_the_signal_is_that_of_gradients_that_agree():
    """By simulation: all records push one way by their clip norm (false alarm below 1e-6)."""
    plan = ow.plan(owners(1.0), "both", steps=200, batch_size=30, clip_norm=0.5,
                   noise_schedule="exponential")  # fmt: skip
    generator = np.random.default_rng(0)
    ends = []
    for _ in range(4000):
        drawn = generator.binomial(1, plan.sampling_rates, (5, 300))  # 5 of 200 steps, scaled up
        noise = generator.normal(0, 1, 200) * [plan.noise_std_at(t) for t in range(200)]
        ends.append((40 * float((drawn @ plan.clip_norms).sum()), noise.sum()))
    moved, noise = np.array(ends).T
    assert signal_of(plan) == pytest.approx(moved.mean() / noise.std(), rel=0.06)
    plain = ow.plan(owners(1.0), steps=50, batch_size=30)
    assert signal_of(plain) == pytest.approx(signal_to_noise(30, 50, plain.noise_std))


@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
def test_a_plan_of_use_has_no_concerns(method):
    plan = ow.plan(owners(1.0), method, steps=200, batch_size=60)
    assert plan.concerns == []
    assert "OF NO USE" not in plan.describe()


def test_noise_that_hides_everything_is_named():
    plan = ow.plan(owners(0.01), steps=1000, batch_size=150)
    assert plan.noise_std > 1000
    (concern,) = plan.concerns
    assert signal_of(plan) < LEAST_SIGNAL
    assert f"by only {signal_of(plan):.2g} standard deviations of the noise" in concern
    assert "What helps: larger budgets, more records" in concern
    assert f"OF NO USE: {concern}." in plan.describe()


def test_a_batch_below_one_record_is_named():
    plan = ow.plan(owners(1.0), steps=100, batch_size=0.0006)
    assert any("draws 0.0006 records on average" in concern for concern in plan.concerns)
    by_owner = ow.plan(owners(1.0), unit="owner", steps=100, batch_size=0.5)
    assert any("draws 0.5 owners on average" in concern for concern in by_owner.concerns)


def test_owners_who_hardly_take_part_are_counted():
    epsilon = np.where(np.arange(300) < 4, 0.001, 2.0)
    plan = ow.plan(ow.Owners(np.arange(300), epsilon), steps=50, batch_size=30)
    assert any(c.startswith("4 owners are expected to take part less") for c in plan.concerns)


def test_a_clip_norm_that_would_follow_noise_is_named():
    plan = ow.plan(owners(1.0), steps=400, batch_size=3, clip_norm="adaptive")
    assert any("clip norm would follow noise" in concern for concern in plan.concerns)


def test_advice_agrees_with_the_plans():
    who = owners(1.0)
    advice = advise(who, PlanRequest())
    for cell in (advice.cells[0][0], advice.cells[-1][2]):
        plan = ow.plan(who, steps=cell.steps, batch_size=cell.batch_size)
        assert cell.noise_multiplier == pytest.approx(plan.noise_std, rel=1e-3)
        assert cell.signal == pytest.approx(signal_of(plan), rel=1e-3)
    assert advice.best is not None
    assert not advice.useless
    assert advice.others["all budgets doubled"] > 1.5 * advice.best.signal
    assert advice.others["twice the records"] == 2 * advice.best.signal
    assert advice.others.keys() >= {"method uniform", "method scale"}


def test_advice_for_hopeless_budgets_says_so():
    advice = advise(owners(0.001, 40), PlanRequest(method="uniform"))
    assert advice.useless
    nothing = advise(owners(1e-7, 40), PlanRequest(method="uniform"))
    assert nothing.useless
