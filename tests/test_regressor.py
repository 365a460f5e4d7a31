"""PrivateRegressor: scikit-learn's own checks, the declared range, and what it says of privacy."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_regression
from sklearn.utils.estimator_checks import parametrize_with_checks

import ownerwise as ow
from ownerwise.estimators import PrivateRegressor
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

X, Y = make_regression(240, 4, random_state=0)[:2]
RANGE = (-250.0, 250.0)
OWNERS = np.array(["ann", "bob", "cem"])[np.arange(240) % 3]
BUDGETS = {"ann": 1.0, "bob": 2.0, "cem": 8.0}
_several = pytest.mark.filterwarnings(
    "ignore:this process has already trained:ownerwise.PrivacyWarning"
)


def quick(epsilon=BUDGETS, **options) -> PrivateRegressor:
    return PrivateRegressor(epsilon, **{"steps": 5, "target_range": RANGE, **options})


# the checks fix random_state, and know no range; their budgets must allow for a good fit
@pytest.mark.filterwarnings("ignore::ownerwise.PrivacyWarning")
@parametrize_with_checks([PrivateRegressor(100.0, steps=40)])
def test_scikit_learn_finds_nothing(estimator, check):
    check(estimator)


def test_every_owner_spends_their_own_budget():
    fitted = quick().fit(X, Y, owners=OWNERS)
    assert fitted.private_
    assert fitted.target_range_ == RANGE
    targets = np.array([1.0, 2.0, 8.0])
    assert (fitted.epsilon_ <= targets).all()
    assert (fitted.epsilon_ >= 0.95 * targets).all()


@_several
def test_it_learns_what_noise_permits():
    generous = quick(200.0, steps=100, method="uniform").fit(X, Y)
    assert generous.score(X, Y) > 0.6
    strict = quick(0.01, steps=100, method="uniform").fit(X, Y)
    assert strict.plan_.noise_std > 100 * generous.plan_.noise_std
    assert (np.abs(strict.predict(X)) <= 250).all()


def test_a_range_found_in_the_records_is_not_private(tmp_path):
    with pytest.warns(ow.PrivacyWarning, match="range of the targets was taken from y"):
        fitted = quick(target_range=None).fit(X, Y, owners=OWNERS)
    assert not fitted.private_
    assert fitted.target_range_ == (Y.min(), Y.max())
    fitted.run_.card(tmp_path / "card.md")
    assert "the range of the targets, found in the records" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_range": (5, 5)}, "the range of the targets is 5.0 to 5.0; expected two finite"),
        ({"target_range": (0, np.inf)}, "the range of the targets is 0.0 to inf"),
        ({"target_range": 7}, r"target_range 7: expected \(low, high\)"),
        ({"loss": "mse"}, "did you mean 'mse_loss'"),
    ],
)
def test_wrong_options_are_explained(options, words):
    with pytest.raises(ow.OwnerwiseError, match=words):
        quick(**options).fit(X, Y)


@_several
def test_epochs_in_place_of_steps():
    fitted = quick(steps=None, epochs=2.0, batch_size=24).fit(X, Y, owners=OWNERS)
    assert fitted.plan_.steps == 20
    with pytest.raises(ow.OwnerwiseError, match=r"epochs 2\.0 and 5 steps were both given"):
        quick(epochs=2.0).fit(X, Y)
    assert PrivateRegressor(target_range=RANGE).fit(X, Y).plan_.steps == 200


def test_held_out_records_are_judged_by_regression_metrics():
    fitted = quick(4.0, validation_fraction=0.3, clip_norm="adaptive").fit(X, Y)
    last = fitted.run_.history[-1]
    assert {"rmse", "mae", "r2", "trivial_rmse"} <= last["validation"].keys()
    assert last["steering"]["clip_norm"] != 1.0
    np.testing.assert_allclose(
        fitted.run_.predict(X.astype(np.float32)), fitted.predict(X), rtol=1e-3, atol=1e-2
    )
    with pytest.raises(ow.OwnerwiseError, match="numbers, not classes"):
        fitted.run_.predict_proba(X)


def test_a_clone_has_the_parameters():
    options = clone(quick(loss="huber_loss")).get_params()
    assert options["loss"] == "huber_loss"
    assert options["target_range"] == RANGE
