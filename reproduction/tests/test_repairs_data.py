"""Rules of the study of repairs: budgets, dropped records, label counts and groups."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture
def rules(monkeypatch):
    path = Path(__file__).parents[1] / "studies/repairs_data.py"
    spec = importlib.util.spec_from_file_location("repairs_data", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "repairs_data", module)
    spec.loader.exec_module(module)
    return module


OWNER = np.array([3] * 4 + [5] * 6 + [9] * 10)
BUDGETS = {3: 1.0, 5: 2.0, 9: 6.0}


def part(rules):
    labels = torch.tensor([0] * 4 + [0, 1, 1, 2, 2, 2] + [1] * 10)
    return rules.Part(torch.zeros(20, 1), labels, OWNER, labels.numpy())


def test_budgets_are_lowered_towards_the_strictest(rules):
    assert rules.lowered(BUDGETS, 0.4) == pytest.approx({3: 1.0, 5: 1.6, 9: 4.0})
    assert rules.lowered(BUDGETS, 0.0) == BUDGETS


def test_records_with_budgets_above_the_mean_are_dropped(rules):
    """The mean over records is 3.8, so owner 9 alone is lax."""
    left = OWNER[rules.kept(OWNER, BUDGETS, 0.3, seed=1)]
    assert np.unique(left, return_counts=True)[1].tolist() == [4, 6, 7]


def test_labels_are_counted_for_each_budget(rules):
    counts = rules.label_counts(part(rules), BUDGETS, 3)
    assert counts.tolist() == [[4, 0, 0], [1, 2, 3], [0, 10, 0]]


def test_groups_are_ordered_by_their_mean_epsilon(rules):
    """Class 0 has epsilon 1 and 2, class 1 mostly 6, class 2 only 2."""
    split = rules.Split(*[part(rules)] * 3, BUDGETS)
    assert split.order.tolist() == [0, 2, 1]
    assert rules.mean_epsilon(split) == pytest.approx([(4 * 1 + 2) / 5, 2.0, 64 / 12])


def test_a_class_is_spread_over_owners_with_ten_records(rules):
    """Of the made cardiotocography file; owners hold one class, strict ones as the rule says."""
    split = rules.split_classes(0)
    train = split.train
    for owner in np.unique(train.owner):
        held = train.y[train.owner == owner]
        assert len(held) <= 10
        assert len(held.unique()) == 1
    for label, share in enumerate((0.2, 0.5, 0.8)):
        owners = np.unique(train.owner[train.y.numpy() == label])
        strict = sum(split.budgets[owner] == 0.5 for owner in owners.tolist())
        assert strict == round(share * len(owners))


def test_strict_images_are_dimmed_and_no_others(rules):
    split = rules.dimmed(0)
    strict = split.train.owner == 0
    assert 0 < strict.mean() < 1
    assert float(split.train.x[~strict].min()) >= 0
    assert float(split.train.x[strict].mean()) < 0.7 * float(split.train.x[~strict].mean())
