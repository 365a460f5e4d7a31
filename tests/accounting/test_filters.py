"""Privacy filters: their limits against other accountants, and toy runs whose outputs are counted.

A toy run releases a few numbers, each the sum of one record's contribution and Gaussian noise,
rounded to a grid. All sequences of outputs are enumerated, so the hockey-stick divergence between
the runs with and without the record is exact (rounding and the lumped tails are post-processing).
"""

import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import ndtr

import ownerwise as ow
from ownerwise.accounting import FILTERS, filter_limits, gaussian_delta
from ownerwise.mechanisms import IndividualFilter, Sensitivity

EDGES = np.linspace(-6.0, 6.0, 49)  # of the cells of one output, in standard deviations
EXACT = Sensitivity(0.0, 0.0)
STEPS = 3


def one(values) -> np.ndarray:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))


def test_the_limits_of_epsilon_1_are_those_of_the_literature():
    assert filter_limits("gdp", one(1.0), one(1e-5))[0] ** 0.5 == pytest.approx(0.268, abs=5e-4)
    assert filter_limits("zcdp", one(1.0), one(1e-5))[0] / 2 == pytest.approx(0.0306, abs=5e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_a_gaussian_at_the_limit_stays_within_the_budget_by_dp_accounting(name):
    epsilon, delta = one([0.05, 0.3, 1.0, 8.0]), one([1e-6, 1e-5, 1e-5, 1e-3])
    for limit, target, rest in zip(
        filter_limits(name, epsilon, delta), epsilon, delta, strict=True
    ):
        reference = privacy_loss_distribution.from_gaussian_mechanism(
            limit**-0.5, value_discretization_interval=1e-4 * target
        )
        found = reference.get_epsilon_for_delta(rest)
        assert found <= target * (1 + 1e-4)  # the reference's grid overstates a little
        assert found >= target * (0.999 if name == "gdp" else 0.8)


@pytest.mark.parametrize("count", [50, 20_000])
def test_gdp_limits_are_exact_from_below(count):
    epsilon = np.geomspace(0.01, 20, count)
    delta = np.resize([1e-5, 1e-5, 1e-7], count)
    found = gaussian_delta(filter_limits("gdp", epsilon, delta) ** 0.5, epsilon)
    assert (found <= delta).all()
    assert (found >= 0.999 * delta).all()


def test_limits_follow_owners_not_positions():
    epsilon, delta = one([2.0, 0.5, 2.0, 1.0]), one([1e-5, 1e-5, 1e-6, 1e-5])
    together = filter_limits("gdp", epsilon, delta)
    alone = [filter_limits("gdp", one(e), one(d))[0] for e, d in zip(epsilon, delta, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


# Toy runs. A policy returns the length of the record's contribution to the next output, for every
# sequence of earlier outputs, given as the log-likelihood ratio so far. Lengths are in units of the
# noise; the clip norm is 1.


def greedy(step, ratio):
    """Give as much as possible while the outputs look like those with the record."""
    return np.where(ratio >= 0, 1.0, 0.05)


def shy(step, ratio):
    """Give as much as possible while the outputs hide the record."""
    return np.where(ratio <= 0, 1.0, 0.0)


def clipped(step, ratio):
    """Give the whole clip norm in every step."""
    return np.ones_like(ratio)


def mixed(step, ratio):
    """Give a length that depends on all earlier outputs."""
    return 0.5 + 0.5 * np.sin(7.0 * ratio + step)


class CheckedAfterUse(IndividualFilter):
    """A planted bug: the check leaves out the cost of the current step."""

    def admit(self, members, lengths):
        before = self._next[members]
        super().admit(members, lengths)
        return (before < 2**60).astype(np.float64)


class ForgivingCaller(IndividualFilter):
    """A planted bug: small contributions are free."""

    def admit(self, members, lengths):
        return super().admit(members, np.where(lengths < 0.6, 0.0, lengths))


def toy_plan(epsilon: float, name: str, to_remaining: bool, paths: int) -> ow.Plan:
    """A plan of as many equal records as there are sequences of outputs, each with its own spends.

    Its noise is 1 clip norm.
    """
    owners = large_delta(paths, epsilon)
    return ow.plan(
        owners, method="individual", steps=STEPS, noise_multiplier=1.0, filter=name,
        clip_to_remaining=to_remaining,
    )  # fmt: skip


def large_delta(paths: int, epsilon: float) -> ow.Owners:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # delta is large, so that few cells resolve it
        return ow.Owners(np.zeros(paths, dtype=np.int64), {0: epsilon}, 1e-2)


def divergences(policy, plan, filter_class=IndividualFilter) -> tuple[float, float]:
    """Return delta at the plan's epsilon, adding and removing the record, by enumeration."""
    cells, paths = len(EDGES) - 1, len(plan.owners.record_owner_index)
    individual = filter_class(plan, EXACT)
    without, within = np.ones(1), np.ones(1)  # probabilities of the sequences so far
    for step in range(STEPS):
        repeat = paths // len(without)
        ratio = np.log(within / without)
        lengths = np.minimum(policy(step, ratio), plan.clip_norms[0])
        individual.begin()
        each = individual.admit(np.arange(paths), np.repeat(lengths, repeat))
        individual.commit()
        moved = (each[::repeat] * lengths)[:, None] / plan.noise_std
        for mean, start in ((0.0, without), (moved, within)):
            below = ndtr(EDGES[1:-1] - mean) * np.ones((len(start), 1))
            ends = np.zeros((len(start), 1)), np.ones((len(start), 1))
            mass = np.diff(np.concatenate([ends[0], below, ends[1]], axis=1), axis=1)
            if start is without and mean is not moved:
                next_without = (start[:, None] * mass).ravel()
            else:
                next_within = (start[:, None] * mass).ravel()
        without, within = next_without, next_within
        assert len(without) == cells ** (step + 1)
    grow = np.exp(plan.targets[0])
    removed = np.maximum(within - grow * without, 0).sum()
    added = np.maximum(without - grow * within, 0).sum()
    return float(added), float(removed)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("policy", [greedy, shy, clipped, mixed])
@pytest.mark.parametrize("to_remaining", [False, True])
def test_every_adaptive_run_stays_within_epsilon_and_delta(name, policy, to_remaining):
    paths = (len(EDGES) - 1) ** STEPS
    for epsilon in (0.5, 3.0):  # the second one allows the clip norm more than once
        worst = max(divergences(policy, toy_plan(epsilon, name, to_remaining, paths)))
        assert worst <= 1e-2


def test_the_bound_is_reached_and_planted_bugs_break_it():
    plan = toy_plan(3.0, "gdp", True, (len(EDGES) - 1) ** STEPS)
    assert max(divergences(clipped, plan)) >= 0.9e-2
    assert max(divergences(clipped, plan, CheckedAfterUse)) > 1.2e-2
    small = lambda step, ratio: np.where(step, 1.0, 0.55) * np.ones_like(ratio)  # noqa: E731
    assert max(divergences(small, plan)) <= 1e-2
    assert max(divergences(small, plan, ForgivingCaller)) > 1.05e-2
