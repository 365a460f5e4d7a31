"""What INO does to two owners with opposed objectives: the paper's example, and a small run."""

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from scipy.optimize import brentq

import ownerwise as ow
from ownerwise.mechanisms import INO


def mean_clipped(low, high, component, clip=1.0):
    """Expected component of a clipped gradient, uniform on a box, clipped everywhere in it."""
    area = (high[0] - low[0]) * (high[1] - low[1])

    def integrand(second, first):
        return clip * (first, second)[component] / np.hypot(first, second) / area

    return dblquad(integrand, low[0], high[0], low[1], high[1])[0]


def test_counter_example_of_appendix_c12():
    """Two owners, theta = (40, 40): expected clipped gradients, and the critical C_2."""
    strict = np.array([mean_clipped((30, -125), (130, -115), c) for c in (0, 1)])
    lax = np.array([mean_clipped((-170, 75), (-70, 85), c) for c in (0, 1)])
    np.testing.assert_allclose(strict, [0.532, -0.830], atol=6e-4)
    np.testing.assert_allclose(lax, [-0.816, 0.566], atol=6e-4)
    gradient = np.array([80.0, -120.0])  # of the strict owner's loss

    def descent(clip):  # > 0: a step against the sum lowers the strict owner's loss
        return float(gradient @ (strict + clip * lax))

    critical = brentq(descent, 0.1, 3)
    assert critical == pytest.approx(1.067, abs=1e-3)
    angle = gradient @ np.array([-120.0, 80.0]) / (gradient @ gradient)
    assert angle == pytest.approx(-12 / 13)
    assert 1 + angle * critical == pytest.approx(0.0148, abs=2e-3)


def test_ino_turns_the_example_where_the_losses_differ():
    """theta = (41, 39), C_2 = 1.2: the plain sum raises the strict owner's loss, INO lowers it."""
    theta = np.array([41.0, 39.0])
    losses = np.array(
        [theta[0] ** 2 + (100 - theta[1]) ** 2, (100 - theta[0]) ** 2 + theta[1] ** 2]
    )
    gradients = 2 * np.array([[theta[0], theta[1] - 100], [theta[0] - 100, theta[1]]])
    clips = np.array([1.0, 1.2])
    clipped = gradients * np.minimum(1, clips / np.linalg.norm(gradients, axis=1))[:, None]
    assert losses[0] > losses[1]
    plain = gradients[0] @ clipped.sum(axis=0)
    weights = INO(tail_length=0.4 * clips.sum()).weights_of_scores(losses, clips)
    ordered = gradients[0] @ (weights @ clipped)
    assert plain < 0 < ordered
    assert weights[0] == 1
    assert weights[1] < 1


def strict_owners_loss(weights, seed):
    """Loss of the strict owner's records after every step, on a balanced two-owner problem."""
    rng = np.random.default_rng(100 + seed)
    centres = np.array([[1.0, 0.8], [1.0, -0.8]])  # the two owners pull the second weight apart
    owner = np.repeat([0, 1], 400)
    inputs = centres[owner] + 0.4 * rng.normal(size=(800, 2))
    targets = np.where(owner == 0, 1.0, -1.0)
    owners = ow.Owners(owner, {0: 1.0, 1: 6.0}, 1e-5)
    plan = ow.plan(owners, "sample", steps=80, batch_size=100)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(outputs, signs):
        return torch.nn.functional.softplus(-signs * outputs[:, 0])

    stream = ow.SecretStream.from_seed(seed)
    step = ow.PrivateStep(model, plan, optimizer, loss, weights=weights, stream=stream)
    data = (torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32))
    curve = []
    for batch in ow.PoissonBatches(data, plan, stream=stream):
        step(batch)
        with torch.no_grad():
            curve.append(float(loss(model(data[0]), data[1])[owner == 0].mean()))
    return np.array(curve), step.epsilon()


def test_ino_shortens_the_minority_initial_drop_at_the_same_epsilon():
    """Steps in which the strict owner's loss lies above its start (log 2), over 8 seeds.

    IDP-SGD shows the drop in every seed; INO's is shorter. The paired differences over 8 seeds
    all have the same sign: by chance 2^-8 at equal length, and seeds are fixed, so the test
    cannot raise a false alarm.
    """
    start = np.log(2)
    lengths = {"idp": [], "ino": []}
    for seed in range(8):
        for name, weights in (("idp", None), ("ino", ow.INO(tail=0.8))):
            curve, spent = strict_owners_loss(weights, seed)
            lengths[name].append(int((curve > start).sum()))
            assert (spent <= [1.0, 6.0]).all()
    assert min(lengths["idp"]) >= 3
    assert all(ino < idp for ino, idp in zip(lengths["ino"], lengths["idp"], strict=True))
