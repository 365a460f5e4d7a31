"""Owners: every source gives the same budgets; bad input is refused completely and in words."""

import copy
import dataclasses
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerwise.errors import BudgetError, PrivacyWarning, Problems, name_some
from ownerwise.owners import (
    UNITS,
    Owners,
)
from ownerwise.owners.ids import report_lookalikes

LEVELS = {"high": 0.5, "low": 5.0}
LETTERS = st.characters(codec="utf-8", exclude_characters="\0")
RECORD_OWNER = ["b", "a", "b", "c", "b"]


def none_alike(names):
    """Return whether all ids look different, as `Owners` requires."""
    found = Problems()
    report_lookalikes(names, "ids", found)
    return not len(found)


def problems(*arguments, **options):
    with pytest.raises(BudgetError) as error:
        Owners(*arguments, **options)
    return error.value.problems


def only_problem(*arguments, says, **options):
    (problem,) = problems(*arguments, **options)
    for word in says:
        assert word in problem


def assert_same(first, second):
    assert first.ids.dtype.kind == second.ids.dtype.kind
    for name in ("ids", "epsilon", "delta", "records"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()
    assert first.fingerprint == second.fingerprint


class TestSources:
    @pytest.mark.parametrize(
        "epsilon",
        [
            {"c": 3, "a": 1.0, "b": np.float32(2)},
            [1, 2.0, 3],
            np.array([1, 2, 3]),
            torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
            pd.Series([3.0, 1.0, 2.0], index=["c", "a", "b"]),
            pd.Series([1.0, 2.0, 3.0]),
            pd.DataFrame({"owner": ["c", "b", "a"], "epsilon": [3, 2, 1]}),
            {"a": "1", "b": "medium", "c": 3},
            (x for x in (1.0, 2.0, 3.0)),
        ],
    )
    def test_every_way_to_give_epsilon(self, epsilon):
        owners = Owners(RECORD_OWNER, epsilon, levels={"medium": 2})
        assert owners.ids.tolist() == ["a", "b", "c"]
        assert owners.epsilon.tolist() == [1.0, 2.0, 3.0]
        assert owners.delta.tolist() == [1e-5] * 3
        assert owners.records.tolist() == [1, 3, 1]
        assert owners.record_owner_index.tolist() == [1, 0, 1, 2, 1]
        assert (len(owners), owners.total_records, owners.largest_holding) == (3, 5, 3)
        assert owners.records_basis == "counted"

    def test_one_number_or_one_level_for_all(self):
        assert Owners(RECORD_OWNER, 2, 1e-6).epsilon.tolist() == [2.0] * 3
        assert Owners(RECORD_OWNER, "high", levels=LEVELS).epsilon.tolist() == [0.5] * 3

    def test_one_value_per_record_makes_every_record_its_own_owner(self):
        owners = Owners(None, [3.0, 1.0, 2.0], [1e-5, 1e-6, 1e-7])
        assert owners.ids.tolist() == owners.record_owner_index.tolist() == [0, 1, 2]
        assert owners.epsilon.tolist() == [3.0, 1.0, 2.0]
        assert owners.records.tolist() == [1, 1, 1]

    def test_per_record_array_is_accepted_where_both_readings_agree(self):
        assert Owners([2, 5, 9], [3.0, 1.0, 2.0]).epsilon.tolist() == [3.0, 1.0, 2.0]
        assert Owners(["a", "b"], np.array(["low", "high"]), levels=LEVELS).epsilon[0] == 5.0
        assert Owners([9, 2, 5], [3.0, 3.0, 3.0]).epsilon.tolist() == [3.0] * 3

    def test_declared_records_name_the_owners_where_nothing_else_does(self):
        owners = Owners(None, 1.0, records={"b": 5, "a": 7})
        assert (owners.ids.tolist(), owners.records.tolist()) == (["a", "b"], [7, 5])

    @settings(deadline=None)
    @given(
        st.one_of(
            st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
            st.sets(
                st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
                min_size=1,
            ).filter(none_alike),
        ),
        st.randoms(use_true_random=False),
    )
    def test_mapping_table_and_array_agree_in_any_order(self, names, random):
        ids = sorted(names)
        epsilon = [random.uniform(0.1, 10) for _ in ids]
        delta = [random.uniform(1e-9, 1e-4) for _ in ids]
        counts = [random.randint(1, 3) for _ in ids]
        records = [name for name, count in zip(ids, counts, strict=True) for _ in range(count)]
        by_array = Owners(records, epsilon, delta)  # records in the order of ids
        assert by_array.records.tolist() == counts

        rows = list(zip(ids, epsilon, delta, counts, strict=True))
        random.shuffle(rows)
        random.shuffle(records)
        mappings = [{row[0]: row[at] for row in rows} for at in (1, 2)]
        by_mapping = Owners(records, *mappings)
        frame = pd.DataFrame(rows, columns=["owner", "epsilon", "delta", "records"])
        by_table = Owners.from_table(frame)
        for owners in (by_mapping, by_table, by_table.with_records(records)):
            assert_same(owners, by_array)
        assert by_mapping.ids[by_mapping.record_owner_index].tolist() == records


class TestDeclaredRecords:
    @pytest.mark.parametrize("records", [{"a": 9, "b": 8, "c": 7}, [9, 8, 7]])
    def test_data_with_other_counts_changes_nothing(self, records):
        owners = Owners(["b", "b"], {"a": 1.0, "b": 2.0, "c": 3.0}, records=records)
        assert owners.records.tolist() == [9, 8, 7]
        assert owners.record_owner_index.tolist() == [1, 1]
        assert owners.fingerprint == owners.with_records(["a"]).fingerprint
        assert "24 records declared (assumed public), at most 9 per owner" in repr(owners)

    def test_counts_that_nobody_declared_are_taken_from_the_data(self):
        planned = Owners.from_table({"a": 1.0, "b": 2.0})
        trained = planned.with_records(["b", "a", "b"])
        assert planned.records.tolist() == [1, 1]
        assert trained.records.tolist() == [1, 2]
        assert trained.with_records(["a"]).records.tolist() == [1, 2]

    def test_attached_records_must_have_owners(self):
        owners = Owners.from_table({1: 1.0, 2: 2.0})
        with pytest.raises(BudgetError, match="no budget for owner 3;"):
            owners.with_records([1, 2, 3, 3])
        with pytest.raises(BudgetError, match="owner without records: 2"):
            owners.with_records([1, 1])
        with pytest.raises(BudgetError, match="convert those in record_owner to int"):
            owners.with_records(["1", "2"])


class TestObject:
    def test_nothing_can_be_changed(self):
        mine = np.array([1.0, 2.0, 3.0])
        owners = Owners(RECORD_OWNER, mine)
        for one in (owners, pickle.loads(pickle.dumps(owners)), copy.deepcopy(owners)):
            assert_same(one, owners)
            for name in ("ids", "epsilon", "delta", "records", "record_owner_index"):
                with pytest.raises(ValueError, match="read-only"):
                    getattr(one, name)[0] = getattr(one, name)[1]
            with pytest.raises(dataclasses.FrozenInstanceError):
                one.epsilon = mine
        mine[0] = 9.0
        assert owners.epsilon[0] == 1.0

    def test_fingerprint_is_of_ids_and_counts(self):
        base = Owners(["a", "b", "b"], 1.0).fingerprint
        assert Owners(np.array(["b", "a", "b"], dtype="U9"), 2.0, 1e-6).fingerprint == base
        others = [
            Owners(["a", "b"], 1.0),
            Owners(["a", "c", "c"], 1.0),
            Owners(["ab", "b", "b"], 1.0),
            Owners([1, 2, 2], 1.0),
            Owners([1, 3, 3], 1.0),
            Owners(["1", "2", "2"], 1.0),
        ]
        assert len({base, *(owners.fingerprint for owners in others)}) == 7

    def test_repr_shows_counts_and_ranges(self):
        owners = Owners(np.arange(1000), np.linspace(0.5, 8, 1000))
        assert repr(owners) == (
            "Owners(1000 owners, epsilon 0.5 to 8, delta 1e-05, 1000 records counted (assumed "
            "public), at most 1 per owner, records attached)"
        )

    def test_the_unit_is_the_record(self):
        assert UNITS["record"].startswith("ONE RECORD")

    def test_large_delta_warns_with_the_owner_and_what_would_do(self):
        with pytest.warns(PrivacyWarning, match=r"owner 3 is up to 0.3, above 1/4.*at most 0.03"):
            Owners([1, 2, 3, 4], 1.0, {1: 1e-5, 2: 0.25, 3: 0.3, 4: 1e-5})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Owners([1, 2, 3, 4], 1.0, 0.25)

    def test_name_some_shows_the_first_and_counts_the_rest(self):
        assert name_some(["a", "b", "c"]) == "a, b, c"
        assert name_some(np.arange(7)) == "0, 1, 2 and 4 more"


class TestBadValues:
    @pytest.mark.parametrize("wrong", [0, -1.0, np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("as_array", [True, False])
    def test_a_wrong_epsilon_names_its_owner(self, wrong, as_array):
        epsilon = np.array([1.0, wrong, 1.0]) if as_array else {"a": 1, "b": wrong, "c": 1}
        only_problem(RECORD_OWNER, epsilon, says=["epsilon of owner b (", str(wrong), "positive"])

    @pytest.mark.parametrize("wrong", [0, 1, -1e-5, 2, np.nan])
    def test_a_wrong_delta_names_its_owner(self, wrong):
        delta = {"a": 1e-5, "b": 1e-5, "c": wrong}
        only_problem(RECORD_OWNER, 1.0, delta, says=[f"delta of owner c ({wrong!r})", "1e-5"])
        only_problem(RECORD_OWNER, 1.0, wrong, says=[f"delta of all owners ({wrong!r})"])

    @pytest.mark.parametrize("wrong", [-3, 2.5, np.nan, np.inf])
    def test_wrong_declared_records_name_their_owner(self, wrong):
        records = {"a": 1, "b": wrong, "c": 1}
        says = [f"records of owner b ({wrong!r})", "whole number of at least 1"]
        only_problem(RECORD_OWNER, 1.0, records=records, says=says)

    @pytest.mark.parametrize("wrong", [None, True, "much", "", [1.0], 1j, pd.NA])
    def test_values_that_are_not_numbers_are_refused(self, wrong):
        epsilon = {"a": 1.0, "b": wrong, "c": "high"}
        says = [f"epsilon of owner b ({wrong!r})", "known levels: high, low"]
        only_problem(RECORD_OWNER, epsilon, levels=LEVELS, says=says)
        records = {"a": 1, "b": wrong, "c": 1}
        says = ["records of owner b", "enter a number"]
        only_problem(RECORD_OWNER, 1.0, records=records, says=says)

    def test_levels_without_meaning(self):
        only_problem(RECORD_OWNER, ["high", 1, 2], says=["owner a ('high')", "pass levels="])
        meant = {"high": -1, "low": "x", "3": 1, 4: 1}
        found = problems(RECORD_OWNER, ["high", "low", 1], levels=meant)
        assert [text.split()[1] for text in found] == ["'high'", "'low'", "'3'", "4"]

    def test_only_three_owners_are_named(self):
        says = ["owner 0 (-1.0), 1 (-1.0), 2 (-1.0) and 997 more:"]
        only_problem(None, np.full(1000, -1.0), says=says)


class TestBadOwners:
    def test_record_without_budget(self):
        says = ["no budget for owner b, c;", "add a budget", "leave"]
        only_problem(RECORD_OWNER, {"a": 1.0}, says=says)

    def test_owner_without_records(self):
        epsilon = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}
        only_problem(RECORD_OWNER, epsilon, says=["without records: d, e", "remove", "records="])

    @pytest.mark.parametrize("what", ["delta", "records"])
    def test_mappings_of_other_owners(self, what):
        value = {"delta": 1e-5, "records": 1}[what]
        given = {what: {"a": value, "x": value}}
        lacking, unknown = problems(RECORD_OWNER, {"a": 1, "b": 1, "c": 1}, **given)
        assert f"the mapping {what} has no value for owner b, c" in lacking
        assert "one number for all" in lacking
        assert f"the mapping {what} names owner x" in unknown
        assert "add a budget" in unknown

    def test_empty_records_are_refused(self):
        only_problem([], 1.0, says=["record_owner is empty", "at least one"])
        only_problem(None, {}, says=["the mapping epsilon is empty", "at least one"])
        only_problem(None, [], says=["empty"])

    def test_owners_must_be_named_somewhere(self):
        only_problem(None, 1.0, says=["the owners are unknown", "one owner id per record"])

    @pytest.mark.parametrize("gap", [None, "", np.nan, pd.NA, pd.NaT])
    def test_records_without_an_id_are_named(self, gap):
        ids = ["a", gap, "b", gap, gap, gap]
        only_problem(ids, 1.0, says=["no owner id in record 1, record 3, record 4 and 1 more"])

    def test_missing_ids_do_not_hide_records_without_budget(self):
        ids, budget = problems([1, None, 9], {1: 1.0, 2: 1.0})
        assert "record 1" in ids
        assert "no budget for owner 9" in budget

    def test_ids_of_two_kinds_are_refused(self):
        says = ["int in record_owner (such as 1)", "str in the budgets (such as '1')", "to str"]
        only_problem([1, 2], {"1": 1.0, "2": 1.0}, says=says)
        says = ["str in the mapping delta", "int in the budgets", "to int"]
        only_problem([1], {1: 1.0}, {"1": 1e-5}, says=says)


class TestBadLengths:
    def test_one_epsilon_per_record_with_several_records_per_owner(self):
        says = [
            "one value for each record",
            "owner b has several",
            "{id: epsilon}",
            "a separate owner",
        ]
        only_problem(RECORD_OWNER, [1.0, 2.0, 3.0, 4.0, 5.0], says=says)

    def test_values_with_two_possible_orders_are_refused(self):
        says = ["(9, 2, 5) are not in ascending order", "unclear", "a mapping {id: epsilon}"]
        only_problem([9, 2, 5], [3.0, 1.0, 2.0], says=says)

    @pytest.mark.parametrize("what", ["epsilon", "delta", "records"])
    def test_an_array_of_the_wrong_length_is_refused(self, what):
        options = {"epsilon": 1.0} | {what: [0.5, 0.5] if what == "delta" else [1, 1]}
        says = [f"{what}: 2 values for 3 owners", "one number for all", f"{{id: {what}}}"]
        only_problem(RECORD_OWNER, says=says, **options)

    def test_arrays_of_two_dimensions_are_refused(self):
        says = ["epsilon has shape (3, 1)", "one dimension"]
        only_problem(RECORD_OWNER, np.ones((3, 1)), says=says)


class TestAllAtOnce:
    def test_four_problems_of_one_input(self):
        epsilon = {"a": 0, "b": "hgih", "c": 1.0}
        delta = {"a": 1e-5, "b": 1e-5, "c": 1}
        found = problems([*RECORD_OWNER, "x"], epsilon, delta, levels=LEVELS)
        assert len(found) == 4
        for text in ("owner x", "b ('hgih')", "epsilon of owner a (0)", "delta of owner c (1)"):
            assert sum(text in problem for problem in found) == 1

    def test_all_problems_are_listed_at_once(self):
        found = problems(
            [1, None, 2.5],
            {"a": -1, 3: 1.0},
            [1e-5, 2],
            records=np.ones((2, 2)),
            levels={"high": 0},
        )
        assert len(found) == 7

    def test_the_message_numbers_the_problems(self):
        with pytest.raises(BudgetError, match=r"2 problems:\n  1\. epsilon .*\n  2\. delta "):
            Owners([1], -1, 2)


def test_held_out_owners_are_left_out_if_they_have_no_records():
    epsilon = {"ann": 1.0, "bob": 2.0, "cem": 3.0}
    owners = Owners(["cem", "ann", "cem"], epsilon, held_out=["bob", "cem", "dan"])
    assert owners.ids.tolist() == ["ann", "cem"]
    assert owners.epsilon.tolist() == [1.0, 3.0]
    assert owners.records.tolist() == [1, 2]
    assert owners.record_owner_index.tolist() == [1, 0, 1]
    assert owners.left_out == {"bob": 2.0}
    declared = Owners(["ann"], epsilon, records=5, held_out=["bob"], split_by="owner")
    assert declared.ids.tolist() == ["ann", "cem"]  # no records yet, but declared
    with pytest.raises(BudgetError, match="owner without records: cem"):
        Owners(["ann"], epsilon, held_out=["bob"])
    with pytest.raises(BudgetError, match=r"epsilon of owner bob \(-1.0\)"):
        Owners(["ann"], {"ann": 1.0, "bob": -1.0}, held_out=["bob"])
    assert Owners(["ann"], {"ann": 1.0}, held_out=[]).left_out == {}
