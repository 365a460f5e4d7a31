"""At most so many rows per owner, selected by each owner's rows alone."""

import numpy as np
import pytest

import ownerwise as ow

IDS = np.array(["b", "a", "b", "b", "c", "b", "a", "b"])


def owners(ids=IDS, **options):
    return ow.Owners(ids, dict.fromkeys(np.unique(ids).tolist(), 1.0), **options)


def test_first_keeps_the_first_rows_of_every_owner():
    bounded, kept = owners().bound(2, select="first")
    assert kept.tolist() == [0, 1, 2, 4, 6]
    assert bounded.records.tolist() == [2, 2, 1]
    assert bounded.ids[bounded.record_owner_index].tolist() == IDS[kept].tolist()


@pytest.mark.parametrize("select", ["random", "first"])
@pytest.mark.parametrize("integers", [True, False])
def test_removing_an_owner_changes_nothing_for_the_others(select, integers):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 20, 600)
    ids = ids if integers else ids.astype(str)
    _, kept = owners(ids).bound(5, select=select, key="study 7")
    for removed in np.unique(ids)[:5]:
        others = np.flatnonzero(ids != removed)
        _, without = owners(ids[others]).bound(5, select=select, key="study 7")
        assert np.array_equal(others[without], kept[ids[kept] != removed])


def test_random_rows_depend_on_the_key_and_reach_every_position():
    ids = np.zeros(40, dtype=int)
    chosen = [owners(ids).bound(4, key=key)[1].tolist() for key in range(200)]
    assert owners(ids).bound(4, key=3)[1].tolist() == chosen[3]
    counts = np.bincount(np.concatenate(chosen), minlength=40)
    # each is Binomial(200, 0.1), mean 20, std 4.2: beyond 6 std with probability below 1e-7
    assert counts.sum() == 800
    assert (counts > 0).all()
    assert (counts < 46).all()


def test_declared_numbers_are_a_limit_too():
    bounded, kept = owners(records={"a": 1, "b": 3, "c": 9}).bound(4, select="first")
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert bounded.records.tolist() == [1, 3, 4]
    assert bounded.records_basis == "declared"


def test_numbers_counted_in_the_data_are_still_called_counted():
    bounded, _ = owners().bound(2)
    assert bounded.records_basis == "counted"
    assert "counted (assumed public)" in repr(bounded)


def test_wrong_arguments_are_all_listed():
    with pytest.raises(ow.BudgetError) as error:
        ow.Owners(None, {"a": 1.0}).bound(0, select="frist", key=1.5)
    text = "\n".join(error.value.problems)
    for part in ("max_records 0", "did you mean 'first'", "key 1.5", "no records attached"):
        assert part in text
