"""The collector of problems: all of them in one error, and no other error hidden."""

import pytest

from ownerwise.errors import BudgetError, OwnerwiseError, PlanError, Problems


def test_all_problems_come_in_one_error_of_the_given_kind():
    problems = Problems()
    problems.add("first", "second")
    with problems.guard():
        raise PlanError(["third", "fourth"])
    assert len(problems) == 4
    with pytest.raises(BudgetError) as error:
        problems.raise_(BudgetError)
    assert error.value.problems == list(problems) == ["first", "second", "third", "fourth"]


def test_nothing_is_raised_without_problems():
    problems = Problems()
    with problems.guard():
        pass
    problems.raise_()
    assert not problems


def test_other_errors_pass_the_guard():
    problems = Problems()
    with pytest.raises(ValueError, match="a bug"), problems.guard():
        raise ValueError("a bug")
    assert not problems


def test_raising_again_lists_problems_that_were_added_since():
    problems = Problems()
    for name in ("first", "second"):
        problems.add(name)
        with pytest.raises(OwnerwiseError, match=name):
            problems.raise_()
