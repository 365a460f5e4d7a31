"""Importance sampling in the private step: every method, INO weights, steering, after a resume."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import (
    AcceptanceSteering,
    Randomness,
)
from ownerwise.step.rounding import RELEASE_SLACK
from tools import step_tools as tools

_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)
cross_entropy = functional.cross_entropy


class Coins:
    """One number per record, whoever else is in the batch."""

    def __init__(self, values):
        self.values = values

    def uniforms(self, count):
        assert count == len(self.values)
        return self.values


def summed(step, records, rows):
    """Return the sum and the count over some records, each with its own coin."""
    inputs, labels, indices, coins = (column[rows] for column in records)
    batch = tools.batch_of(inputs, labels, 0, indices)
    step.steering.select(batch, None)
    sums = step.clipped_sum(batch, Randomness(rule=Coins(coins)))
    return tools.flat(sums), step.steering.total


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.6)], ids=["plain", "INO"])
@pytest.mark.parametrize("method", ["sample", "scale", "both"])
def test_sensitivity_by_brute_force(method, weights):
    """With every record's own coin kept, removing one moves the sum by at most its clip norm.

    The count by which a run may steer moves by at most one.
    """
    generator = torch.Generator().manual_seed(4)
    plan = tools.make_plan(method=method, release_std=5.0)
    rule = ow.ImportanceSampling(acceptance=0.5)
    largest = 0.0
    for number in range(12):
        torch.manual_seed(number)
        model = nn.Linear(3, 3)
        step = tools.make_step(model, cross_entropy, plan=plan, clipping=rule, weights=weights)
        step.steering.load_state({"accepted_share": 0.4, "log_clip_scale": 0.3 * number - 2})
        scale = step.steering.clip_scale
        inputs = 10 ** (3 * torch.rand(20, 1, generator=generator) - 2) * torch.randn(
            20, 3, generator=generator
        )
        labels = torch.randint(0, 3, (20,), generator=generator)
        indices = torch.randperm(tools.RECORDS, generator=generator)[:20].numpy()
        coins = torch.rand(20, generator=generator).numpy()

        records = inputs, labels, indices, coins
        whole, counted = summed(step, records, np.arange(20))
        for out in range(20):
            part, fewer = summed(step, records, np.delete(np.arange(20), out))
            limit = scale * plan.clip_norms[indices[out] % 3]
            change = float((whole - part).norm())
            assert change <= limit * (1 + 1e-9)
            assert 0 <= counted - fewer <= 1
            largest = max(largest, change / limit)
    assert largest == pytest.approx(1 / (1 + step.slack))


def test_the_update_is_the_accepted_sum_with_the_plans_noise_and_divisor():
    model, inputs, labels = tools.example("mlp")
    before = tools.weights_of(model)
    plan = tools.make_plan(clip_norm=5.0)
    step = tools.make_step(
        model, cross_entropy, plan=plan, clipping=ow.ImportanceSampling(), not_private=True
    )
    batch = tools.batch_of(inputs, labels)
    step(batch)
    peek = step.peek
    lengths = peek.factors * peek.norms
    clips = step.plan.clip_norms[peek.owner_index]
    accepted = lengths > 0
    assert 0 < accepted.sum() < len(batch)
    np.testing.assert_allclose(lengths[accepted], clips[accepted] / (1 + step.slack))
    model = tools.example("mlp")[0]
    losses = cross_entropy(model(inputs), labels, reduction="none")
    weighted = (losses * torch.from_numpy(peek.factors)).sum()
    gradients = torch.autograd.grad(weighted, list(model.parameters()))
    total = torch.cat([part.flatten() for part in tools.noised(gradients, step.plan)])
    moved = (before - tools.weights_of(step.model)) * step.plan.expected_batch_size
    torch.testing.assert_close(moved, total, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "text", "transformer"])
def test_the_mean_over_coins_is_the_clipped_sum(kind):
    """Each coordinate within 7 standard errors (fixed seed; false alarm below 1e-6)."""
    model, inputs, labels = tools.example(kind)
    batch = tools.batch_of(inputs, labels)
    plan = tools.make_plan(clip_norm=2.0)
    exact = tools.flat(tools.make_step(model, cross_entropy, plan=plan).clipped_sum(batch))
    step = tools.make_step(model, cross_entropy, plan=plan, clipping=ow.ImportanceSampling())
    secret = tools.seeded(9)
    draws = 500 if kind == "mlp" else 150
    found = torch.stack(
        [
            tools.flat(step.clipped_sum(batch, Randomness(rule=secret.at_step(n))))
            for n in range(draws)
        ]
    )
    error = found.std(dim=0) / draws**0.5
    assert ((found.mean(dim=0) - exact).abs() <= 7 * error + 1e-12).all()
    assert (error > 0).any()


def test_records_without_gradient_or_with_a_broken_one_never_count():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inputs = torch.randn(6, 3)
    inputs[1] = float("nan")
    targets = torch.randn(6, 2)
    targets[2] = model(inputs[2]).detach()
    step = tools.make_step(
        model, functional.mse_loss, clipping=ow.ImportanceSampling(), not_private=True
    )
    step(tools.batch_of(inputs, targets))
    assert step.peek.factors[1] == step.peek.factors[2] == 0
    assert all(p.isfinite().all() for p in model.parameters())


# -- steering --------------------------------------------------------------------------------------

STEERED = ow.ImportanceSampling(accepted_batch=4, acceptance=0.5)


def test_a_count_must_be_paid_for_and_only_once():
    model = tools.mlp()
    with pytest.raises(
        OwnerwiseError, match="steering releases a count, but the plan does not account"
    ):
        tools.make_step(model, cross_entropy, clipping=STEERED)
    plan = tools.make_plan(release_std=3.0)
    with pytest.raises(OwnerwiseError, match="plan accounts for a release, but none was passed"):
        tools.make_step(model, cross_entropy, plan=plan, clipping=ow.ImportanceSampling())
    with pytest.raises(OwnerwiseError, match="remove the release or the rule's steering"):
        tools.make_step(
            model, cross_entropy, plan=plan, clipping=STEERED, release=tools.CountClasses()
        )


def test_noise_divisor_and_learning_follow_the_steering():
    """Noise grows with the clip norms, the divisor with the share; the count is noised."""
    plan = tools.make_plan(release_std=3.0)
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, plan=plan, clipping=STEERED)
    step.steering.load_state({"accepted_share": 0.8, "log_clip_scale": 1.0})
    share = 4 / (12 * 0.8)
    assert step.steering.keep_probability == pytest.approx(share)
    before = tools.weights_of(model)
    empty = tools.batch_of(inputs[:0], labels[:0])
    step(empty)
    scaled = tools.noise_of(model, plan, clip_scale=float(np.exp(1.0)))
    noise = torch.cat([part.flatten() for part in scaled])
    moved = (before - tools.weights_of(model)) * 12 * share
    torch.testing.assert_close(moved, noise, rtol=0, atol=1e-9)
    plain = torch.cat([part.flatten() for part in tools.noise_of(model, plan)])
    torch.testing.assert_close(noise, np.e * plain, rtol=0, atol=1e-4 * plan.noise_std)
    # the count of an empty batch is noise alone
    released = tools.release_noise(tools.SEED, 0, torch.zeros(1, dtype=torch.float64), 3.0)
    noise = float(released) * (1 + RELEASE_SLACK)
    found = min(1.0, max(0.0, noise / (12 * share)))
    assert step.steering.accepted_share == pytest.approx(0.8 + 0.2 * (found - 0.8))
    assert step.steering.clip_scale == pytest.approx(np.exp(1.0 + 0.2 * (found - 0.5)))


def test_candidates_are_thinned_at_the_share_from_the_secret_stream():
    """False alarm below 1e-6: 20,000 records kept with probability 1/4."""
    steering = AcceptanceSteering(100, 25, None, 0.2)
    rows = torch.arange(20_000)
    index = np.zeros(20_000, dtype=np.int64)
    batch = ow.Batch(0, np.arange(20_000), index, (rows, {"y": rows}))
    kept = steering.select(batch, tools.seeded().at_step(0))
    assert len(kept) == len(kept.owner_index) == len(kept.data[0])
    assert abs(len(kept) - 5000) < 5 * np.sqrt(20_000 * 3 / 16)
    assert kept.data[1]["y"].tolist() == kept.indices.tolist()
    other = steering.select(batch, tools.seeded(6).at_step(0))
    assert other.indices.tolist() != kept.indices.tolist()


def test_steering_finds_its_targets():
    """Norms that halve every 40 steps: the clip norms follow, and so does the share."""
    generator = np.random.default_rng(0)
    steering = AcceptanceSteering(200, 40, 0.4, 0.2)
    for step in range(200):
        norms = generator.uniform(0.5, 1.5, 200) * 0.5 ** (step / 40)
        taken = norms[generator.random(200) < steering.keep_probability]
        accepted = generator.random(len(taken)) < taken / steering.clip_scale
        steering.update(accepted.sum() + generator.normal(0, 5))
    assert steering.accepted_share == pytest.approx(0.4, abs=0.1)
    assert steering.keep_probability * 200 * steering.accepted_share == pytest.approx(40, rel=0.05)
    assert steering.clip_scale == pytest.approx(0.5**5 / 0.4, rel=0.4)


def test_no_count_moves_the_steering_out_of_its_range():
    steering = AcceptanceSteering(100, 5, 0.5, 0.9)
    for count in (-1e9, 1e9, -1e9, -1e9, 0.0):
        steering.update(count)
        assert 0 <= steering.accepted_share <= 1
        assert 0.01 <= steering.keep_probability <= 1
    assert 0.05 < steering.clip_scale < 20


def test_clip_norms_stay_within_what_float32_can_square():
    """Also where nothing is ever accepted, or everything."""
    for count, limit in ((0.0, 1e-5), (100.0, 1e5)):
        steering = AcceptanceSteering(100, 5, 0.5, 0.9)
        for _ in range(500):
            steering.update(count)
        assert min(limit, 1.0) < steering.clip_scale < max(limit, 1.0)


def run(plan, steps, **checkpoint):
    torch.manual_seed(1)
    data = torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))
    model = tools.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = tools.make_step(
        model, cross_entropy, plan=plan, optimizer=optimizer, seed=7, clipping=STEERED
    )
    tools.run_steps(step, data, steps, seed=7, **checkpoint)
    return torch.cat([tools.weights_of(model), torch.tensor([step.steering.clip_scale])])


def test_a_resumed_run_steers_on_bit_for_bit(tmp_path):
    plan = tools.make_plan(release_std=3.0)
    whole = run(plan, 6)
    run(plan, 2, folder=tmp_path)
    assert torch.equal(run(plan, 6, folder=tmp_path, restore=True), whole)
    # neither another rule that steers nor a step without steering may go on from there
    model = tools.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rule = ow.ImportanceSampling(acceptance=0.5)
    again = tools.make_step(model, cross_entropy, plan=plan, seed=7, optimizer=optimizer,
                            clipping=rule)  # fmt: skip
    with pytest.raises(OwnerwiseError, match="accepted_batch = 4, but this step has nothing"):
        again.restore(tmp_path)
    model = tools.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    other = tools.make_step(
        model, cross_entropy, plan=plan, seed=7, optimizer=optimizer, release=tools.CountClasses()
    )
    with pytest.raises(OwnerwiseError, match="the state of steering, but this step has none"):
        other.restore(tmp_path)


@pytest.mark.parametrize("size", [1, 4, None])
def test_micro_batches_count_and_accept_the_same(size):
    plan = tools.make_plan(release_std=3.0)
    found = []
    for micro in (size, None):
        model, inputs, labels = tools.example("mlp")
        step = tools.make_step(
            model, cross_entropy, plan=plan, clipping=STEERED, weights=ow.INO(tail=0.5),
            performance=ow.Performance(micro_batch_size=micro),
        )  # fmt: skip
        for number in range(3):
            step(tools.batch_of(inputs, labels, number))
        found.append((tools.weights_of(model), step.steering.state()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-10)
    assert found[0][1] == found[1][1]


def test_a_rate_of_one_needs_no_exception():
    """Where every record is a candidate in every step, acceptance is what is left to chance."""
    plan = ow.plan(tools.owners(), "uniform", steps=3, batch_size=tools.RECORDS, clip_norm=5.0)
    assert (plan.sampling_rates == 1).all()
    model, inputs, labels = tools.example("mlp", tools.RECORDS)
    step = tools.make_step(
        model, cross_entropy, plan=plan, clipping=ow.ImportanceSampling(), not_private=True
    )
    for batch in ow.PoissonBatches((inputs, labels), plan, stream=tools.seeded()):
        step(batch)
        assert len(step.peek.factors) == tools.RECORDS
        assert 0 < np.count_nonzero(step.peek.factors) < tools.RECORDS
