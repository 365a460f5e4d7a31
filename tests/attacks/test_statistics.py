"""Attacks on the column statistics: their sums, their noise, their bits, and their layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import ownerwise as ow
from ownerwise.mechanisms import standardising_layers
from ownerwise.randomness import SecretStream
from ownerwise.step.opening import opening_grid, opening_problems, opening_sum
from ownerwise.step.run_randomness import RunRandomness

DRAWS = 4000


def setting():
    """19 ordinary records, and one at the corner of the ranges; a large share of a large budget."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(20, 3, generator=generator) - 0.5, torch.zeros(20, 3)], dim=1)
    x[-1, :3] = torch.tensor([1.0, -1.0, 1.0])
    owners = ow.Owners(np.arange(20), np.full(20, 8.0), 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=2, statistics=ow.ColumnStatistics(share=0.9))
    return plan, x, ow.Standardise(3)


def sums_with_and_without(plan, x, layer):
    gone = x.clone()
    gone[-1, 3:] = 1  # all its values are missing: it contributes exactly what no record does
    return opening_sum(plan, layer, (x, None)), opening_sum(plan, layer, (gone, None))


def test_the_best_distinguisher_reaches_the_accounted_bound_and_no_more():
    """The likelihood ratio on the released sums, 4000 draws each, with the real noise.

    The area under the curve of a Gaussian mechanism with mu = 1 / std is Phi(mu / sqrt(2)). The
    standard error is below .006, so 5 of them are a false alarm with probability below 1e-6. An
    attack that stayed far below the bound would only show that the attack is weak.
    """
    plan, x, layer = setting()
    with_it, without = sums_with_and_without(plan, x, layer)
    direction = with_it - without
    assert 0.999 < float(direction.norm()) <= 1
    noise = RunRandomness(plan, SecretStream(), rule_draws=False)._opening_noise
    grid, scores = opening_grid(plan, layer), []
    for first, total in ((0, with_it), (DRAWS, without)):
        drawn = [
            noise.gaussian(first + at, [total], plan.opening_std, grid)[0] for at in range(DRAWS)
        ]
        scores.append(((torch.stack(drawn) - without) @ direction).numpy())
    ranks = np.searchsorted(np.sort(scores[1]), scores[0]) / DRAWS
    bound = norm.cdf(1 / plan.opening_std / np.sqrt(2))
    assert bound > 0.8
    assert abs(ranks.mean() - bound) < 5 * 0.006


def test_the_bits_of_the_result_tell_nothing_more():
    """With the same noise, the results differ by the record's own contribution, to the last bit."""
    plan, x, layer = setting()
    grid = opening_grid(plan, layer)
    with_it, without = sums_with_and_without(plan, x, layer)
    noised = [
        RunRandomness(plan, SecretStream.from_seed(5), rule_draws=False).opening(total, grid)
        for total in (with_it, without)
    ]
    assert torch.equal(noised[0] - noised[1], with_it - without)
    for result in (*noised, with_it, without):
        assert torch.equal((result / grid).round() * grid, result)


def test_values_that_try_to_count_more():
    """Values outside the range, flags that are no flags, and a derived layer."""
    plan, x, layer = setting()
    plain = opening_sum(plan, layer, (x, None))
    for value in (1e30, -1e30, float("inf"), float("nan")):
        for flag in (0.0, -1.0, 1e-30, float("nan"), 7.0):
            tried = x.clone()
            tried[0, :3], tried[0, 3:] = value, flag
            removed = x.clone()
            removed[0, 3:] = 1
            base = opening_sum(plan, layer, (removed, None))
            assert float((opening_sum(plan, layer, (tried, None)) - base).norm()) <= 1
    assert float((plain - base).norm()) <= 1

    class Louder(ow.Standardise):
        def contributions(self, inputs):
            return 1e6 * super().contributions(inputs)

    model = nn.Sequential(Louder(3), nn.Linear(6, 2))
    assert standardising_layers(model) == []
    assert opening_problems(plan, model)


def test_a_layer_that_shows_a_record_before_the_release_is_not_taken():
    """Statistics written into the layer by hand have not been paid for."""
    plan, x, layer = setting()
    layer.mean.copy_(x[-1, :3])
    layer.released.fill_(True)
    model = nn.Sequential(layer, nn.Linear(6, 2))
    with pytest.raises(ow.OwnerwiseError, match="already has statistics"):
        ow.PrivateStep(
            model, plan, torch.optim.SGD(model.parameters(), lr=1.0), nn.functional.cross_entropy
        )
