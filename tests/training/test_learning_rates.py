import math

import pytest

from ownerwise.training import (
    schedule_problems,
)
from ownerwise.training.learning_rates import (
    factors,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 1, 9: 1}),
        ("linear", {0: 1, 5: 0.5, 9: 0.1}),
        ({"name": "linear", "floor": 0.5}, {0: 1, 5: 0.75}),
        ("cosine", {0: 1, 5: 0.5, 9: 0.5 * (1 + math.cos(0.9 * math.pi))}),
        ({"name": "cosine", "floor": 0.2}, {0: 1, 5: 0.6}),
        ("step", {0: 1, 2: 1, 3: 0.1, 6: 0.01, 9: 0.001}),
        ({"name": "step", "every": 5, "factor": 0.5}, {4: 1, 5: 0.5, 9: 0.5}),
        ({"name": "constant", "warmup": 4}, {0: 0.2, 3: 0.8, 4: 1, 9: 1}),
        ({"name": "linear", "warmup": 5}, {0: 1 / 6, 4: 5 / 6, 5: 1, 9: 0.2}),
        (lambda step: 1 / (step + 1), {0: 1, 9: 0.1}),
    ],
)
def test_factors_by_hand(schedule, expected):
    assert schedule_problems(schedule, 10) == []
    factor = factors(schedule, 10)
    for step, value in expected.items():
        assert factor(step) == pytest.approx(value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("cosin", "schedule is 'cosin'; did you mean 'cosine'?"),
        (None, "schedule is missing; "),
        ({"warmup": 3}, "schedule is missing"),
        (
            {"name": "cosine", "flor": 0},
            "no option flor; did you mean 'floor'? Known names: floor, warmup",
        ),
        ({"name": "cosine", "floor": 2}, "floor is 2; expected a number from 0 to 1"),
        ({"name": "cosine", "warmup": 11}, "warmup is 11; expected a whole number from 0 to 10"),
        ({"name": "step", "every": 0}, "every is 0; expected a whole number from 1"),
        ({"name": "step", "factor": "half"}, "factor is 'half'; expected a number"),
        (lambda step: -1.0, "returns -1.0 at step 0"),
        (lambda step: 1 / step, "fails at step 0"),
    ],
)
def test_bad_schedules_are_explained(schedule, message):
    (problem,) = schedule_problems(schedule, 10)
    assert message in problem


def test_all_options_are_looked_at():
    found = schedule_problems({"name": "step", "factor": -1, "every": 0.5, "floor": 0}, 10)
    assert len(found) == 3
