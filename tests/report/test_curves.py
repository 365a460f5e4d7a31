import numpy as np
import pytest

from ownerwise.report.curves import Curve, curve
from tools.report_tools import made_run


def accuracy(evaluation):
    return evaluation["accuracy"]


def run_with(values, steps=None, **options):
    run = made_run(evaluations=len(values), **options)
    for at, (line, value) in enumerate(zip(run.history, values, strict=True)):
        line["validation"]["accuracy"] = value
        line["step"] = line["step"] if steps is None else steps[at]
    return run


def test_mean_and_band_over_seeds():
    found = curve([run_with([0.1, 0.4]), run_with([0.3, 0.8])], accuracy)
    assert found.steps.tolist() == [0, 200]
    np.testing.assert_allclose(found.mean, [0.2, 0.6])
    np.testing.assert_allclose(found.deviation, [0.2 / np.sqrt(2), 0.4 / np.sqrt(2)])


def test_one_run_has_no_band():
    assert curve([run_with([0.1, 0.4])], accuracy).deviation is None


def test_runs_evaluated_at_other_steps_are_interpolated_where_all_have_values():
    one = run_with([0.0, 0.5, 1.0], steps=[0, 50, 100])
    other = run_with([0.0, 0.6], steps=[0, 60])
    found = curve([one, other], accuracy)
    assert found.steps.tolist() == [0, 50]
    np.testing.assert_allclose(found.mean, [0.0, 0.5])


def test_the_last_line_of_a_repeated_step_counts():
    run = run_with([0.1, 0.2, 0.9], steps=[0, 10, 10])
    np.testing.assert_allclose(curve([run], accuracy).mean, [0.1, 0.9])


def test_a_value_that_is_not_known_is_a_gap():
    found = curve([run_with([0.1, None, 0.3])], accuracy)
    assert np.isnan(found.mean).tolist() == [False, True, False]


def test_without_validation_there_is_no_curve():
    assert curve([made_run(with_validation=False)], accuracy) is None


@pytest.mark.parametrize("length", [2, 300, 301, 5000])
def test_thinning_keeps_the_ends(length):
    long = Curve(np.arange(length), np.arange(length) * 2.0, np.ones(length))
    thin = long.thinned()
    assert len(thin.steps) == len(thin.mean) == len(thin.deviation) == min(length, 300)
    assert (thin.steps[0], thin.steps[-1]) == (0, length - 1)
    np.testing.assert_array_equal(thin.mean, 2.0 * thin.steps)
