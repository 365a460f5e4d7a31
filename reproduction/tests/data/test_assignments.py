"""Simulated owners."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.data.assign import by_class, evenly
from ownerwise_reproduction.data import assignments as assign
from tools.data_tools import assert_usable, data_set, problems


class TestRandomClass:
    def test_budgets_stay_with_the_owners(self):
        data = data_set([10] * 10)
        budgets = evenly(0.5, 5, 10)
        first = assign.by_random_class(data, budgets, seed=1)
        second = assign.by_random_class(data, budgets, seed=2)
        assert_usable(first, data)
        assert first.epsilon == second.epsilon
        assert list(first.epsilon) == [f"owner {k:02d}" for k in range(1, 11)]
        assert list(first.epsilon.values()) == list(budgets)
        assert first.class_groups != second.class_groups
        assert sorted(first.class_groups) == sorted(first.epsilon)
        # one class each, and the groups of evaluation follow the deal
        for owner in first.epsilon:
            (label,) = set(data.train.targets[first.record_owner == owner])
            assert first.class_groups[label] == owner

    def test_every_class_meets_every_budget(self):
        data = data_set([1] * 3)
        deals = {assign.by_random_class(data, (1, 2, 3), seed).class_groups for seed in range(60)}
        assert len(deals) == 6

    def test_one_budget_for_each_class(self):
        problems(lambda: assign.by_random_class(data_set([1] * 3), (1, 2), 0), "2 budgets for 3")


class TestRandomShares:
    @pytest.mark.parametrize("shares", [(0.34, 0.43, 0.23), (0.54, 0.37, 0.09)])  # of IDP-SGD
    def test_shares_are_met(self, shares):
        data = data_set([500, 500])
        given = assign.random_shares(data, shares, (1, 2, 3), seed=0)
        owners = assert_usable(given, data)
        assert owners.records.tolist() == [round(1000 * share) for share in shares]
        assert owners.epsilon.tolist() == [1, 2, 3]
        assert set(given.groups(data.test)) == {"a", "b"}
        mean = sum(share * epsilon for share, epsilon in zip(shares, (1, 2, 3), strict=True))
        assert list(given.group_budgets.values()) == pytest.approx([mean, mean])

    @given(
        st.integers(1, 200),
        st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
        st.integers(0, 5),
    )
    def test_within_one_record(self, records, parts, seed):
        shares = [part / sum(parts) for part in parts]
        data = data_set([records])
        given = assign.random_shares(data, shares, [1.0] * len(shares), seed)
        assert len(given.record_owner) == records
        for owner, share in zip(given.epsilon, shares, strict=True):
            assert abs((given.record_owner == owner).sum() - share * records) <= 1

    def test_classes_are_mixed(self):
        """Exact counts, random members: each owner has about its share of each class."""
        data = data_set([5000, 5000])
        given = assign.random_shares(data, (0.5, 0.5), (1, 2), seed=0)
        first = data.train.targets[given.record_owner == "owner 1"]
        assert abs(first.mean() - 0.5) < 0.035  # 5 standard deviations

    @pytest.mark.parametrize(
        ("shares", "word"), [((0.5, 0.4), "add up to 0.9"), ((1.5, -0.5), "below 0")]
    )
    def test_other_shares(self, shares, word):
        problems(lambda: assign.random_shares(data_set([9]), shares, (1, 2), 0), word)


class TestOverlapping:
    @pytest.mark.parametrize("share", [0.1, 0.3])  # settings COL and COM
    def test_own_share_and_others(self, share):
        data = data_set([200] * 10)
        given = assign.overlapping(data, evenly(0.5, 5, 10), share, seed=3)
        owners = assert_usable(given, data)
        assert owners.records.tolist() == [200] * 10
        for at, owner in enumerate(data.classes):
            held = np.bincount(data.train.targets[given.record_owner == owner], minlength=10)
            assert held[at] == round(200 * (1 - share))
            assert (held > 0).sum() > 5  # of any other classes, not of one neighbour
        assert given.group_budgets == dict(zip(data.classes, evenly(0.5, 5, 10), strict=True))

    def test_no_overlap(self):
        data = data_set([20, 30])
        alone = assign.overlapping(data, (1, 2), 0.0, seed=0)
        assert (alone.record_owner == by_class(data, (1, 2)).record_owner).all()

    @given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.integers(0, 9))
    def test_unequal_classes(self, counts, seed):
        """Everyone keeps its number of records; swapped records never stay with their class."""
        data, share = data_set(counts), 0.5
        pools = [round(share * count) for count in counts]
        budgets = [1.0] * len(counts)
        if 2 * max(pools) > sum(pools):
            problems(lambda: assign.overlapping(data, budgets, share, seed), "more than half")
            return
        given = assign.overlapping(data, budgets, share, seed)
        for at, owner in enumerate(data.classes):
            held = data.train.targets[given.record_owner == owner]
            assert len(held) == counts[at]
            assert (held == at).sum() == counts[at] - pools[at]

    def test_other_share(self):
        problems(lambda: assign.overlapping(data_set([2, 2]), (1, 2), 1.5, 0), "share 1.5")


class TestOneEach:
    def test_uniform(self):
        """Setting CS."""
        data = data_set([400] * 3)
        given = assign.one_each(data, (0.5, 1, 1.5), 0.25, seed=0)
        owners = assert_usable(given, data)
        assert len(owners) == 1200
        assert owners.records.tolist() == [1] * 1200
        assert (owners.epsilon == given.epsilon).all()  # in the order of the records
        for label, mean in enumerate((0.5, 1, 1.5)):
            drawn = given.epsilon[data.train.targets == label]
            assert abs(drawn - mean).max() <= 0.25
            assert abs(drawn.mean() - mean) < 0.04  # 5 standard deviations
            assert np.ptp(drawn) > 0.45
        assert given.group_budgets == {"a": 0.5, "b": 1, "c": 1.5}

    def test_gaussian_around_the_means_of_groups(self):
        """Setting CFS: a budget is positive, so that draws below `lowest` are drawn again."""
        data = data_set([500] * 4)
        groups = {"fish": ("a", "b"), "vehicles": ("c", "d")}
        given = assign.one_each(
            data, {"fish": 1, "vehicles": 5}, 0.5, 7, classes=groups, distribution="gaussian"
        )
        assert_usable(given, data)
        fish, vehicles = (given.epsilon[data.train.targets // 2 == half] for half in (0, 1))
        assert given.epsilon.min() >= 0.1
        assert vehicles.mean() == pytest.approx(5, abs=0.08)
        assert vehicles.std() == pytest.approx(0.5, abs=0.06)
        assert 1 < fish.mean() < 1.12
        assert given.groups(data.test).tolist() == ["fish"] * 4 + ["vehicles"] * 4

    def test_all_problems(self):
        call = lambda: assign.one_each(  # noqa: E731
            data_set([2, 2]), (1, 2), -1, 0, distribution="cauchy", lowest=3
        )
        assert len(problems(call, "'cauchy'", "spread -1", "lowest 3")) == 3

    def test_budgets_stay_positive(self):
        problems(lambda: assign.one_each(data_set([2, 2]), (0.5, 1), 0.5, 0), "budgets above 0")


class TestFlips:
    @pytest.mark.parametrize("classes", [2, 10])
    def test_share_and_uniformity(self, classes):
        """Setting CFN."""
        targets = np.repeat(np.arange(classes), 4000 // classes)
        noisy = assign.flip_labels(targets, 0.1, classes, seed=0)
        assert (noisy != targets).sum() == 400
        assert noisy.min() >= 0
        assert noisy.max() < classes
        steps = np.bincount((noisy - targets)[noisy != targets] % classes, minlength=classes)
        assert (abs(steps[1:] - 400 / (classes - 1)) < 5 * np.sqrt(400 / (classes - 1))).all()

    def test_source_is_untouched(self):
        targets = np.zeros(10, dtype=np.int64)
        assert assign.flip_labels(targets, 1.0, 2, 0).tolist() == [1] * 10
        assert targets.sum() == 0
        assert (assign.flip_labels(targets, 0.0, 2, 0) == targets).all()

    @pytest.mark.parametrize(("share", "classes"), [(-0.1, 3), (1.1, 3), (0.1, 1)])
    def test_refusals(self, share, classes):
        problems(
            lambda: assign.flip_labels(np.zeros(3, int), share, classes, 0), "share from 0 to 1"
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda data, seed: assign.by_random_class(data, (1, 2, 3), seed).record_owner,
        lambda data, seed: (
            assign.random_shares(data, (0.2, 0.3, 0.5), (1, 2, 3), seed).record_owner
        ),
        lambda data, seed: assign.overlapping(data, (1, 2, 3), 0.3, seed).record_owner,
        lambda data, seed: assign.one_each(data, (1, 2, 3), 0.2, seed).epsilon,
        lambda data, seed: assign.flip_labels(data.train.targets, 0.2, 3, seed),
    ],
)
def test_seeds_decide(make):
    data = data_set([40] * 3)
    assert (make(data, 5) == make(data, 5)).all()
    assert any((make(data, 5) != make(data, seed)).any() for seed in range(6, 12))
