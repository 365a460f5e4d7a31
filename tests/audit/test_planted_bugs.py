"""Mutation tests: an audit that is not told about a planted bug finds it."""

import pytest

import ownerwise as ow
from ownerwise.audit import conformance
from tools.planted_bugs import BUGS, make_plan

SEEDS = 2


def alarms(bug, seeds) -> int:
    of_plan, of_step = BUGS[bug]
    plan = make_plan(**of_plan)
    found = 0
    for seed in seeds:
        result = conformance(plan, stream=ow.SecretStream.from_seed(seed), **of_step)
        found += not result.passed
    return found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    assert alarms(bug, range(SEEDS)) == SEEDS


@pytest.mark.parametrize("unit", ["record", "owner"])
@pytest.mark.parametrize("weights", [None, ow.INO()], ids=["plain", "INO"])
def test_correct_code_raises_no_alarm(unit, weights):
    result = conformance(make_plan(unit), weights=weights, stream=ow.SecretStream.from_seed(5))
    assert result.passed, result.describe()


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_in_95_of_100_runs(bug, monkeypatch):
    bug(monkeypatch)
    assert alarms(bug, range(100)) >= 95


@pytest.mark.long
@pytest.mark.parametrize(
    ("of_plan", "of_step"),
    [
        ({"method": "uniform"}, {}),
        ({"method": "sample"}, {}),
        ({"method": "scale"}, {"weights": ow.INO()}),
        ({"method": "both", "hardened": True}, {}),
        ({"unit": "owner"}, {"weights": ow.INO()}),
        ({"noise_schedule": {"name": "exponential", "rate": 0.02}}, {"clipping": ow.AutoS()}),
    ],
)
def test_false_alarms_are_as_rare_as_stated(of_plan, of_step):
    """At 5% per run, 200 correct runs raise more than 10 + 4 sqrt(9.5) alarms with p < 1e-4."""
    plan = make_plan(**of_plan)
    results = [
        conformance(plan, stream=ow.SecretStream.from_seed(seed), false_alarms=0.05, **of_step)
        for seed in range(200)
    ]
    assert sum(not result.passed for result in results) <= 22
    strict = [min(check.p for check in result.checks) for result in results]
    assert sum(p < 1e-3 / len(results[0].checks) for p in strict) <= 2  # p = 1e-3
