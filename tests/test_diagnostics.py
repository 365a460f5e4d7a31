import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise import diagnostics


def test_minority_initial_drop():
    """The first evaluations in a row, but for one; later ones, however bad, are not initial."""
    strict = [1.0, 1.3, 0.9, 1.2, 0.9, 0.9, 1.5]
    groups = np.stack([np.linspace(1.0, 0.4, 7), strict], axis=1)
    overall = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    lax, strict = diagnostics.minority_initial_drop(groups, overall)
    assert lax is None
    assert strict.depth == pytest.approx(0.3)
    assert (strict.first, strict.last) == (1, 3)
    with pytest.raises(ValueError, match="expected"):
        diagnostics.minority_initial_drop(groups, overall[:3])


@pytest.fixture(scope="module")
def plan():
    owners = ow.Owners(np.repeat([0, 1], [400, 600]), {0: 0.5, 1: 4.0}, 1e-5)
    return ow.plan(owners, "both", steps=50, batch_size=80)


def test_condition_2_of_the_papers_example(plan):
    """Opposed gradients: positive for the owner that pulls more, negative for the other."""
    gradients = np.array([[80.0, -120.0], [-120.0, 80.0]])
    sides = diagnostics.condition_2(gradients, plan)
    pull = plan.sampling_rates * plan.records * plan.clip_norms
    assert sides[0, 1] == pytest.approx(1 - 12 / 13 * pull[1] / pull[0])
    assert sides[0, 1] < 0 < sides[1, 0]


def test_owner_gradients_add_up_to_the_whole():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    inputs, targets = torch.randn(20, 3).double(), torch.randint(0, 2, (20,))
    owner = np.arange(20) % 3
    loss = torch.nn.functional.cross_entropy
    rows = diagnostics.owner_gradients(model, loss, inputs, targets, owner, 3, not_private=False)
    loss(model(inputs), targets, reduction="sum").backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
    np.testing.assert_allclose(rows.sum(axis=0), whole, atol=1e-12)
    with pytest.raises(TypeError, match="not_private"):
        diagnostics.owner_gradients(model, loss, inputs, targets, owner, 3, not_private=None)


def test_objective_weights_against_simulated_batches():
    """Expected weight of a record by simulation; 20,000 batches, 6 standard errors (1e-9)."""
    owners = ow.Owners(np.zeros(2000, dtype=int), {0: 2.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=50, batch_size=20)
    ino = ow.INO(tail=0.6, alpha=2.0)
    shares = np.array([0.0, 0.3, 0.7, 0.99])
    weights = diagnostics.objective_weights(plan, ino, shares)
    assert (np.diff(weights) < 0).all()
    rng = np.random.default_rng(0)
    bound = ino.bind(plan)
    for share, expected in zip(shares, weights, strict=True):
        below = rng.binomial(round(2000 * (1 - share)), 0.01, 20000)
        table = [
            bound.weights(-np.arange(n + 1.0), np.ones(n + 1))[0] for n in range(below.max() + 1)
        ]
        drawn = np.array(table)[below]
        assert expected == pytest.approx(drawn.mean(), abs=6 * drawn.std() / 141 + 2e-3)


def test_cvar_and_ordered_average():
    losses = np.array([1.0, 4.0, 2.0, 3.0])
    assert diagnostics.cvar(losses, 1.0) == 2.5
    assert diagnostics.cvar(losses, 0.5) == 3.5
    assert diagnostics.cvar(losses, 0.375) == pytest.approx((4 + 0.5 * 3) / 1.5)
    assert diagnostics.ordered_average(losses, [1, 1, 0, 0]) == 3.5
    with pytest.raises(ValueError, match="worst_share"):
        diagnostics.cvar(losses, 0.0)


def test_group_recalls():
    found = diagnostics.group_recalls([1, 0, 1, 1], [1, 1, 1, 0], ["a", "a", "b", "b"])
    assert found.recalls == {"a": 0.5, "b": 0.5}
    found = diagnostics.group_recalls([1, 0, 1], [1, 1, 1], ["a", "a", "b"])
    assert found.worst == 0.5
    assert found.spread == 0.25
    assert found.balanced == 0.75
    assert found.overall == pytest.approx(2 / 3)
