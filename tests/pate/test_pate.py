"""PATE: what an owner pays, by brute force and other accountants; teachers that stay apart."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from torch import nn

import ownerwise as ow
from ownerwise.pate.plans import MOST_CLASSES, epsilon_of
from ownerwise.pate.shards import shards, teachers_of

BUDGETS = (1.0, 2.0, 3.0)
OWNERS = ow.Owners(None, np.repeat(BUDGETS, (340, 430, 230)))
CONFIDENT = {"questions": 500, "answers": 120, "threshold": 100.0}
PLANS = {
    "weight": {"method": "weight"},
    "copies": {"method": "copies"},
    "uniform": {"method": "uniform"},
    "all answered": {"answers": 500, "threshold": None},
}


def make(name="weight", owners=OWNERS, **changes):
    return ow.pate.plan(owners, **{**CONFIDENT, **PLANS[name], "teachers": 60, **changes})


@pytest.mark.parametrize("name", PLANS)
def test_every_owner_spends_at_most_their_budget(name):
    plan = make(name)
    spent = plan.epsilon()
    assert (spent <= OWNERS.epsilon).all()
    used = {e: spent[OWNERS.epsilon == e].max() / e for e in BUDGETS}
    if name in ("weight", "all answered"):
        assert min(used.values()) > 0.999
    else:
        assert max(used.values()) > 0.99
    if name == "uniform":
        assert used[3.0] < 0.34
    assert str(BUDGETS[0]).rstrip(".0") in plan.describe()


@pytest.mark.parametrize("name", PLANS)
def test_another_accountant_agrees(name):
    """Every test and every answer as an event of dp-accounting, at every order."""
    plan, orders = make(name), [2.0, 4.0, 16.0, 64.0]
    for owner in (0, 500, 900):
        mass = plan.masses[owner]
        accountant = RdpAccountant(orders)
        if plan.test_std is not None:
            test = dp_event.GaussianDpEvent(plan.test_std / mass)
            accountant.compose(test, plan.questions)
        answer = dp_event.GaussianDpEvent(plan.answer_std / (mass * math.sqrt(2)))
        accountant.compose(answer, plan.answers)
        theirs = accountant._rdp
        assert [plan.renyi(a)[owner] for a in orders] == pytest.approx(list(theirs), rel=1e-9)
        assert accountant.get_epsilon(1e-5) > plan.epsilon()[owner]  # RDP is looser


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_cost_of_an_answer_by_enumeration(copies):
    """All votes of few teachers, before and after one record moved its own: norms in float64.

    The largest change of the weighted counts is sqrt(2) times the weight of its teachers, and the
    largest count changes by at most that weight; both are reached.
    """
    weights, classes = np.array([1.0, 0.5, 2.0]), 3
    every = np.array(np.meshgrid(*[range(classes)] * 3)).reshape(3, -1).T
    one_hot = np.eye(classes)
    counts = np.einsum("nt,ntc->nc", np.broadcast_to(weights, every.shape), one_hot[every])
    for held in ([0], [0, 1], [0, 1, 2]):
        if len(held) != copies:
            continue
        mass, norm, top = weights[held].sum(), 0.0, 0.0
        for at, votes in enumerate(every):
            rest = [t for t in range(3) if t not in held]
            same = (every[:, rest] == votes[rest]).all(axis=1)
            difference = counts[same] - counts[at]
            norm = max(norm, float(np.linalg.norm(difference, axis=1).max()))
            top = max(top, float(np.abs(counts[same].max(1) - counts[at].max()).max()))
        assert norm == pytest.approx(math.sqrt(2) * mass, rel=1e-12)
        assert top <= mass + 1e-12
        order, std = 5.0, 7.0
        exact = order * norm**2 / (2 * std**2)  # Renyi divergence of two Gaussians
        assert exact == pytest.approx(order * mass**2 / std**2)


def test_released_answers_are_indistinguishable_by_enumeration():
    """The exact law of (test, answer) for two classes, with and without a record."""
    mass, test_std, answer_std, threshold, delta = 1.0, 2.5, 4.0, 2.0, 1e-3
    from scipy.stats import norm

    def law(counts):
        passes = norm.sf((threshold - max(counts)) / test_std)
        first = norm.cdf((counts[0] - counts[1]) / (answer_std * math.sqrt(2)))
        return np.array([1 - passes, passes * first, passes * (1 - first)])

    mu = mass * math.sqrt(1 / test_std**2 + 2 / answer_std**2)
    for total in range(1, 8):
        for ones in range(total):
            pair = law((total - ones, ones)), law((total - ones - 1, ones + 1))
            for p, q in (pair, pair[::-1]):
                for d in (delta, 1e-2, 0.1):
                    epsilon = epsilon_of(mu, d)
                    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= d


def test_epsilon_of_a_gaussian_is_the_exact_curve():
    for mu, delta in ((0.1, 1e-5), (0.5, 1e-6), (2.0, 1e-3), (0.01, 1e-8)):
        epsilon = epsilon_of(mu, delta)
        curve = 0.5 * math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) - math.exp(
            epsilon
        ) * 0.5 * math.erfc((epsilon / mu + mu / 2) / math.sqrt(2))
        assert curve == pytest.approx(delta, rel=1e-4)


def test_weights_are_in_proportion_to_what_budgets_allow():
    plan = make()
    assert plan.weights.argsort().tolist() == [0, 1, 2]
    ratio = plan.weights[2] / plan.weights[0]
    assert ratio == pytest.approx(0.7195 / 0.2676, rel=0.01)  # mu at epsilon 3 and 1
    assert plan.teacher_weights.sum() == pytest.approx(60, rel=1e-4)
    assert plan.count.tolist() == [20, 26, 14]
    assert (plan.weights / plan.grid == np.round(plan.weights / plan.grid)).all()
    assert make("copies", copies=2).copies.tolist() == [2, 4, 5]


def test_many_budgets_share_teachers_by_classes():
    owners = ow.Owners(None, np.random.default_rng(0).uniform(0.5, 5, 2000))
    plan = make(owners=owners)
    assert len(plan.count) <= MOST_CLASSES
    assert (plan.epsilon() <= owners.epsilon).all()


def test_a_record_is_with_the_teachers_of_its_own_id():
    """Removing a record changes its own teachers' shards and no other, whatever the positions."""
    ids = [f"r{at}" for at in range(400)]
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 2, 400)
    first, count, copies = np.array([0, 7])[classes], np.array([7, 9])[classes], classes + 1
    whole = shards(ids, first, count, copies, 16, key=3)
    named = [[ids[at] for at in shard] for shard in whole]
    assert sum(map(len, whole)) == copies.sum()
    own = teachers_of(ids, first, count, copies, key=3)
    assert all(len(set(t)) == c for t, c in zip(own, copies, strict=True))
    order = rng.permutation(400)
    for left_out in range(0, 400, 40):
        keep = order[order != left_out]
        rest = shards([ids[at] for at in keep], first[keep], count[keep], copies[keep], 16, key=3)
        for teacher, shard in enumerate(rest):
            expected = [name for name in named[teacher] if name != ids[left_out]]
            assert [ids[keep[at]] for at in shard] == expected
    assert shards(ids, first, count, copies, 16, key=4)[0].tolist() != whole[0].tolist()


def test_all_records_of_an_owner_are_with_the_same_teacher():
    index = np.repeat(np.arange(50), 6)
    owners = ow.Owners(index, {at: BUDGETS[at % 3] for at in range(50)})
    plan = make(owners=owners, unit="owner", teachers=12)
    held = ow.pate.shards_of(plan, owners, list(range(300)))
    teacher_of = {at: t for t, shard in enumerate(held) for at in shard.tolist()}
    assert all(len({teacher_of[at] for at in np.flatnonzero(index == o)}) == 1 for o in range(50))
    by_record = ow.pate.shards_of(make(owners=owners, teachers=12), owners, list(range(300)))
    assert sum(map(len, by_record)) == 300


def test_a_teacher_depends_on_its_own_records_alone():
    """One record of teacher 2 is replaced: all other teachers stay the same, bit for bit."""
    torch.manual_seed(0)
    X, y = torch.randn(120, 4), torch.randint(0, 3, (120,))
    held = [np.arange(t, 120, 5) for t in range(5)]
    held.append(np.array([], dtype=np.int64))  # nobody's hash led here

    def train(inputs, shards):
        return ow.pate.train_teachers(
            lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
            inputs, y, shards, steps=30, batch_size=8, lr=0.01,
        )  # fmt: skip

    before = train(X, held)
    other = X.clone()
    other[held[2][3]] = 100.0
    after = train(other, held)
    fewer = train(X, [*held[:2], held[2][:-1], *held[3:]])
    for name, values in before._parameters.items():
        for teacher in (0, 1, 3, 4, 5):
            assert torch.equal(values[teacher], after._parameters[name][teacher])
            assert torch.equal(values[teacher], fewer._parameters[name][teacher])
    assert not torch.equal(before._parameters["0.weight"][2], after._parameters["0.weight"][2])
    questions = torch.randn(40, 4)
    votes, changed = before.votes(questions), after.votes(questions)
    assert (votes[[0, 1, 3, 4, 5]] == changed[[0, 1, 3, 4, 5]]).all()


def test_stacked_teachers_learn_what_single_ones_learn():
    torch.manual_seed(0)
    X = torch.randn(400, 4)
    y = (X[:, 0] > X[:, 1]).long()
    held = [np.arange(t, 400, 4) for t in range(4)]
    teachers = ow.pate.train_teachers(
        lambda: nn.Linear(4, 2), X, y, held, steps=150, batch_size=16, lr=0.05
    )
    questions = torch.randn(300, 4)
    right = (questions[:, 0] > questions[:, 1]).long().numpy()
    assert ((teachers.votes(questions) == right).mean(axis=1) > 0.9).all()


def test_answers_stop_at_the_caps_and_skip_what_teachers_disagree_on():
    plan = make(questions=300, answers=50, threshold=40.0, test_share=0.5, teachers=60)
    votes = np.zeros((60, 300), dtype=np.uint8)
    votes[:, 100:] = np.random.default_rng(0).integers(0, 10, (60, 200))
    counts = ow.pate.weighted_counts(plan, votes, 10)
    assert counts[0, 0] == plan.teacher_weights.sum()  # exact
    labels = ow.pate.answer(plan, counts, ow.SecretStream.from_seed(0))
    answered = np.flatnonzero(labels != ow.pate.NO_ANSWER)
    assert len(answered) <= 50
    again = ow.pate.answer(plan, counts)
    assert not np.array_equal(labels, again)
    with pytest.raises(ow.OwnerwiseError, match="pays for at most 300"):
        ow.pate.answer(plan, np.zeros((301, 10)))
    with pytest.raises(ow.OwnerwiseError, match="multiples"):
        ow.pate.answer(plan, counts + plan.grid / 3)


def test_noise_has_the_planned_size():
    """1e-6 false alarms, with a fixed seed: the share of passed tests follows the normal law."""
    from scipy.stats import norm

    plan = make(questions=20_000, answers=20_000, threshold=70.0)
    votes = np.zeros((60, 20_000), dtype=np.uint8)
    labels = ow.pate.answer(
        plan, ow.pate.weighted_counts(plan, votes, 2), ow.SecretStream.from_seed(5)
    )
    passed = norm.sf((70.0 - plan.teacher_weights.sum()) / plan.test_std)
    share, sd = (labels >= 0).mean(), math.sqrt(passed * (1 - passed) / 20_000)
    assert abs(share - passed) < 5 * sd
    right = norm.cdf(plan.teacher_weights.sum() / (plan.answer_std * math.sqrt(2)))
    count = (labels >= 0).sum()
    assert abs((labels == 0).sum() / count - right) < 5 * math.sqrt(right * (1 - right) / count)


def test_a_changed_plan_is_refused():
    from dataclasses import replace

    plan = make()
    for changes in ({"answer_std": plan.answer_std / 2}, {"answers": 500}, {"questions": 5000}):
        with pytest.raises(ow.PlanError, match="would spend"):
            replace(plan, **changes).verify()
    with pytest.raises(ow.PlanError, match="grid"):
        replace(plan, weights=plan.weights * 1.0000001).verify()


def test_all_problems_are_listed():
    with pytest.raises(ow.PlanError) as caught:
        ow.pate.plan(OWNERS, questions=0, answers=2.5, teachers=0, method="best", test_share=1.5)
    assert len(caught.value.problems) == 5
    with pytest.raises(ow.PlanError, match="as many answers as questions"):
        ow.pate.plan(OWNERS, questions=10, answers=5)
    with pytest.raises(ow.PlanError, match="use more teachers"):
        make("copies", copies=30)
    with pytest.raises(ow.OwnerwiseError, match="buffers"):
        ow.pate.train_teachers(
            lambda: nn.BatchNorm1d(2), torch.zeros(2, 2), torch.zeros(2), [np.arange(2)], steps=1
        )


def test_nothing_that_depends_on_the_votes_is_shown():
    """Trap 51: no data-dependent bound exists; the plan's cost is known before any vote."""
    plan = make()
    before, votes = plan.epsilon().copy(), np.zeros((60, 10), dtype=np.int64)
    counts = ow.pate.weighted_counts(plan, votes, 10)
    ow.pate.answer(plan, counts)
    assert np.array_equal(plan.epsilon(), before)
    assert "data" not in " ".join(name for name in dir(plan) if not name.startswith("__"))
