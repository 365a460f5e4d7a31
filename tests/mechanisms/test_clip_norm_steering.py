"""An adaptive clip norm: joint sensitivity, what it depends on, cost, combinations, resuming."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.accounting import joint_multiplier
from ownerwise.errors import OwnerwiseError, PlanError
from ownerwise.mechanisms import ClipNormSteering, Randomness
from ownerwise.planning import Plan
from ownerwise.step.rounding import NORM_ERROR, RELEASE_SLACK
from tools import step_tools as tools

_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)
cross_entropy = functional.cross_entropy
ADAPTIVE = ow.AdaptiveClipNorm(quantile=0.6, initial=0.8)


def adaptive_plan(**options) -> Plan:
    return tools.make_plan(clip_norm=ADAPTIVE, **options)


def summed(step, inputs, labels, indices):
    """Return the sum of gradients and the total of some records, both without noise."""
    batch = step.steering.select(tools.batch_of(inputs, labels, 0, indices), None)
    sums = step.clipped_sum(batch, Randomness())
    return tools.flat(sums), step.steering.total


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.6)], ids=["plain", "INO"])
@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
def test_joint_sensitivity_by_brute_force(method, weights):
    """In units of their noise, gradient and number together move by the accounted multiplier.

    Norms range from far below to far above the clip norm, at several clip norms. Pitfall 30.
    """
    plan = adaptive_plan(method=method)
    generator = torch.Generator().manual_seed(3)
    largest = 0.0
    for number in range(6):
        torch.manual_seed(number)
        model = nn.Linear(3, 3)
        step = tools.make_step(model, cross_entropy, plan=plan, weights=weights)
        step.steering.load_state({"log_clip_scale": number - 4.0})
        scale, shrink = step.steering.clip_scale, 1 + step._sums.rounding.release_slack
        sizes = 10 ** (3 * torch.rand(16, 1, generator=generator) - 2)
        inputs = sizes * torch.randn(16, 3, generator=generator)
        labels = torch.randint(0, 3, (16,), generator=generator)
        indices = torch.randperm(tools.RECORDS, generator=generator)[:16].numpy()
        gradient, total = summed(step, inputs, labels, indices)
        for out in range(16):
            kept = np.delete(np.arange(16), out)
            less, fewer = summed(step, inputs[kept], labels[kept], indices[kept])
            owner = indices[out] % 3
            moved = float((gradient - less).norm()) / (scale * plan.noise_std)
            counted = abs(total - fewer) / shrink / plan.release_std
            assert abs(total - fewer) <= 1 + 1e-9
            together = math.hypot(moved, counted) * plan.accounted_multipliers[owner]
            assert together <= 1 + 1e-9
            largest = max(largest, together)
    assert largest > 0.98  # the bound is tight


def test_sensitivity_for_owners_and_their_records():
    """A drawn owner adds at most 1 in all; K records drawn one by one at most K."""
    owners = tools.owners()
    plan = ow.plan(owners, unit="owner", steps=4, batch_size=1, clip_norm=ADAPTIVE)
    inputs, labels = torch.randn(tools.RECORDS, 4), torch.arange(tools.RECORDS) % 3
    step = tools.make_step(tools.mlp(), cross_entropy, plan=plan)
    totals = []
    for batch in ow.PoissonBatches((inputs, labels), plan, stream=tools.seeded()):
        step.steering.select(batch, None)
        step.clipped_sum(batch)
        totals.append(abs(step.steering.total) - len(batch.elements()[1]))
    assert max(totals) <= 1e-9
    together = ow.plan(
        owners, unit="owner", sampling="record", steps=4, batch_size=6, clip_norm=ADAPTIVE
    )
    assert (together.epsilon() <= owners.epsilon).all()
    # without the number, the same noise would cost less: K records pay for K of its units
    free = replace(together, release_std=None, adaptive_clip_norm=None)
    assert (free.epsilon() < together.epsilon()).all()


def test_a_hardened_plan_counts_no_empty_rows_and_no_record_moves_another():
    plan = adaptive_plan(hardened=True)
    assert plan.hardened_rows > 12
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, plan=plan)
    ordinary = tools.make_step(tools.example("mlp")[0], cross_entropy, plan=adaptive_plan())
    assert step._sums.rounding.release_slack == RELEASE_SLACK
    totals = []
    for each in (step, ordinary):
        batch = each.steering.select(tools.batch_of(inputs, labels), None)
        rows = tools.CoupledRows(plan.hardened_rows) if each is step else None
        each.clipped_sum(batch, Randomness(rows=rows))
        totals.append(each.steering.total)
    # the clip norms differ by the slack for rounding, about 1e-4
    assert totals[0] == pytest.approx(totals[1], abs=1e-3 * len(inputs))
    empty = step.steering.select(tools.batch_of(inputs[:0], labels[:0]), None)
    step.clipped_sum(empty)
    assert step.steering.total == 0


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=30), st.floats(0.05, 0.95), st.data())
def test_a_part_is_at_most_1_and_hardly_moves_with_rounding(logs, quantile, data):
    plan = adaptive_plan()
    plan = replace(plan, adaptive_clip_norm=ow.AdaptiveClipNorm(quantile, plan.clip_norm))
    steering = ClipNormSteering(plan)
    norms = torch.tensor([math.exp(x) for x in logs])
    errors = torch.tensor([data.draw(st.sampled_from([-NORM_ERROR, NORM_ERROR])) for _ in logs])
    totals = []
    for seen in (norms, norms * (1 + errors)):
        steering.select(None, None)
        steering.observe(seen, torch.ones(len(logs)), torch.ones(len(logs)))
        totals.append(steering.total)
    assert abs(totals[0]) <= len(logs) + 1e-9
    assert abs(totals[1] - totals[0]) <= len(logs) * steering.slack_per_record(NORM_ERROR) + 1e-12


def test_zero_and_broken_gradients_have_bounded_parts():
    """A gradient of 0 is within the clip norm, one that is not finite is not. Pitfall 21."""
    steering = ClipNormSteering(adaptive_plan())
    steering.select(None, None)
    norms = torch.tensor([0.0, math.inf, math.nan])
    steering.observe(norms, torch.ones(3), torch.ones(3))
    assert steering.total == pytest.approx((1 - 0.6) / 0.6 - 1 - 1)


def test_float32_leaves_room_for_rounding_in_other_rows():
    """Removing a record may change the norms of all others in their last bits. Pitfall 64."""
    plan = adaptive_plan()
    model = tools.mlp().float()
    rounding = tools.make_step(model, cross_entropy, plan=plan)._sums.rounding
    per_record = 2 * NORM_ERROR / math.log(4) / 0.6
    assert rounding.release_slack > RELEASE_SLACK + 12 * per_record  # 12 records are expected
    assert rounding.release_slack < 0.01


def test_the_clip_norms_depend_only_on_released_numbers():
    """The sequence of clip norms can be computed from the noised numbers alone."""
    plan = adaptive_plan(release_std=3.0)
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, plan=plan)
    released, scales = [], []
    update = step.steering.update
    step.steering.update = lambda number: (released.append(number), update(number))
    for number in range(plan.steps):
        batch = tools.batch_of(inputs[number:], labels[number:], number)
        step(batch)
        scales.append(step.steering.clip_scale)
    log_scale = 0.0
    for number, scale in zip(released, scales, strict=True):
        excess = min(1.0, max(-1.0, number * 0.6 / plan.expected_batch_size))
        log_scale -= 0.2 * excess
        assert scale == pytest.approx(math.exp(log_scale), rel=1e-12)
    assert len(set(scales)) == plan.steps


def test_noise_and_clip_norms_are_scaled_alike():
    """The noise multiplier of every owner is the planned one at every clip norm."""
    plan = adaptive_plan()
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, plan=plan)
    step.steering.load_state({"log_clip_scale": -1.5})
    before = tools.weights_of(model)
    sums = step.clipped_sum(tools.batch_of(inputs, labels))
    step(tools.batch_of(inputs, labels))
    scale = math.exp(-1.5)
    expected = tools.noised(list(sums.values()), plan, clip_scale=scale)
    moved = (before - tools.weights_of(model)) * plan.expected_batch_size
    total = torch.cat([part.flatten() for part in expected])
    torch.testing.assert_close(moved, total, rtol=0, atol=1e-9)
    norms = float(tools.flat(sums).norm())
    assert norms <= scale * plan.clip_norms.max() * len(inputs)


def test_the_released_number_has_the_planned_noise():
    """An empty batch releases noise alone, which moves the clip norm."""
    plan = adaptive_plan(release_std=3.0)
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, plan=plan)
    step(tools.batch_of(inputs[:0], labels[:0]))
    noise = tools.release_noise(tools.SEED, 0, torch.zeros(1, dtype=torch.float64), 3.0)
    noise = float(noise) * (1 + step._sums.rounding.release_slack)
    moved = -0.2 * min(1.0, max(-1.0, 0.6 * noise / 12))
    assert step.steering.state()["log_clip_scale"] == pytest.approx(moved)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
def test_epsilon_by_another_accountant(method, accountant):
    """dp-accounting, given the mechanism as it runs, finds no more than the plan states."""
    plan = ow.plan(
        tools.owners(), method, steps=40, batch_size=12, clip_norm=ADAPTIVE, accountant=accountant
    )
    strictest = float((plan.noise_std / plan.clip_norms).max())
    share = (strictest / plan.release_std) ** 2
    assert share == pytest.approx(0.01 * (1 + share), rel=0.05)
    for owner, target in enumerate(plan.targets):
        multiplier = 1 / math.hypot(plan.clip_norms[owner] / plan.noise_std, 1 / plan.release_std)
        gaussian = dp_event.GaussianDpEvent(multiplier)
        sampled = dp_event.PoissonSampledDpEvent(float(plan.sampling_rates[owner]), gaussian)
        accountant_ = PLDAccountant(value_discretization_interval=1e-4)
        accountant_.compose(dp_event.SelfComposedDpEvent(sampled, plan.steps))
        found = accountant_.get_epsilon(float(plan.deltas[owner]))
        assert found <= target
        assert found <= plan.epsilon()[owner] * (1 + 2e-3)
        if method == "sample" and accountant == "pld":
            assert found > 0.99 * target


def test_the_number_costs_what_it_is_said_to_cost():
    fixed = tools.make_plan(method="sample")
    adaptive = adaptive_plan(method="sample")
    multipliers = adaptive.noise_std / adaptive.clip_norm, fixed.noise_std / fixed.clip_norm
    assert multipliers[0] / multipliers[1] == pytest.approx(0.99**-0.5, rel=2e-3)
    joint = joint_multiplier(multipliers[0], adaptive.release_std)
    assert joint == pytest.approx(multipliers[1], rel=2e-3)


def test_the_clip_norm_finds_its_quantile():
    """Log-normal norms whose scale falls by half every 100 steps; the clip norm lags behind."""
    plan = ow.plan(
        ow.Owners(np.zeros(4000, dtype=int), 4.0), steps=400, batch_size=200,
        clip_norm=ow.AdaptiveClipNorm(quantile=0.7, initial=30.0),
    )  # fmt: skip
    steering, generator = ClipNormSteering(plan), np.random.default_rng(0)
    within = []
    for step in range(400):
        norms = torch.from_numpy(np.exp(generator.normal(0, 1, 200)) * 0.5 ** (step / 100))
        steering.select(None, None)
        limit = torch.full((200,), steering.clip_norm)
        steering.observe(norms, limit, torch.ones(200))
        steering.update(steering.total + generator.normal(0, plan.release_std))
        within.append(float((norms <= limit).double().mean()))
    assert np.mean(within[200:]) == pytest.approx(0.7, abs=0.07)


def test_the_clip_norm_stays_in_float32s_range():
    for sign in (-1, 1):
        steering = ClipNormSteering(adaptive_plan())
        for _ in range(200):
            steering.update(sign * 1e12)
        assert 1e-6 < steering.clip_norm < 1e6
    small = tools.make_plan(clip_norm=ow.AdaptiveClipNorm(initial=1e-4), method="sample")
    steering = ClipNormSteering(small)
    for _ in range(200):
        steering.update(1e12)
    assert steering.clip_norm >= 1e-6 * (1 - 1e-12)


def run(plan, steps, weights=None, **checkpoint):
    torch.manual_seed(1)
    data = torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))
    model = tools.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = tools.make_step(
        model, cross_entropy, plan=plan, optimizer=optimizer, seed=7, weights=weights
    )
    tools.run_steps(step, data, steps, seed=7, **checkpoint)
    return torch.cat([tools.weights_of(model), torch.tensor([step.steering.clip_norm])])


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.5)], ids=["plain", "INO"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, weights):
    """Pitfall 16."""
    plan = adaptive_plan()
    whole = run(plan, 6, weights)
    run(plan, 2, weights, folder=tmp_path)
    assert torch.equal(run(plan, 6, weights, folder=tmp_path, restore=True), whole)


def test_a_damaged_state_is_refused():
    steering = ClipNormSteering(adaptive_plan())
    for state in ({}, {"log_clip_scale": 11.0}, {"log_clip_scale": math.nan},
                  {"log_clip_scale": True}, {"log_clip_scale": 0.0, "more": 1}):  # fmt: skip
        with pytest.raises(OwnerwiseError, match="stored state of the clip norm"):
            steering.load_state(state)


@pytest.mark.parametrize("size", [1, 4, None])
def test_micro_batches_add_up_to_the_same_number(size):
    plan, found = adaptive_plan(), []
    for micro in (size, None):
        model, inputs, labels = tools.example("mlp")
        step = tools.make_step(
            model, cross_entropy, plan=plan, weights=ow.INO(tail=0.5),
            performance=ow.Performance(micro_batch_size=micro),
        )  # fmt: skip
        for number in range(3):
            step(tools.batch_of(inputs, labels, number))
        found.append(torch.cat([tools.weights_of(model), torch.tensor([step.steering.clip_norm])]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


def test_combinations_that_are_refused_say_why():
    plan, model = adaptive_plan(), tools.mlp()
    with pytest.raises(OwnerwiseError, match="acts as a learning rate") as error:
        tools.make_step(model, cross_entropy, plan=plan, clipping=ow.AutoS())
    assert len(error.value.problems) == 1
    with pytest.raises(OwnerwiseError, match="acceptance= adapts the clip norm by itself"):
        tools.make_step(model, cross_entropy, plan=plan, clipping=ow.ImportanceSampling())
    with pytest.raises(OwnerwiseError, match="remove the release, or plan with a fixed"):
        tools.make_step(model, cross_entropy, plan=plan, release=tools.CountClasses())
    with pytest.raises(PlanError, match="plan accounts for one; use a fixed clip_norm"):
        ow.plan(tools.owners(), steps=5, batch_size=12, clip_norm=ADAPTIVE,
                constraints=tools.CountClasses())  # fmt: skip
    with pytest.raises(PlanError, match="'laplace' with an adaptive clip norm"):
        adaptive_plan(release_noise="laplace")


def test_all_problems_with_the_options_at_once():
    wrong = ow.AdaptiveClipNorm(quantile=1.0, initial=0.0, rate=2, release_share="x")
    with pytest.raises(PlanError) as error:
        ow.plan(tools.owners(), steps=5, batch_size=12, clip_norm=wrong)
    starts = [problem.split()[1] for problem in error.value.problems]
    assert starts == ["quantile", "release_share", "rate", "initial"]
    with pytest.raises(PlanError, match=r"clip_norm 'half'.*, or 'adaptive'"):
        ow.plan(tools.owners(), steps=5, batch_size=12, clip_norm="half")


def test_a_plan_is_stored_whole_and_a_change_is_found(tmp_path):
    plan = adaptive_plan()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", tools.owners())
    assert again == plan
    assert again.adaptive_clip_norm == ADAPTIVE
    assert "then the 0.6 quantile of the norms" in plan.describe()
    for change in (
        {"release_std": None}, {"adaptive_clip_norm": ow.AdaptiveClipNorm(initial=2.0)},
        {"adaptive_clip_norm": {"quantile": 0.5}},
        {"release_shares": np.full(3, 0.5)},
    ):  # fmt: skip
        with pytest.raises(PlanError, match="adaptive_clip_norm"):
            replace(plan, **change).verify()


def test_the_trainer_records_the_released_clip_norm():
    torch.manual_seed(0)
    data = torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))
    plan = adaptive_plan(calibration=ow.Calibration())
    run = ow.Trainer(tools.mlp(), plan, lr=0.5, seed=1, evaluate_every=2).fit(data)
    norms = [line["steering"]["clip_norm"] for line in run.history]
    assert norms[0] == pytest.approx(0.8)
    assert len(set(norms)) == len(norms)
