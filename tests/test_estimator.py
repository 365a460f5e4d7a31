"""PrivateClassifier: scikit-learn's own checks, budgets by owner, and what it says of privacy."""

import copy
import importlib
import pickle
import re
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import ownerwise as ow
from ownerwise.estimators import PrivateClassifier
from ownerwise.estimators.repeated_fits import Lineage
from ownerwise.models import mlp
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

X, Y = make_classification(240, 6, class_sep=2.0, random_state=0)
OWNERS = np.array(["ann", "bob", "cem"])[np.arange(240) % 3]
BUDGETS = {"ann": 1.0, "bob": 2.0, "cem": 8.0}


_several = pytest.mark.filterwarnings(
    "ignore:this process has already trained:ownerwise.PrivacyWarning"
)
"""For tests that fit several estimators to the same records."""


def quick(epsilon=BUDGETS, **options) -> PrivateClassifier:
    return PrivateClassifier(epsilon, **{"steps": 5, "classes": [0, 1], **options})


# the checks fix random_state, and know no classes
@pytest.mark.filterwarnings("ignore::ownerwise.PrivacyWarning")
@parametrize_with_checks([PrivateClassifier(steps=10)])
def test_scikit_learn_finds_nothing(estimator, check):
    check(estimator)


def test_every_owner_spends_its_own_budget():
    fitted = quick().fit(X, Y, owners=OWNERS)
    assert fitted.plan_.owners.ids.tolist() == ["ann", "bob", "cem"]
    assert fitted.private_
    assert fitted.run_.private
    targets = np.array([1.0, 2.0, 8.0])
    assert (fitted.epsilon_ <= targets).all()
    assert (fitted.epsilon_ >= 0.95 * targets).all()
    assert fitted.run_.steps_spent == fitted.plan_.steps == 5


@_several
def test_it_learns_what_noise_permits():
    generous = quick(200.0, steps=60, method="uniform").fit(X, Y)
    assert generous.score(X, Y) > 0.85
    strict = quick(0.01, steps=60, method="uniform").fit(X, Y)
    assert strict.plan_.noise_std > 100 * generous.plan_.noise_std


@pytest.mark.parametrize(
    ("epsilon", "owners"),
    [
        (np.where(OWNERS == "ann", 1.0, 3.0), None),
        (np.where(OWNERS == "ann", 1.0, 3.0), OWNERS),
        ({"ann": 1.0, "bob": 3.0, "cem": 3.0, "not in this fold": 9.0}, pd.Series(OWNERS)),
        (list(np.where(OWNERS == "ann", 1.0, 3.0)), [f"{239 - i:03}" for i in range(240)]),
    ],
)
def test_ways_to_give_budgets(epsilon, owners):
    fitted = quick(epsilon).fit(X, Y, owners=owners)
    plan = fitted.plan_
    per_record = plan.targets[plan.owners.record_owner_index]
    np.testing.assert_array_equal(per_record, np.where(OWNERS == "ann", 1.0, 3.0))


def test_records_with_several_owners():
    cells = [("ann", "bob") if at % 8 == 0 else owner for at, owner in enumerate(OWNERS)]
    budgets = {"ann": 1.0, "bob": 3.0, "cem": 3.0, "not in this fold": 9.0}
    plan = quick(budgets).fit(X, Y, owners=cells).plan_
    assert plan.owners.shared.records.tolist() == [30]
    assert plan.total_records == 240
    with pytest.raises(ow.OwnerwiseError, match="several owners; expected one number, or a map"):
        quick(np.ones(240)).fit(X, Y, owners=cells)


def test_one_number_is_for_every_record():
    fitted = quick(2.0, delta=1e-6).fit(X, Y)
    assert len(fitted.plan_.owners) == 240
    assert set(fitted.plan_.targets) == {2.0}
    assert set(fitted.plan_.deltas) == {1e-6}
    by_owner = quick(2.0, delta={"ann": 1e-6, "bob": 1e-5, "cem": 1e-5}).fit(X, Y, owners=OWNERS)
    assert by_owner.plan_.deltas.tolist() == [1e-6, 1e-5, 1e-5]


@_several
def test_predictions_agree_with_each_other():
    y = np.array(["a", "b", "c"])[np.arange(240) % 3]
    fitted = quick(5.0, classes=["a", "b", "c"]).fit(X, y)
    probabilities = fitted.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    np.testing.assert_array_equal(fitted.predict(X), fitted.classes_[probabilities.argmax(axis=1)])
    assert fitted.decision_function(X).shape == (240, 3)
    binary = quick(5.0).fit(X, Y)
    positive = binary.decision_function(X)
    np.testing.assert_array_equal(positive > 0, binary.predict(X) == 1)
    np.testing.assert_allclose(1 / (1 + np.exp(-positive)), binary.predict_proba(X)[:, 1])


@_several
def test_a_fixed_random_state_repeats_and_says_not_private():
    with pytest.warns(ow.PrivacyWarning, match="NOT private"):
        first = quick(random_state=3).fit(X, Y, owners=OWNERS)
    with pytest.warns(ow.PrivacyWarning, match="NOT private"):
        again = quick(random_state=3).fit(X, Y, owners=OWNERS)
    np.testing.assert_array_equal(first.decision_function(X), again.decision_function(X))
    assert not first.private_
    assert first.run_.seed == 3
    with pytest.warns(ow.PrivacyWarning, match="NOT private"):
        other = quick(random_state=np.random.RandomState(0)).fit(X, Y, owners=OWNERS)
    assert not other.private_
    torch.manual_seed(0)
    one = quick().fit(X, Y, owners=OWNERS)
    torch.manual_seed(0)
    another = quick().fit(X, Y, owners=OWNERS)
    assert not np.allclose(one.decision_function(X), another.decision_function(X))


def test_classes_may_be_declared():
    fitted = quick(5.0, classes=[2, 0, 1]).fit(X, Y)
    assert fitted.classes_.tolist() == [0, 1, 2]
    assert fitted.predict_proba(X).shape == (240, 3)
    with pytest.raises(ow.OwnerwiseError, match=r"label of record 0, .* is not in classes=0;"):
        quick(5.0, classes=[0]).fit(X, Y)


@_several
def test_classes_found_in_the_records_are_not_private(tmp_path):
    with pytest.warns(ow.PrivacyWarning, match="taken from y, so the list is NOT private"):
        fitted = quick(classes=None).fit(X, Y, owners=OWNERS)
    assert fitted.classes_.tolist() == [0, 1]
    assert not fitted.private_
    assert fitted.run_.not_private == ["the list of classes, found in the records"]
    fitted.run_.card(tmp_path / "card.md")
    assert "**Private" not in (tmp_path / "card.md").read_text()
    assert quick().fit(X, Y, owners=OWNERS).run_.not_private == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_missing_values_are_to_be_filled_with_a_public_constant(value):
    """Pitfall 34: an imputer that is fitted to the records releases their mean without noise."""
    holed = X.copy()
    holed[3, 1] = value
    fitted = quick(5.0).fit(X, Y)
    for use in (lambda: quick(5.0).fit(holed, Y), lambda: fitted.predict(holed)):
        with pytest.raises(ow.OwnerwiseError, match=r"SimpleImputer\(strategy='constant'\)"):
            use()
    with pytest.raises(ow.OwnerwiseError) as refusal:
        quick(5.0, steps=0).fit(holed, Y)
    assert len(refusal.value.problems) == 2


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (3, r"hidden=3: expected a list of sizes, such as \[3\]"),
        ([8, 0], r"hidden=\[8, 0\]: expected whole numbers of at least 1"),
        ("64", "hidden='64': expected a list of sizes"),
    ],
)
def test_hidden_layers_are_a_list_of_sizes(hidden, words):
    with pytest.raises(ow.OwnerwiseError, match=words):
        quick(5.0, hidden=hidden).fit(X, Y)
    with pytest.raises(ow.OwnerwiseError, match=words):
        mlp(4, 2, hidden)
    assert mlp(4, 2, np.array([3, 3]))[1].out_features == 3


def test_inputs_are_scaled_by_the_public_range():
    """Pitfall 34: records outside of the range are clipped, and no record moves another."""
    seen = []

    def model(features, classes):
        network = nn.Linear(features, classes)
        network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        return network

    low, high = np.full(6, -1.0), np.full(6, 3.0)
    fitted = quick(5.0, input_range=(low, high), model=model).fit(X, Y)
    seen.clear()
    fitted.predict([[-1.0, 0.0, 1.0, 2.0, 3.0, 99.0]])
    np.testing.assert_allclose(seen[0], [[-1.0, -0.5, 0.0, 0.5, 1.0, 1.0]])
    alone = fitted.decision_function(X[:1])
    np.testing.assert_allclose(fitted.decision_function(X)[:1], alone, rtol=1e-9)


@pytest.mark.parametrize(("weights", "tail"), [(None, None), ("ino", 0.4), (ow.INO(tail=0.2), 0.2)])
def test_weights_reach_the_run(weights, tail):
    found = quick(weights=weights).fit(X, Y, owners=OWNERS).run_.config["weights"]
    assert (found and found["tail"]) == tail


@_several
def test_hidden_layers_and_own_models():
    linear = quick(5.0, hidden=()).fit(X, Y).model_
    assert sum(p.numel() for p in linear.parameters()) == 7 * 2
    own = quick(5.0, model=lambda inputs, classes: nn.Linear(inputs, classes)).fit(X, Y)
    assert isinstance(own.model_, nn.Linear)
    assert own.predict(X).shape == (240,)


def test_all_problems_are_listed_before_anything_is_spent():
    wrong = PrivateClassifier(
        BUDGETS, method="samples", steps=0, lr=-1.0, weights="inn", input_range=(1.0, 0.0),
        classes=[0], batch_size=500,
    )  # fmt: skip
    with pytest.raises(ow.OwnerwiseError) as refusal:
        wrong.fit(X, Y)
    text = str(refusal.value)
    for word in ("label of record 0", "called without owners", "input_range=(1.0, 0.0)",
                 "'sample'?", "steps 0", "batch_size 500", "weights is 'inn'",
                 "lr is -1.0"):  # fmt: skip
        assert word in text
    assert len(refusal.value.problems) == 8
    assert not hasattr(wrong, "plan_")


@pytest.mark.parametrize(
    ("epsilon", "owners", "words"),
    [
        ({"ann": 1.0}, OWNERS, "no budget for owner bob, cem"),
        ({0: 1.0}, OWNERS, "str in owners"),
        ([1.0, 2.0], None, r"shape \[2\] for 240 records(.|\n)*mapping"),
        (np.arange(1.0, 241.0), OWNERS, "differs between records of owner ann, bob, cem"),
        (1.0, OWNERS[:5], "5 owner ids for 240 records"),
        (-1.0, None, "epsilon"),
        (1.0, [None, *OWNERS[1:]], "owners: no owner id in record 0"),
    ],
)
def test_wrong_budgets_are_explained(epsilon, owners, words):
    with pytest.raises(ow.OwnerwiseError, match=words):
        quick(epsilon).fit(X, Y, owners=owners)


def test_a_search_takes_each_folds_owners_and_warns_that_it_is_not_accounted():
    owners = np.where(np.arange(240) < 8, "rare", OWNERS)  # held out in the only split
    estimator = quick({**BUDGETS, "rare": 1.0}, hidden=())
    with sklearn.config_context(enable_metadata_routing=True):
        routed = estimator.set_fit_request(owners=True)
        pipeline = make_pipeline(FunctionTransformer(np.tanh), routed)
        search = GridSearchCV(
            pipeline, {"privateclassifier__lr": [0.1, 0.5]}, cv=[(np.arange(8, 240), np.arange(8))]
        )
        with pytest.warns(ow.PrivacyWarning, match="not accounted") as caught:
            search.fit(X, Y, owners=owners)
    assert len(caught) == 1
    best = search.best_estimator_[-1]
    assert best.plan_.owners.ids.tolist() == ["ann", "bob", "cem", "rare"]
    assert search.predict(X).shape == (240,)


@_several
def test_fitting_twice_warns_and_fitting_a_single_clone_does_not():
    estimator = quick()
    clone(estimator).fit(X, Y, owners=OWNERS)
    with pytest.warns(ow.PrivacyWarning, match="spends every owner's budget again"):
        estimator.fit(X, Y, owners=OWNERS)
    with pytest.warns(ow.PrivacyWarning, match="spends every owner's budget again"):
        cross_val_score(quick(3.0), X, Y, cv=2)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda estimator: pickle.loads(pickle.dumps(estimator)),
}


@pytest.mark.parametrize("original_first", [True, False])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_does_not_forget_that_its_original_was_fitted(way, original_first):
    original = quick()
    fits = [original, COPIES[way](original)]
    fits = fits if original_first else fits[::-1]
    fits[0].fit(X, Y, owners=OWNERS)
    with pytest.warns(ow.PrivacyWarning, match="spends every owner's budget again"):
        fits[1].fit(X, Y, owners=OWNERS)


def test_another_process_goes_on_counting(monkeypatch):
    stored = pickle.dumps(quick().fit(X, Y, owners=OWNERS))
    monkeypatch.setattr(Lineage, "living", {})  # as in a new process
    with pytest.warns(ow.PrivacyWarning, match="spends every owner's budget again"):
        pickle.loads(stored).fit(X, Y, owners=OWNERS)


def test_clones_have_the_parameters_and_nothing_fitted():
    estimator = quick(weights=ow.INO(tail=0.1), classes=[0, 1]).fit(X, Y, owners=OWNERS)
    copied = clone(estimator)
    assert repr(copied) == repr(estimator)
    assert not hasattr(copied, "plan_")


def test_a_pickled_fit_predicts_the_same():
    fitted = quick().fit(X, Y, owners=OWNERS)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    assert again.plan_ == fitted.plan_


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ownerwise.estimators")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"pip install 'ownerwise\[sklearn\]'"):
        importlib.import_module("ownerwise.estimators")


def test_a_private_fit_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick().fit(X, Y, owners=OWNERS)


def patients(visits=6, people=80):
    chance = np.random.default_rng(1)
    ids = np.repeat(np.arange(people), visits)
    features = chance.uniform(-1, 1, (len(ids), 3))
    return features, (features[:, 0] > 0).astype(int), ids


def test_whole_owners_are_held_out_with_unit_owner():
    features, labels, ids = patients()
    epsilon = dict.fromkeys(range(80), 4.0)
    classifier = PrivateClassifier(
        epsilon, unit="owner", classes=[0, 1], validation_fraction=0.3, steps=5, batch_size=10
    )
    run = classifier.fit(features, labels, owners=ids).run_
    found = run.history[-1]["validation"]
    protected = set(classifier.plan_.owners.ids.tolist())
    assert found["owners"] + len(protected) == 80
    assert run.config["held_out_owners"] == {"unprotected": found["owners"], "in_plan": 0}
    assert found["owners"] == 80 - len(protected) > 5
    again = PrivateClassifier(epsilon, unit="owner", classes=[0, 1], steps=5, batch_size=10)
    again.set_params(validation_fraction=0.3)
    with pytest.warns(ow.PrivacyWarning, match="already trained"):
        again.fit(features[::-1], labels[::-1], owners=ids[::-1])
    assert set(again.plan_.owners.ids.tolist()) == protected  # by the ids alone


def test_records_are_held_out_with_unit_record():
    features, labels, ids = patients()
    options = {"classes": [0, 1], "validation_fraction": 0.3, "steps": 3, "batch_size": 20}
    classifier = PrivateClassifier(4.0, **options).fit(features, labels, owners=ids)
    assert classifier.run_.config["held_out_owners"]["in_plan"] > 40
    by_owner = PrivateClassifier(4.0, split_by="owner", **options).fit(features, labels, owners=ids)
    assert by_owner.run_.config["held_out_owners"]["in_plan"] == 0
    alone = PrivateClassifier(4.0, **options).fit(features, labels)
    assert alone.plan_.records.sum() < len(labels)
    assert "held_out_owners" not in alone.run_.config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation_fraction": 1.5}, "validation_fraction 1.5; expected a number between 0 and"),
        ({"split_by": "owners"}, "split_by is 'owners'; did you mean 'owner'"),
        ({"split_by": "record", "unit": "owner"}, "split_by 'record' with unit 'owner': expected"),
        ({"validation_fraction": 1e-9, "split_by": "owner"}, "holds out none of the 80 owners"),
    ],
)
def test_splits_that_cannot_be_made_are_refused(options, says):
    features, labels, ids = patients()
    with pytest.raises(ow.OwnerwiseError, match=re.escape(says)):
        PrivateClassifier(4.0, classes=[0, 1], **options).fit(features, labels, owners=ids)


def test_a_missing_owner_is_reported_once_when_owners_are_held_out():
    features, labels, ids = patients()
    names = np.array([f"p{number}" for number in ids], dtype=object)
    names[3] = ""
    classifier = PrivateClassifier(
        4.0, classes=[0, 1], unit="owner", validation_fraction=0.3, batch_size=10
    )
    with pytest.raises(ow.OwnerwiseError) as caught:
        classifier.fit(features, labels, owners=names)
    (problem,) = caught.value.problems
    assert "owners: no owner id in record 3" in problem


def test_records_are_sampled_for_owners_with_a_bound_on_their_number():
    features, labels, ids = patients()
    options = {"classes": [0, 1], "unit": "owner", "sampling": "record", "batch_size": 20}
    fitted = PrivateClassifier(4.0, steps=3, max_records=2, **options)
    fitted.fit(features, labels, owners=ids)
    assert fitted.plan_.sampling == "record"
    assert fitted.plan_.records.tolist() == [2] * 80
    assert (fitted.plan_.owner_epsilon() <= 4.0).all()
    with pytest.raises(ow.OwnerwiseError, match="max_records 0: expected a whole number"):
        PrivateClassifier(4.0, max_records=0, **options).fit(features, labels, owners=ids)
