"""The orders for ablations of INO-SGD: within the bound, by name, and after a resume."""

from types import SimpleNamespace

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.mechanisms import INO, ORDERS, BudgetAware
from ownerwise.randomness import SecretStream
from ownerwise_reproduction.orders import AtRandom, ByNegativeLoss, OwnerThenLoss

PLAN = SimpleNamespace(
    sampling_rates=np.array([0.01, 0.02, 0.05, 0.2]),
    clip_norms=np.array([0.3, 1.0, 0.7, 2.0]),
    elements=np.array([300, 200, 100, 50]),
)
PLAN.holders = PLAN  # every record has a single owner


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("negative-loss", ByNegativeLoss),
        ("random", AtRandom),
        ("owner-then-loss", OwnerThenLoss),
    ],
)
def test_orders_are_found_by_name(name, kind):
    assert isinstance(ORDERS[name](None), kind)


def test_a_configuration_names_an_order(tmp_path):
    from ownerwise.config import prepare_run
    from ownerwise.config.reading import make_config

    sections = {
        "data": {"name": "digits"},
        "owners": {"assignment": {"kind": "by_class", "budgets": list(range(1, 11))}},
        "plan": {"steps": 2, "batch_size": 50},
        "model": {"name": "mlp"},
        "training": {"lr": 0.1},
        "weights": {"kind": "ino", "order": "owner-then-loss"},
    }
    trainer = prepare_run(make_config(sections), folder=tmp_path).trainer
    assert trainer.weights == ow.INO(score_by=OwnerThenLoss())


@pytest.mark.parametrize("order", [ByNegativeLoss(), OwnerThenLoss()], ids=["easiest", "owners"])
def test_no_record_moves_the_sum_by_more_than_its_clip_norm(order):
    random = np.random.default_rng(0)
    weights = INO(tail_length=2.0, score_by=order).bind(PLAN)
    for _ in range(300):
        owners = random.integers(0, 4, size=random.integers(1, 8))
        losses, clips = random.exponential(size=len(owners)), PLAN.clip_norms[owners]
        vectors = clips * random.choice([-1.0, 1.0], size=len(owners))
        total = weights.weights(losses, clips, owners) @ vectors
        for gone in range(len(owners)):
            rest = np.delete(np.arange(len(owners)), gone)
            without = weights.weights(losses[rest], clips[rest], owners[rest]) @ vectors[rest]
            assert abs(total - without) <= clips[gone] * (1 + 1e-9)


def test_the_mixed_order_is_the_budget_aware_one_with_a_large_kappa():
    losses, owners = np.array([-2.0, 13.0, 13.0]), np.array([0, 3, 3])
    extreme = BudgetAware(50)(losses, owners, PLAN)
    mixed = OwnerThenLoss()(losses, owners, PLAN)
    assert (np.argsort(-extreme, kind="stable") == np.argsort(-mixed, kind="stable")).all()


def test_a_random_order_draws_new_numbers_each_time():
    score = AtRandom(SecretStream.from_seed(1))
    first, second = (score(np.zeros(5), np.zeros(5, dtype=int), None) for _ in range(2))
    assert (first != second).all()


def test_only_a_seeded_random_order_resumes_from_a_stored_state():
    def draw(score):
        return score(np.zeros(5), np.zeros(5, dtype=int), None)

    seeded, private = AtRandom(SecretStream.from_seed(1)), AtRandom()
    draw(seeded)
    draw(private)
    states = seeded.state(), private.state()
    assert states == ({"draws": 1}, {}), "how many batches held records is not private"
    for score, state, again in zip((seeded, private), states, (True, False), strict=True):
        second = draw(score)
        score.load_state(state)
        assert (draw(score) == second).all() == again
    private.load_state(states[0])
    third = draw(private)
    seeded.load_state(states[0])
    assert (third != draw(seeded)).all()
