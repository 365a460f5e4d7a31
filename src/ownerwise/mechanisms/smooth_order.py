"""INO's weights for a batch, based on a smooth order of records that rounding hardly changes.

A hard order based on computed losses is not safe. Kernels round a row differently depending on its
position in the batch, so removing one record changes the last bits of all other losses, and
hundreds of records with nearly equal losses and opposite gradients can swap places. The order here
is smooth instead:

- Levels are the multiples of a public width h. Records at the same level have the same weight.
- A record between two levels counts proportionally at both: if its score is a fraction t of the way
  from level k to level k + 1, it counts as a record with clip norm (1 - t) C at k and as one with
  clip norm t C at k + 1.

Adding record i therefore adds two parts with clip norms (1 - t) C_i and t C_i, so it changes the
sum by at most C_i. The weights are continuous: if no score changes by more than e, the sum changes
by at most 2 e G / h, where G is the batch's total clip norm. Both statements are proved in
docs/proofs/ino.md. A width of 0 gives the hard order, in which records with equal scores have the
same weight.
"""

from __future__ import annotations

import numpy as np

from ownerwise.mechanisms.tails import Tail

__all__ = ["MOST_LEVELS", "ordered_weights"]

MOST_LEVELS = 100_000
"""The largest number of levels that scores may span."""
_SMALLEST = 5e-324  # the smallest positive number


def ordered_weights(
    scores: np.ndarray, clip_norms: np.ndarray, tail: Tail, tail_length: float, width: float
) -> np.ndarray:
    """Return one weight in [0, 1] per record.

    This takes time O(n + levels), or O(n log n) if the width is 0.

    Args:
        scores: one finite number per record; the highest is the most important.
        clip_norms: clip norm of each record's owner, positive.
        tail: shape of the tail.
        tail_length: length of the tail in units of clip norm, positive.
        width: distance between two levels; 0 for the hard order.
    """
    if width == 0:
        _, level = np.unique(scores, return_inverse=True)
        return _shared_weights(np.bincount(level, clip_norms), tail, tail_length)[level]
    position = scores / width
    below = np.floor(position)
    upper_part = position - below
    below -= below.min()
    levels = below.max() + 2
    if levels > MOST_LEVELS:
        raise ValueError(
            f"the scores span more than {MOST_LEVELS} levels of width {width:g}; clamp "
            "the scores, or use a larger width"
        )
    level = below.astype(np.intp)
    raised = upper_part * clip_norms
    totals = np.bincount(level + 1, raised, int(levels))
    totals[:-1] += np.bincount(level, clip_norms - raised)
    shared = _shared_weights(totals, tail, tail_length)
    upper_part *= (shared[1:] - shared[:-1]).take(level)
    upper_part += shared.take(level)
    return np.minimum(upper_part, 1.0, out=upper_part)


def _shared_weights(totals: np.ndarray, tail: Tail, tail_length: float) -> np.ndarray:
    """Return the weight shared by the records at each level; the levels are in ascending order.

    Let R be the total clip norm of a level and all levels below it, and let H be the integral of
    the importance, measured from the end of the batch. A level with total clip norm C has weight
    (H(R) - H(R - C)) / C: the average importance over its part of the batch, which lies between the
    importance values at the two ends of that part.
    """
    ends = np.zeros(len(totals) + 1)  # ends of the levels, in tail lengths; the first starts at 0
    np.add.accumulate(totals, out=ends[1:])
    ends /= tail_length
    within = np.minimum(ends, 1.0)
    area = tail.area(within) + (ends - within)
    height = np.where(ends < 1.0, tail.rising(within), 1.0)
    average = (area[1:] - area[:-1]) * tail_length / np.maximum(totals, _SMALLEST)
    return np.minimum(np.maximum(average, height[:-1]), height[1:])  # faster than np.clip
