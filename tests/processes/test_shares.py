"""Who computes what: every element in one process, and the same random numbers in any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ownerwise as ow
from ownerwise.processes import DrawsOfShare, Processes, Share
from tools import step_tools

COUNTS = st.integers(1, 5)


def shares(count, indices, sizes, rows=None):
    owners = np.arange(len(sizes))
    return [
        Share.divided(Processes(rank, count), indices, owners, sizes, rows) for rank in range(count)
    ]


@given(count=COUNTS, sizes=st.lists(st.integers(1, 4), max_size=12))
def test_every_record_is_in_one_share_and_owners_are_whole(count, sizes):
    sizes = np.array(sizes, dtype=np.int64)
    indices = np.arange(sizes.sum()) + 100
    found = shares(count, indices, sizes)
    own = np.concatenate([share.own_records for share in found])
    assert sorted(own) == list(range(sizes.sum()))
    for share in found:
        assert share.records == sizes.sum()
        assert list(share.own) == list(range(share.processes.rank, len(sizes), count))
        element = np.repeat(np.arange(len(sizes)), sizes)
        assert set(element[share.own_records]) == set(share.own)
        kept = share.kept(np.arange(len(sizes)) % 2 == 0)
        assert (kept.owner_index[kept.own] == [at for at in share.own if at % 2 == 0]).all()


@given(count=COUNTS, records=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_in_a_hardened_plan_a_removed_record_moves_no_other(count, records, seed):
    rng = np.random.default_rng(seed)
    indices, sizes = np.arange(records), np.ones(records, dtype=np.int64)
    rows = rng.permutation(records + 7)[:records]
    removed = rng.integers(records)
    left = np.delete(indices, removed)
    before = shares(count, indices, sizes, rows)
    after = shares(count, left, sizes[left], np.delete(rows, removed))
    for share, other in zip(before, after, strict=True):
        places = dict(zip(indices[share.own_records], share.rows[share.own], strict=True))
        places.pop(removed, None)
        assert places == dict(zip(left[other.own_records], other.rows[other.own], strict=True))


@given(count=COUNTS, records=st.integers(1, 20), each=st.integers(1, 3), most=st.integers(1, 20))
def test_an_element_has_the_same_random_numbers_in_any_process(count, records, each, most):
    def stream():
        return step_tools.seeded().child("rule").at_step(0)

    whole = stream()
    calls = [whole.uniforms(records * each).reshape(records, each), whole.integers(9, records)]
    for rank in range(count):
        own = np.arange(rank, records, count)
        draws = DrawsOfShare(stream(), own, records)
        for start in range(0, len(own), most):
            part = own[start : start + most]
            drawn = draws.of(slice(start, start + most))
            assert (drawn.uniforms(len(part) * each).reshape(-1, each) == calls[0][part]).all()
            assert (drawn.integers(9, len(part)) == calls[1][part]).all()


def test_numbers_that_are_not_for_every_record_are_refused():
    draws = DrawsOfShare(step_tools.seeded().at_step(0), np.arange(4), 8)
    with pytest.raises(ow.OwnerwiseError, match="the same number of random numbers"):
        draws.of(slice(0, 4)).uniforms(5)
