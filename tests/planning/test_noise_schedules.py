"""Noise schedules: their factors, what they cost, and that planning finds the start value."""

import math

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.accounting import Schedule, pld
from ownerwise.errors import PlanError
from ownerwise.planning.noise_schedules import PIECES, SCHEDULES, schedule_problems, segments

OWNERS = ow.Owners(np.arange(60) % 3, {0: 1.0, 1: 2.0, 2: 4.0}, 1e-5, records=[2000] * 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ({"name": "exponential", "rate": 0.5}, [math.exp(-0.5 * e) for e in range(4)]),
        ({"name": "time", "rate": 1}, [1, 1 / 2, 1 / 3, 1 / 4]),
        ({"name": "step", "factor": 0.5}, [1, 0.5, 0.25, 0.125]),
        ({"name": "polynomial", "floor": 0.2}, [1, 0.8, 0.6, 0.4]),
        (
            {"name": "polynomial", "floor": 0.2, "power": 2},
            [1, 0.2 + 0.8 * 0.5625, 0.4, 0.2 + 0.8 * 0.0625],
        ),
    ],
)
def test_factors_by_hand(schedule, expected):
    options = {"name": schedule} if isinstance(schedule, str) else schedule
    asked = options | {"every": 30}
    assert schedule_problems(asked, 110) == []
    found = segments(asked, 110)
    assert [count for count, _ in found] == [30, 30, 30, 20]
    assert [factor for _, factor in found] == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 19, 20, 21, 1000])
def test_pieces_add_up_and_begin_with_one(name, steps):
    found = segments(name, steps)
    assert sum(count for count, _ in found) == steps
    assert all(count > 0 for count, _ in found)
    assert found[0][1] == 1.0
    assert len(found) <= (3 if name == "step" else PIECES)
    factors = [factor for _, factor in found]
    assert factors == sorted(factors, reverse=True)


def test_segments_are_taken_as_they_are():
    assert segments([[5, 1.0], [5, 0.5]], None) == ((5, 1.0), (5, 0.5))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("exponentail", "noise_schedule is 'exponentail'; did you mean 'exponential'?"),
        ({"rate": 3}, "noise_schedule is missing"),
        ({"name": "time", "floor": 0.1}, "no option floor; Known names: rate, every"),
        ({"name": "time", "rate": 0}, "rate is 0; expected a number above 0"),
        ({"name": "step", "factor": 1.5}, "factor is 1.5; expected a number above 0 and at most 1"),
        ({"name": "time", "rate": "fast"}, "rate is 'fast'; expected a number"),
        ({"name": "time", "every": 101}, "every is 101; expected a whole number from 1"),
        ({"name": "time", "every": 2.5}, "every is 2.5; expected a whole number"),
        ({"name": "exponential", "rate": 9}, "falls to"),
    ],
)
def test_bad_schedules_are_explained(schedule, message):
    (problem,) = schedule_problems(schedule, 100)
    assert message in problem


def test_a_request_lists_the_problems_of_its_schedule_too():
    with pytest.raises(PlanError) as error:
        ow.plan(
            OWNERS, "smaple", steps=0, batch_size=50,
            noise_schedule={"name": "time", "rate": -1, "evry": 3},
        )  # fmt: skip
    assert len(error.value.problems) == 4
    with pytest.raises(PlanError, match="'time' needs steps="):
        ow.plan(OWNERS, batch_size=50, noise_multiplier=2.0, noise_schedule="time")


def test_the_published_decay_is_accounted_piece_by_piece():
    """q = 512/60000, noise 1.6 exp(-.02 e), 40 epochs: about 3.8; its mean would say 2.8."""
    found = segments({"name": "exponential", "rate": 0.02, "every": 117}, 40 * 117)
    assert len(found) == 40
    decaying = pld.epsilon(512 / 60000, 1.6, Schedule(found), 1e-5)
    assert decaying == pytest.approx(3.8, abs=0.25)
    mean = 1.6 * float(np.mean([factor for _, factor in found]))
    assert pld.epsilon(512 / 60000, mean, Schedule.constant(4680), 1e-5) < 0.8 * decaying


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_planning_finds_the_start_value(name):
    """The budget is spent; the noise starts above the constant one and ends below it."""
    owners = ow.Owners(np.zeros(20, int), {0: 2.0}, 1e-5, records=[2000])
    asked = {"name": name, "every": 40}
    plan = ow.plan(owners, "uniform", steps=200, batch_size=120, noise_schedule=asked)
    flat = ow.plan(owners, "uniform", steps=200, batch_size=120)
    assert plan.schedule.segments == segments(asked, 200)
    assert 0.995 * 2.0 < plan.epsilon()[0] <= 2.0
    assert plan.noise_std_at(199) < flat.noise_std < plan.noise_std_at(0) == plan.noise_std


@pytest.mark.parametrize("method", ["sample", "scale", "both"])
def test_own_budgets_are_spent_under_a_schedule(method):
    asked = {"name": "polynomial", "every": 50}
    plan = ow.plan(
        OWNERS, method, steps=100, batch_size=120, noise_schedule=asked, accountant="rdp"
    )
    assert (plan.epsilon() <= OWNERS.epsilon).all()
    assert (plan.epsilon() > 0.995 * OWNERS.epsilon).all()


def test_constant_is_no_schedule_at_all():
    asked = {"name": "constant", "every": 200}
    options = {"steps": 200, "batch_size": 120, "accountant": "rdp"}
    plan = ow.plan(OWNERS, "uniform", **options, noise_schedule=asked)
    assert plan == ow.plan(OWNERS, "uniform", **options)


def test_noise_given_finds_the_batch():
    plan = ow.plan(
        OWNERS, "uniform", steps=100, noise_multiplier=2.0, accountant="rdp",
        noise_schedule={"name": "step", "every": 50},
    )  # fmt: skip
    assert plan.noise_multipliers[0] == 2.0
    assert plan.epsilon()[0] == pytest.approx(1.0, rel=5e-3)
