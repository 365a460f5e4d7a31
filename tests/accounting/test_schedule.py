import pytest

from ownerwise.accounting import Schedule


def test_a_constant_schedule_has_factor_one_in_every_step():
    schedule = Schedule.constant(5)
    assert schedule.steps == 5
    assert schedule.factor_at(4) == 1.0
    with pytest.raises(ValueError, match="step 5: expected 0 to 4"):
        schedule.factor_at(5)


def test_first_steps_of_segments():
    schedule = Schedule(((10, 1.0), (5, 0.5)))
    assert schedule.steps == 15
    assert schedule.first(12).segments == ((10, 1.0), (2, 0.5))
    assert schedule.first(10).segments == ((10, 1.0),)
    assert schedule.first(0).steps == 0
    assert [schedule.factor_at(step) for step in (0, 9, 10, 14)] == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="steps=16: expected 0 to 15"):
        schedule.first(16)


@pytest.mark.parametrize("segment", [(-1, 1.0), (1.5, 1.0), (3, 0.0), (3, float("nan"))])
def test_bad_segments_are_refused(segment):
    with pytest.raises(ValueError, match="expected"):
        Schedule((segment,))
