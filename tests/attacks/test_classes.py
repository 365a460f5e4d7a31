"""Clip norms far apart in one batch: classes of similar clip norms, each summed on its own."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.gradients.contributions import blocks
from ownerwise.mechanisms import Standard
from ownerwise.planning import largest_total
from ownerwise.processes import Processes
from ownerwise.step.clipped_sums import ClippedSums
from ownerwise.step.rounding import GRID_TOLERANCE, NORM_ERROR, Rounding
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

OWNERS = ow.Owners(np.repeat([0, 1], [60, 60]), {0: 2.0, 1: 4.0}, 1e-5)
SMALL, LARGE = 1e-4, 60.0


def plan_with(clip_norms):
    """A hardened plan for these clip norms; only the sums are looked at, not the accounting."""
    plan = ow.plan(OWNERS, "scale", steps=2, batch_size=50, hardened=True)
    return dataclasses.replace(plan, clip_norms=np.asarray(clip_norms))


def moved_by_dust(classes: bool) -> float:
    """How far one of many small contributions moves the sum, in units of its clip norm."""
    plan = plan_with([SMALL, LARGE])
    model = nn.Linear(1, 1, bias=False)
    sums = ClippedSums(
        model, plan, lambda out, y: out[:, 0], Standard(), weights=None, release=None,
        steering=None, performance=ow.Performance(), processes=Processes(), not_private=False,
    )  # fmt: skip
    if not classes:
        sums.rounding = dataclasses.replace(sums.rounding, classes=None)
    owner_index = np.repeat([1, 0], [12, 40])
    features = torch.cat([torch.full((12, 1), 100.0), torch.full((40, 1), 1.0)])

    def total(chosen, removed=None):
        rows = tools.CoupledRows(plan.hardened_rows, removed)
        randomness = dataclasses.replace(ow.mechanisms.Randomness(), rows=rows)
        batch = ow.Batch(
            0, chosen, owner_index[chosen], (features[chosen], torch.zeros(len(chosen)))
        )
        return tools.flat(sums(batch, randomness))

    everyone = np.arange(52)
    whole = total(everyone)
    moves = [
        float((whole - total(np.delete(everyone, k), k)).norm()) / SMALL for k in range(12, 52)
    ]
    return max(moves)


def test_dust_beside_large_contributions_keeps_its_bound_through_classes(monkeypatch):
    assert moved_by_dust(classes=True) <= 1
    monkeypatch.setattr(blocks, "_SMALL", -1)  # as in large layers, which are summed in float32
    assert moved_by_dust(classes=True) <= 1
    assert moved_by_dust(classes=False) > 1.2  # the attack itself works on a single float32 sum


def test_a_class_holds_clip_norms_within_a_factor_of_four():
    norms = np.array([1.0, 3.9, 4.1, 15.0, 70.0])
    owners = ow.Owners(np.repeat(np.arange(5), 30), dict.fromkeys(range(5), 2.0), 1e-5)
    plan = ow.plan(owners, "uniform", steps=2, batch_size=50, hardened=True)
    plan = dataclasses.replace(plan, clip_norms=norms)
    rounding = Rounding.of(plan, nn.Linear(3, 1), None)
    assert rounding.classes.tolist() == [0, 0, 1, 1, 3]
    for number in set(rounding.classes):
        within = norms[rounding.classes == number]
        assert within.max() <= 4 * within.min()


def test_all_classes_together_exceed_their_bounds_with_the_planned_probability():
    """A union bound: each of k classes may exceed its bound with a k-th of the probability.

    The oracle recomputes every class's bound at that share, and its exact binomial tail.
    """
    plan = plan_with([SMALL, LARGE])
    model = nn.Linear(3, 1)
    share = plan.overflow_probability / 2
    bounds = [
        largest_total(plan.sampling_rates[[o]], plan.records[[o]].astype(float), np.ones(1), share)
        for o in range(2)
    ]
    tails = [
        binomial_tail(int(plan.records[o]), float(plan.sampling_rates[o]), bound)
        for o, bound in enumerate(bounds)
    ]
    assert sum(tails) <= plan.overflow_probability
    slack = Rounding.of(plan, model, None).slack
    within_block = 2 * (64 + 4) * 64 * 2.0**-24
    assert slack == pytest.approx(
        GRID_TOLERANCE + NORM_ERROR + 2 * 2.0**-24 * max(bounds) + within_block, rel=1e-9
    )
    whole = largest_total(
        plan.sampling_rates[[0]], plan.records[[0]].astype(float), np.ones(1), 2 * share
    )
    assert bounds[0] > whole or bounds[0] == plan.records[0]  # a k-th costs something


def binomial_tail(count, rate, bound):
    """P(more than `bound` of `count` coins show heads), term by term."""
    return sum(
        math.comb(count, k) * rate**k * (1 - rate) ** (count - k)
        for k in range(math.floor(bound) + 1, count + 1)
    )
