"""INO's weights: exact, within the budget by brute force, and what breaks where the proof ends."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from ownerwise.mechanisms import (
    INO,
    Beta,
    BudgetAware,
    ByLoss,
    Steps,
)
from tools.orders import EasiestFirst, OwnersFirst

TAILS = {
    "straight": Beta(),
    "beta 2 5": Beta(2, 5),
    "beta .5 .5": Beta(0.5, 0.5),
    "beta 5 .5": Beta(5, 0.5),
    "steps": Steps(),
    "one step": Steps([0.3]),
    "function": Steps.of(lambda x: (1 - x) ** 3, pieces=37),
}
PLAN = SimpleNamespace(
    sampling_rates=np.array([0.01, 0.02, 0.05, 0.2]),
    clip_norms=np.array([0.3, 1.0, 0.7, 2.0]),
    elements=np.array([300, 200, 100, 50]),
)
PLAN.holders = PLAN  # every record has a single owner
SCORES = {
    "loss": ByLoss(),
    "negative": EasiestFirst(),
    "mixed": OwnersFirst(),
    "aware 0": BudgetAware(0.0),
    "aware 1": BudgetAware(1.0),
    "aware 3": BudgetAware(3.0),
    "fixed random": lambda losses, owners, plan: np.sin(1e4 * losses + owners),
}


def batch_importance(tail, length, total, position):
    """The paper's batch importance function (Figure 4), by the definition."""
    into_tail = position - (total - length)
    if into_tail <= 0:
        return 1.0
    return float(tail.rising(np.array(1 - min(into_tail / length, 1.0))))


def weights_by_quadrature(tail, length, scores, clips):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    total, position = sum(clips), 0.0
    weights = np.zeros(len(scores))
    for i in order:
        ends = (position, position + clips[i])
        kinks = [total - length + length * k / 37 for k in range(38)]
        kinks += [total - length + length * k / 4 for k in range(5)]
        inside = sorted({k for k in kinks if ends[0] < k < ends[1]})
        pieces = zip([ends[0], *inside], [*inside, ends[1]], strict=True)
        area = sum(
            quad(lambda c: batch_importance(tail, length, total, c), a, b, epsabs=1e-13)[0]
            for a, b in pieces
        )
        weights[i] = area / clips[i]
        position = ends[1]
    return weights


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("length", [0.5, 3.0, 50.0])
def test_weights_equal_quadrature(name, length):
    """Both cases: the batch longer than the tail, and shorter."""
    rng = np.random.default_rng(1)
    scores, clips = rng.normal(size=12), rng.uniform(0.1, 2.0, 12)
    ours = INO(tail_length=length, shape=TAILS[name]).weights_of_scores(scores, clips)
    expected = weights_by_quadrature(TAILS[name], length, scores, clips)
    np.testing.assert_allclose(ours, expected, atol=2e-9)


def sensitivity_excess(weigh, vectors, clips):
    """Largest |sum with i - sum without i| / C_i over all records i of the batch."""
    whole = weigh(np.arange(len(clips))) @ vectors
    worst = 0.0
    for i in range(len(clips)):
        rest = np.delete(np.arange(len(clips)), i)
        moved = np.linalg.norm(whole - weigh(rest) @ vectors[rest])
        worst = max(worst, moved / clips[i])
    return worst


def hostile_batch(rng, spread=1.0):
    """Gradients that point the same way, or at random, at full clip norm or below; ties."""
    count = int(rng.integers(1, 9))
    clips = 10 ** rng.uniform(-spread, spread, count)
    directions = rng.normal(size=(count, 2)) * rng.choice([0.0, 1.0]) + np.array([1.0, 0.0])
    lengths = clips * rng.choice([1.0, 0.3], count)
    vectors = directions / np.linalg.norm(directions, axis=1, keepdims=True) * lengths[:, None]
    losses = np.abs(rng.normal(size=count)).round(int(rng.integers(0, 3)))
    return vectors, clips, losses, rng.integers(0, 4, count)


@pytest.mark.parametrize("name", TAILS)
def test_no_record_moves_the_sum_by_more_than_its_clip_norm(name):
    """Pitfall 23. Brute force: 7 tails x 1,500 batches, every order, each record left out."""
    rng = np.random.default_rng(2)
    for _ in range(1500):
        vectors, clips, losses, owners = hostile_batch(rng)
        score = SCORES[list(SCORES)[rng.integers(len(SCORES))]]
        ino = INO(tail_length=float(10 ** rng.uniform(-1.5, 1.5)), shape=TAILS[name])
        width = float(rng.choice([0.0, 0.2, 0.5, 2.0]))

        def weigh(
            members, ino=ino, score=score, losses=losses, owners=owners, clips=clips, width=width
        ):
            scores = score(losses[members], owners[members], PLAN)
            return ino.weights_of_scores(scores, clips[members], width)

        assert sensitivity_excess(weigh, vectors, clips) <= 1 + 1e-9


def test_clip_norms_spread_over_a_million_keep_the_bound():
    rng = np.random.default_rng(3)
    for _ in range(300):
        vectors, clips, losses, _ = hostile_batch(rng, spread=3.0)
        ino = INO(tail_length=float(10 ** rng.uniform(-3, 3.5)))
        excess = sensitivity_excess(
            lambda m, i=ino, s=losses, c=clips: i.weights(s[m], c[m]), vectors, clips
        )
        assert excess <= 1 + 1e-9
    with pytest.raises(ValueError, match="by more than a factor of 1e\\+06"):
        ino.weights(np.ones(2), np.array([1e-4, 1e3]))


def top_mu(scores, clips, mu=3):
    weights = np.zeros(len(scores))
    weights[np.argsort(-scores, kind="stable")[:mu]] = 1
    return weights


def drop_bottom_mu(scores, clips, mu=2):
    weights = np.ones(len(scores))
    order = np.argsort(-scores, kind="stable")
    weights[order[max(len(order) - mu, 0) :]] = 0
    return weights


def rounded_grid(scores, clips, precision=2):
    """A lookup grid of cumulative clip norms rounded to whole cells, with importance 1 in it."""
    order = np.argsort(-scores, kind="stable")
    cells = np.round(np.cumsum(clips[order]) * precision)
    widths = np.diff(np.concatenate([[0.0], cells])) / precision
    weights = np.zeros(len(scores))
    weights[order] = widths / clips[order]
    return weights


@pytest.mark.parametrize("rule", [top_mu, drop_bottom_mu, rounded_grid])
def test_rules_without_a_proof_fail_the_same_check(rule):
    """Top-mu, bottom-mu and rounded lookup grids break the bound: the check can fail."""
    rng = np.random.default_rng(4)
    worst = 0.0
    for _ in range(300):
        vectors, clips, losses, _ = hostile_batch(rng)
        worst = max(
            worst,
            sensitivity_excess(lambda m, s=losses, c=clips: rule(s[m], c[m]), vectors, clips),
        )
    assert worst > 1.01


def test_a_tail_of_the_batch_itself_breaks_the_bound():
    """Why a share is bound to the plan and not to the batch's own total clip norm."""
    rng = np.random.default_rng(5)
    worst = 0.0
    for _ in range(500):
        vectors, clips, losses, _ = hostile_batch(rng)

        def weigh(members, losses=losses, clips=clips):
            share = INO(tail_length=0.9 * float(clips[members].sum())) if len(members) else None
            return share.weights(losses[members], clips[members]) if share else np.zeros(0)

        worst = max(worst, sensitivity_excess(weigh, vectors, clips))
    assert worst > 1.001


batches = st.lists(
    st.tuples(st.floats(-5, 5).map(lambda x: round(x, 1)), st.floats(0.01, 10)), max_size=20
).map(lambda rows: (np.array([r[0] for r in rows]), np.array([r[1] for r in rows])))


@given(batches, st.floats(0.01, 100), st.sampled_from(list(TAILS)))
@settings(deadline=None)
def test_weights_fall_with_rank_within_0_and_1(batch, length, name):
    scores, clips = batch
    weights = INO(tail_length=length, shape=TAILS[name]).weights_of_scores(scores, clips)
    assert ((weights >= 0) & (weights <= 1)).all()
    ordered = weights[np.argsort(-scores, kind="stable")]
    assert (np.diff(ordered) <= 1e-12).all()


@given(batches, st.floats(0.01, 100), st.randoms())
def test_the_order_in_which_distinct_scores_stand_does_not_matter(batch, length, random):
    scores, clips = batch
    scores = scores + 1e-3 * np.arange(len(scores))  # no ties
    shuffle = np.array(random.sample(range(len(scores)), len(scores)), dtype=int)
    ino = INO(tail_length=length)
    np.testing.assert_allclose(
        ino.weights_of_scores(scores[shuffle], clips[shuffle]),
        ino.weights_of_scores(scores, clips)[shuffle],
        atol=1e-9,
    )


@given(batches, st.floats(0.01, 100), st.floats(0.01, 100))
def test_scaling_clip_norms_and_tail_changes_nothing(batch, length, scale):
    scores, clips = batch
    np.testing.assert_allclose(
        INO(tail_length=length * scale).weights_of_scores(scores, clips * scale),
        INO(tail_length=length).weights_of_scores(scores, clips),
        atol=1e-9,
    )


@given(batches.filter(lambda b: len(b[0]) > 0), st.floats(0.01, 100), st.floats(0.05, 0.95))
def test_splitting_a_record_keeps_its_average_and_all_others(batch, length, share):
    """Two records with the same score and together the same clip norm weigh what one weighs."""
    scores, clips = batch
    scores = scores + 1e-3 * np.arange(len(scores))
    ino = INO(tail_length=length)
    whole = ino.weights_of_scores(scores, clips)
    split_clips = np.concatenate([[share * clips[0], (1 - share) * clips[0]], clips[1:]])
    split = ino.weights_of_scores(np.concatenate([scores[:1], scores]), split_clips)
    assert share * split[0] + (1 - share) * split[1] == pytest.approx(whole[0], abs=1e-9)
    np.testing.assert_allclose(split[2:], whole[1:], atol=1e-9)


def test_no_tail_is_idp_sgd_bit_for_bit():
    assert (INO(tail_length=0).weights(np.arange(5.0), np.ones(5)) == 1.0).all()
    assert (INO(tail=0.0).bind(PLAN).weights(np.arange(5.0), np.ones(5)) == 1.0).all()


def test_edges():
    ino = INO(tail_length=2.0)
    assert ino.weights([], []).shape == (0,)
    assert ino.weights([7.0], [1.0]) == pytest.approx(0.25)  # G = 1 < gamma = 2
    np.testing.assert_allclose(ino.weights([1.0, 1.0, 1.0, 1.0], np.ones(4)), [0.75] * 4)  # ties
    np.testing.assert_allclose(  # NaN ranks last
        ino.weights([np.nan, 1.0, 50.0, 7.0], np.ones(4)), [0.25, 0.75, 1, 1]
    )
    extremes = [-3.0, 0.0, 0.1, np.inf, 1e6]  # beyond the public range of losses
    weights = ino.weights(extremes, np.ones(5))
    assert weights[0] == weights[1] == weights[2] < weights[3] == weights[4]


def test_records_below_are_unchanged_bit_for_bit_when_one_is_added_above():
    rng = np.random.default_rng(0)
    scores, clips = np.sort(rng.normal(size=50))[::-1].copy(), rng.uniform(0.1, 3, 50)
    ino = INO(tail_length=20.0, alpha=2.0, beta=3.0)
    without = ino.weights_of_scores(scores[1:], clips[1:])
    assert (ino.weights_of_scores(scores, clips)[1:] == without).all()


def test_a_share_must_be_bound_to_a_plan():
    with pytest.raises(ValueError, match="bind it to a plan first"):
        INO(tail=0.4).weights([1.0], [1.0])
    bound = INO(tail=0.4).bind(PLAN)
    assert bound.tail_length == pytest.approx(0.4 * np.sum([0.9, 4.0, 3.5, 20.0]))
    assert INO().tail == 0.4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tail": 0.4, "tail_length": 1.0}, "not both"),
        ({"tail": -0.1}, "tail must be"),
        ({"tail_length": float("nan")}, "tail_length must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"width": -0.1}, "width must be"),
        ({"alpha": 2.0, "shape": Steps()}, "do not pass them with shape"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        INO(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5, 0.6], "must not rise"),
        ([1.5], r"in \[0, 1\]"),
        ([], "at least one"),
        ([-1], "be in"),
    ],
)
def test_bad_steps(values, message):
    with pytest.raises(ValueError, match=message):
        Steps(values)


def test_a_users_function_is_used_as_checked():
    tail = Steps.of(lambda x: 1 - x, pieces=8)
    assert len(tail.values) == 8
    with pytest.raises(ValueError, match="must not rise"):
        Steps.of(lambda x: x)


@pytest.mark.parametrize("name", TAILS)
def test_areas_are_the_integrals_of_the_functions(name):
    tail = TAILS[name]
    for x in (0.0, 0.01, 0.3, 0.77, 1.0):
        grid = [k / 37 for k in range(38) if k / 37 < x] + [k / 4 for k in range(5) if k / 4 < x]
        points = sorted({0.0, x, *grid})
        area = sum(
            quad(lambda u: float(tail.rising(np.array(u))), a, b, epsabs=1e-13)[0]
            for a, b in itertools.pairwise(points)
        )
        assert float(tail.area(np.array(x))) == pytest.approx(area, abs=1e-9)


def test_budget_aware_score():
    losses, owners = np.array([1.0, 1.0, 2.0]), np.array([0, 3, 3])
    np.testing.assert_allclose(BudgetAware(0)(losses, owners, PLAN), losses)
    scores = BudgetAware(1)(losses, owners, PLAN)
    np.testing.assert_allclose(scores, [1.0 + np.log(0.4 / 0.003), 1.0, 2.0])
    extreme = BudgetAware(50)(np.array([-2.0, 13.0, 13.0]), owners, PLAN)
    mixed = OwnersFirst()(np.array([-2.0, 13.0, 13.0]), owners, PLAN)
    assert (np.argsort(-extreme, kind="stable") == np.argsort(-mixed, kind="stable")).all()
    with pytest.raises(ValueError, match="bind it to a plan"):
        BudgetAware(1)(losses, owners, None)
    with pytest.raises(ValueError, match="kappa must be"):
        BudgetAware(-1)
