"""Attacks on whole steps: half-precision models, strict owners, ties in permuted places."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import INO
from tools import step_tools as tools


def coupled(step, inputs, targets, owner_index, removed=None):
    """The sum before the noise; all records keep their rows if one leaves."""
    everyone = np.arange(len(targets))
    chosen = everyone if removed is None else np.delete(everyone, removed)
    randomness = dataclasses.replace(
        ow.mechanisms.Randomness(), rows=tools.CoupledRows(step.plan.hardened_rows, removed)
    )
    batch = ow.Batch(0, chosen, owner_index[chosen], (inputs[chosen], targets[chosen]))
    return tools.flat(step.clipped_sum(batch, randomness))


class InHalfPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x).bfloat16()


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("way", ["autocast", "cast"])
def test_an_order_by_losses_in_half_precision_needs_a_hardened_plan(way, hardened):
    """Rounded to 2^-9, losses could let the order move the sum by 8 C at 4,096 records."""
    owners = ow.Owners(np.arange(60) % 2, [1.0, 2.0], 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=20, clip_norm=1.0, hardened=hardened)
    model = InHalfPrecision() if way == "cast" else network(torch.float32)
    step = tools.make_step(model, functional.cross_entropy, plan=plan, weights=INO())
    batch = ow.Batch(
        0, np.arange(20), np.arange(20) % 2, (torch.randn(20, 5), torch.arange(20) % 3)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        if hardened:
            assert step.clipped_sum(batch)
            return
        with pytest.raises(ow.OwnerwiseError, match=r"half precision.*hardened=True"):
            step.clipped_sum(batch)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(("largest", "hardened"), [(99.0, False), (101.0, False), (1e6, True)])
def test_large_inputs_are_named_unless_the_plan_is_hardened(largest, hardened, as_array):
    inputs = torch.randn(60, 5).clamp_(-2, 2)
    inputs[7, 3] = -largest
    targets = torch.arange(60) % 3
    owners = ow.Owners(np.arange(60) % 2, [1.0, 2.0], 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=20, clip_norm=1.0, hardened=hardened)
    trainer = ow.Trainer(network(torch.float32), plan, lr=0.1)
    data = (inputs.numpy(), targets.numpy()) if as_array else (inputs, targets)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(data)
    named = [str(warning.message) for warning in caught if "inputs" in str(warning.message)]
    assert len(named) == (largest == 101.0)
    assert all("not private" in text and "101" not in text for text in named)


def network(dtype):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("micro", [None, 50, 7])
@pytest.mark.parametrize("weights", [None, INO(), INO(width=0.0)], ids=str)
def test_bfloat16_models_keep_the_bound_in_hardened_plans(weights, micro, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count = 120
    owners = ow.Owners(np.zeros(2 * count, dtype=int), {0: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=2, batch_size=count, hardened=True)
    model = network(torch.bfloat16)
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
        weights=weights, performance=ow.Performance(micro_batch_size=micro),
    )  # fmt: skip
    inputs = (100 * torch.randn(count, 5)).bfloat16()
    targets, index = torch.randint(0, 3, (count,)), np.zeros(count, dtype=np.int64)
    whole = coupled(step, inputs, targets, index)
    for removed in (0, 60, 119):
        moved = float((whole - coupled(step, inputs, targets, index, removed)).norm())
        assert moved <= float(plan.clip_norms[0])
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bfloat16_model_trains_through_the_trainer(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 5, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()
    owners = ow.Owners(np.arange(400) % 2, {0: 50.0, 1: 100.0}, 1e-5)
    plan = ow.plan(owners, "sample", steps=40, batch_size=100, hardened=True)
    model = network(torch.bfloat16)
    trainer = ow.Trainer(model, plan, lr=1.0, weights=ow.INO(tail=0.2), progress=False)
    run = trainer.fit((inputs.bfloat16(), targets))
    assert (run.epsilon() <= owners.epsilon).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with torch.no_grad():
        correct = (model(inputs.bfloat16()).argmax(1) == targets).double().mean()
    assert float(correct) > 0.7
    torch.set_num_threads(before)


@pytest.mark.parametrize("weights", [None, INO()], ids=str)
def test_a_strict_owner_beside_lax_ones_at_rates_near_one_keeps_the_bound(weights):
    count = 400
    owners = ow.Owners(np.repeat([0, 1], [20, count]), {0: 0.5, 1: 30.0}, 1e-5)
    plan = ow.plan(owners, "both", steps=2, batch_size=0.97 * (count + 20), hardened=True)
    model = network(torch.float32)
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
        weights=weights,
    )  # fmt: skip
    inputs = 1e4 * (1 + 0.01 * torch.randn(count + 20, 5))
    targets, index = torch.zeros(count + 20, dtype=torch.long), np.repeat([0, 1], [20, count])
    whole = coupled(step, inputs, targets, index)
    for removed in (0, 10, 19, 200):
        moved = float((whole - coupled(step, inputs, targets, index, removed)).norm())
        assert moved <= float(plan.clip_norms[index[removed]])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 400),
    levels=st.integers(1, 6),
    log_spread=st.floats(0, 4),
    large=st.sampled_from([1.0, 50.0, 10_000.0]),
    tail=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_ties_in_permuted_places_with_rounded_losses_stay_within_what_is_paid(
    count, levels, log_spread, large, tail, seed
):
    """The oracle: vectors of full length, all against us, weighted and added in float64.

    Removing a record permutes the places of the others and changes each loss by 8 roundoffs.
    """
    rng = np.random.default_rng(seed)
    clips = np.exp(rng.uniform(0, log_spread, count))
    clips *= large / clips.sum() * count ** (large == 1.0)
    losses = rng.choice(rng.uniform(0.05, 9.0, levels), count)
    ino = INO(tail_length=tail * clips.sum())
    removed = int(rng.integers(count))
    others = np.array([k for k in rng.permutation(count) if k != removed])
    moved = losses + 8 * 2.0**-24 * np.maximum(1, losses) * rng.uniform(-1, 1, count)
    whole = ino.weights(losses, clips)
    rest = ino.weights(moved[others], clips[others])
    movement = np.abs(whole[others] - rest) @ clips[others] + whole[removed] * clips[removed]
    paid = ino.score_slack(2.0**-24) * clips.sum()
    assert movement <= clips[removed] + paid * (1 + 1e-6) + 1e-9 * clips.sum()
