"""The person's figure in a plan."""

import json

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.planning import epsilon_words, owner_statement
from ownerwise.planning.batch_bounds import overflow_with

RECORDS = {"ann": 1, "ben": 3, "eve": 8, "firm": 900}


def small(**options):
    owners = ow.Owners(None, dict.fromkeys(RECORDS, 1.0), records=RECORDS)
    return ow.plan(owners, **{"steps": 100, "batch_size": 9, **options})


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("method", ["uniform", "scale"])
def test_one_record_keeps_its_figure_and_more_records_cost_more(accountant, method):
    plan = small(accountant=accountant, method=method)
    figures = plan.owner_epsilon()
    assert figures[0] == plan.epsilon()[0]
    assert 3 * plan.epsilon()[1] < figures[1] < figures[2] < figures[3] == np.inf
    assert (plan.owner_epsilon(steps=30) <= figures).all()
    assert (plan.owner_epsilon(steps=0) == 0).all()


def test_the_figure_does_not_change_the_plan():
    plan = small()
    before = plan.hash
    plan.owner_epsilon()
    assert plan.hash == before
    with pytest.raises(ValueError, match="read-only"):
        plan.owner_epsilon()[0] = 0


def test_a_hardened_plan_pays_for_rows_that_run_out():
    owners = ow.Owners(np.repeat(np.arange(200), 3), 2.0)
    plain = ow.plan(owners, steps=100, batch_size=60)
    hardened = ow.plan(owners, steps=100, batch_size=60, hardened=True)
    assert (hardened.owner_epsilon() > hardened.epsilon()).all()
    assert np.isfinite(hardened.owner_epsilon()).all()
    assert hardened.owner_epsilon()[0] == pytest.approx(plain.owner_epsilon()[0], rel=0.03)


def test_the_probability_of_too_few_rows_is_a_bound():
    rates, records = np.array([0.1, 0.3]), np.array([100, 50])
    generator = np.random.default_rng(0)
    drawn = generator.binomial(records, rates, (200_000, 2)).sum(axis=1)
    bound = overflow_with(rates, records, 45)
    for k in (0, 3, 8):
        assert bound(k) >= (drawn > 45 - k).mean()
        assert bound(k) <= bound(k + 1)
    assert overflow_with(rates, records, 155)(5) == 0.0


def test_tables_and_json_state_the_figure():
    plan = small()
    text = plan.describe(owners=True)
    assert "per owner" in text
    assert "The largest owner declares 900 records" in text
    assert "For all records of one owner together, epsilon reaches more than 100." in text
    rows = json.loads(json.dumps([row.figures() for row in plan.rows(owners=True)]))
    assert rows[0]["owner_epsilon"] == rows[0]["epsilon_spent"]
    assert rows[3]["owner_epsilon"] == ["more than 100"] * 2
    assert rows[3]["most_records_per_owner"] == 900


def test_figures_in_words():
    assert epsilon_words((1.00001, 3.5)) == "1.001 to 3.5"
    assert epsilon_words((2.0, np.inf)) == "2 to more than 100"
    assert epsilon_words((np.nan, np.nan)) == "not computed"
    assert "epsilon is up to 3." in owner_statement(np.array([1.0, 3.0]))
    unknown = owner_statement(np.array([1.0, np.nan, np.nan]))
    assert "could not be computed for 2 owners" in unknown
