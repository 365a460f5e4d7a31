"""INO's order against crafted batches: ties, near ties, and losses that rounding moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerwise.mechanisms import INO, Beta, Steps
from ownerwise.mechanisms.smooth_order import ordered_weights

TAILS = [Beta(), Beta(2.0, 0.5), Beta(0.3, 3.0), Steps()]


def worst_movement(weights, without, clips, removed):
    """How far the sum can move if all gradients point against us, in units of the clip norm."""
    others = np.delete(weights, removed) - without
    moved = np.abs(others) @ np.delete(clips, removed) + weights[removed] * clips[removed]
    return moved / clips[removed]


records = st.lists(
    st.tuples(
        st.sampled_from([-2.3, -1.0, 0.0, 0.5, 0.5001, 3.0]) | st.floats(-2.3, 14), st.floats(-3, 3)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300)
@given(records, st.sampled_from(TAILS), st.floats(0.01, 100), st.sampled_from([0, 0.1, 0.5, 1, 3]))
def test_no_record_moves_the_sum_by_more_than_its_clip_norm(batch, tail, length, width):
    scores, log_clips = np.array(batch).T
    clips = np.exp(log_clips)
    weights = ordered_weights(scores, clips, tail, length, width)
    assert ((weights >= 0) & (weights <= 1)).all()
    for removed in range(len(scores)):
        without = np.zeros(0)
        if len(scores) > 1:
            rest = np.delete(scores, removed), np.delete(clips, removed)
            without = ordered_weights(*rest, tail, length, width)
        assert worst_movement(weights, without, clips, removed) <= 1 + 1e-9


@settings(max_examples=200)
@given(
    records, st.sampled_from(TAILS), st.floats(0.01, 100), st.sampled_from([0.1, 0.5, 1, 3]),
    st.floats(1e-9, 1e-2), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_moved_scores_move_the_sum_by_at_most_the_stated_amount(
    batch, tail, length, width, by, seed
):
    scores, log_clips = np.array(batch).T
    clips = np.exp(log_clips)
    moved = scores + by * np.random.default_rng(seed).uniform(-1, 1, len(scores))
    change = ordered_weights(scores, clips, tail, length, width) - ordered_weights(
        moved, clips, tail, length, width
    )
    assert np.abs(change) @ clips <= 2 * by * clips.sum() / width * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("count", [256, 10_000])
def test_equal_losses_that_rounding_moves_stay_within_the_slack(count):
    """Each loss moves by 8 roundoffs against us; the hard order moves by many clip norms."""
    ino = INO(tail_length=0.4 * count)
    clips = np.ones(count)
    moved = 1 + 8 * 2.0**-24 * np.resize([1.0, -1.0], count)
    allowed = ino.score_slack(2.0**-24) * count
    change = np.abs(ino.weights(moved, clips) - ino.weights(np.ones(count), clips)) @ clips
    assert change <= allowed
    hard = INO(tail_length=0.4 * count, width=0.0)
    assert np.abs(hard.weights(moved, clips) - hard.weights(np.ones(count), clips)) @ clips > 50


def test_the_slack_covers_the_mean_of_an_owners_losses():
    """One large loss among many tiny ones, each off by 8 roundoffs of max(1, loss)."""
    roundoff, width = 2.0**-24, 0.5
    losses = np.array([20.0] + [0.0] * 199)  # their mean is the smallest that is not clamped
    off = losses + 8 * roundoff * np.maximum(1.0, losses)
    moved = np.log(off.mean()) - np.log(losses.mean())
    assert moved > 8 * roundoff / 0.1
    assert 2 * moved / width <= INO(tail_length=1.0, width=width).score_slack(roundoff)


def test_a_narrow_order_tends_to_the_hard_one():
    rng = np.random.default_rng(0)
    losses, clips = rng.uniform(0.1, 5, 50), rng.uniform(0.5, 2, 50)
    hard = INO(tail_length=12.0, width=0.0).weights(losses, clips)
    narrow = INO(tail_length=12.0, width=0.01).weights(losses, clips)
    assert np.abs(hard - narrow).max() < 0.05


def test_the_hard_order_is_only_for_hardened_plans():
    assert INO(width=0.0).score_slack(2.0**-24) == np.inf
