"""Records with several owners: who shares how many, and how many are kept."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ownerwise as ow
from ownerwise.owners import split_ids

BUDGETS = {"ann": 1.0, "bob": 2.0, "cleo": 3.0}
RECORDS = ["ann", ("bob", "ann"), "cleo", ["ann", "bob"], {"cleo"}, ("cleo", "bob", "ann", "bob")]


def test_an_owner_counts_every_record_that_they_are_on():
    owners = ow.Owners(RECORDS, BUDGETS)
    assert owners.records.tolist() == [4, 3, 3]
    assert owners.records_of_holders.tolist() == [1, 0, 2, 2, 1]
    assert owners.total_records == 6
    assert owners.shared.sets() == [(0, 1), (0, 1, 2)]
    assert owners.record_owner_index.tolist() == [0, 3, 2, 3, 2, 4]
    assert [owners.name_of(at) for at in (2, 4)] == ["cleo", "ann + bob + cleo"]
    assert "6 records counted, 3 of them with several owners (assumed public)" in repr(owners)


def test_sets_of_one_owner_are_that_owner():
    plain = ow.Owners(["ann", "bob", "ann"], {"ann": 1.0, "bob": 2.0})
    sets = ow.Owners([("ann",), ["bob", "bob"], "ann"], {"ann": 1.0, "bob": 2.0})
    assert sets.shared is None
    assert sets.fingerprint == plain.fingerprint
    assert sets.record_owner_index.tolist() == plain.record_owner_index.tolist()


def test_declared_sets_are_those_that_would_be_counted_in_any_order():
    counted = ow.Owners(RECORDS, BUDGETS)
    declared = {("bob", "ann"): 2, "cleo": 2, ("cleo", "ann", "bob"): 1, "ann": 1}
    owners = ow.Owners(RECORDS[::-1], BUDGETS, records=declared)
    assert owners.shared == counted.shared
    assert owners.fingerprint == counted.fingerprint
    assert owners.record_owner_index.tolist() == counted.record_owner_index.tolist()[::-1]
    assert owners.records_basis == "declared"
    fewer = ow.Owners([("cleo", "bob", "ann"), "ann"], BUDGETS, records=declared)
    assert fewer.fingerprint == counted.fingerprint
    assert fewer.record_owner_index.tolist() == [4, 0]
    later = ow.Owners.from_table(BUDGETS, records=declared).with_records(RECORDS)
    assert later.record_owner_index.tolist() == counted.record_owner_index.tolist()
    assert ow.Owners.from_table(BUDGETS).with_records(RECORDS).fingerprint == counted.fingerprint


def test_copies_stay_frozen():
    owners = ow.Owners(RECORDS, BUDGETS)
    for twin in (copy.deepcopy(owners), pickle.loads(pickle.dumps(owners))):
        assert twin.shared == owners.shared
        with pytest.raises(ValueError, match="read-only"):
            twin.shared.records[0] = 9


@pytest.mark.parametrize(
    ("record_owner", "records", "message"),
    [
        (["ann", ()], None, "no owner id in record 1"),
        (["ann", ("bob", None)], None, "no owner id in record 1"),
        ([("ann", "bob"), 3], None, "type int and str"),
        ([("ann", "bob"), "zoe"], None, "no budget for owner zoe"),
        ([("ann", "bob")], {"ann": 2, "bob": 1, "cleo": 1}, r"ann \+ bob together: their number"),
        ([("ann", "bob")], {"ann": 2, ("bob", "cleo"): 1}, r"ann \+ bob together: their number"),
        (["ann"], {"ann": 2, ("bob", "cleo"): 1.5}, r"\('bob', 'cleo'\) \(1.5\)"),
        (["ann"], {"ann": 2, ("bob", "cleo"): -1}, "a whole number of at least 0"),
        (["ann"], {"ann": 2, ("bob", "cleo", "zoe"): 1}, "names owner zoe"),
        (["ann"], {("ann", "bob"): 1}, "no value for owner cleo"),
    ],
)
def test_bad_sets_say_what_to_do(record_owner, records, message):
    with pytest.raises(ow.BudgetError, match=message):
        ow.Owners(record_owner, BUDGETS, records=records)


def test_sets_that_were_not_declared_cannot_be_attached_later():
    owners = ow.Owners(["ann", "bob", "cleo"], BUDGETS)
    with pytest.raises(ow.BudgetError, match="Declare it for each set of owners"):
        owners.with_records([("ann", "bob"), "cleo"])


def random_records(seed: int, count: int = 200) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [
        tuple(random.choice(12, random.choice([1, 1, 2, 3]), replace=False).tolist())
        for _ in range(count)
    ]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), most=st.integers(1, 60), select=st.sampled_from(["random", "first"])
)
def test_bounding_keeps_the_rows_of_others_if_an_owner_is_removed(seed, most, select):
    """The rule that counts each owner's rows would bring back rows of co-owners."""
    rows = [tuple(sorted(row)) for row in random_records(seed)]
    budgets = dict.fromkeys(sorted({owner for row in rows for owner in row}), 1.0)
    counted = ow.Owners(rows, budgets)
    bounded, kept = counted.bound(most, select=select, key=seed)
    of_owner = {o: sum(o in rows[at] for at in kept) for o in counted.ids.tolist()}
    assert max(of_owner.values()) <= most
    assert bounded.records.tolist() == list(of_owner.values())
    assert (bounded.records_of_holders >= 0).all()
    declared = {row: rows.count(row) for row in set(rows)}
    for removed in counted.ids.tolist()[:4]:
        others = [at for at, row in enumerate(rows) if removed not in row]
        without = ow.Owners([rows[at] for at in others], budgets, records=declared)
        _, again = without.bound(most, select=select, key=seed)
        assert [others[at] for at in again] == [at for at in kept if removed not in rows[at]]


def test_bounding_leaves_no_room_that_an_own_row_could_take():
    rows = [(0, 1)] * 4 + [(0,)] * 10 + [(1,)] * 2 + [(2,)] * 3
    bounded, kept = ow.Owners(rows, dict.fromkeys(range(3), 1.0)).bound(5)
    assert bounded.records.tolist() == [5, 4, 3]
    assert bounded.records_of_holders.tolist() == [3, 2, 3, 2]
    assert len(kept) == bounded.total_records == 10


def test_cells_are_split_at_a_given_separator_only():
    cells = np.array(["7;12", "7", " 12 ; 7"])
    assert split_ids(cells, ";").tolist() == [(7, 12), (7,), (12, 7)]
    assert split_ids(np.array(["007;12", "7"]), ";").tolist() == [("007", "12"), ("7",)]
    numbers = np.array([7, 12])
    assert split_ids(numbers, ";") is numbers
    assert ow.Owners(cells, 1.0).shared is None
    with pytest.raises(ow.BudgetError, match="no owner id in record 0"):
        ow.Owners(split_ids(np.array(["a;", "b"]), ";"), 1.0)
