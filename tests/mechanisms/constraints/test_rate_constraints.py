"""Sensitivity by brute force, prices against autograd, and what a missing group does."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import constraints as rates
from ownerwise.mechanisms import (
    loss_problems,
    sum_of_unit_rows,
)
from ownerwise.step.rounding import RELEASE_SLACK
from tools import step_tools as tools

one_thread = pytest.fixture(autouse=True)(tools.double_on_one_thread)
PART = ow.Partition({"sex": ("F", "M"), "label": (0, 1, 2)})
SEX = np.resize(["F", "M", "M"], tools.RECORDS)


def made(**options):
    listed = [
        rates.demographic_parity(PART, "sex", max_gap=0.02),
        rates.precision(PART, min_rate=0.9, positive=1),
        rates.error_rate(PART, max_rate=0.1, by="sex"),
        rates.balanced_predictions(PART, 0.01),
    ]
    return ow.RateConstraints(listed, **options)


def plan(**options):
    return tools.make_plan(release_std=4.0, **options)


def records(count=11):
    model, inputs, labels = tools.example("mlp", count)
    return model, inputs, PART.targets(labels, {"sex": SEX[:count]})


def constrained_step(model, fair, plan, **options):
    loss = fair.penalised(functional.cross_entropy)
    return tools.make_step(model, loss, plan=plan, release=fair, **options)


def histograms(dtype: torch.dtype, bad: float = 0.0):
    """Outputs of nine records with their targets, small and huge; one of them may be `bad`."""
    generator = torch.Generator().manual_seed(1)
    for case in range(30):
        outputs = torch.randn(9, 3, generator=generator, dtype=dtype) * 10.0 ** (case % 4)
        outputs[4] += bad
        labels = torch.randint(0, 3, (9,), generator=generator)
        yield outputs, PART.targets(labels, {"sex": SEX[:9]})


def histogram_of(fair, outputs, targets, scales=None):
    own = None if scales is None else scales.numpy()
    cells = fair.contributions(outputs, targets)
    return sum_of_unit_rows([cells], [slice(0, len(outputs))], fair.shape, own)


SCALES = torch.linspace(0.1, 1.0, 9, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [None, SCALES], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("hard", [False, True])
def test_a_record_moves_the_histogram_by_at_most_one_or_its_scale(hard, scales, dtype):
    """In sum, hence in length, with the record and without it, whatever the outputs are."""
    fair = made(hard=hard)
    for outputs, targets in histograms(dtype):
        whole = histogram_of(fair, outputs, targets, scales)
        for out in range(9):
            kept = [at for at in range(9) if at != out]
            own = None if scales is None else scales[kept]
            moved = whole - histogram_of(fair, outputs[kept], targets[kept], own)
            limit = 1.0 if scales is None else float(scales[out])
            assert float(moved.abs().sum()) <= limit * (1 + 1e-12)
            assert float(moved.norm()) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("scales", [None, SCALES], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("hard", [False, True])
def test_the_histogram_is_the_sum_of_each_records_prediction(hard, scales, bad):
    fair = made(hard=hard)
    for outputs, targets in histograms(torch.float64, bad):
        slow = torch.zeros(fair.shape, dtype=torch.float64)
        for at in range(9):
            counts = outputs[at].softmax(dim=0)
            if hard:
                counts = functional.one_hot(outputs[at].argmax(), fair.shape[1]).double()
            if torch.isfinite(counts).all():
                slow[targets[at, 1]] += counts * (1.0 if scales is None else scales[at])
        fast = histogram_of(fair, outputs, targets, scales)
        assert torch.allclose(fast, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.5)], ids=["plain", "INO"])
def test_a_record_moves_the_sum_by_at_most_its_clip_norm_given_the_histogram(weights):
    """The release is fixed to one value, so that only the gradients differ."""
    model, inputs, targets = records()
    prices = torch.randn(PART.shape, generator=torch.Generator().manual_seed(4)) * 5

    class Fixed(ow.RateConstraints):
        def process(self, noised):
            return prices

    fair = Fixed(made().constraints)
    step = constrained_step(model, fair, plan(), weights=weights)
    batch = tools.batch_of(inputs, targets)
    whole = tools.flat(step.clipped_sum(batch))
    for out in range(len(inputs)):
        kept = [at for at in range(len(inputs)) if at != out]
        rest = tools.batch_of(inputs[kept], targets[kept], indices=kept)
        moved = float((whole - tools.flat(step.clipped_sum(rest))).norm())
        limit = step.plan.clip_norms[batch.owner_index[out]]
        assert moved <= limit * (1 + 1e-6)


def test_prices_are_the_gradient_of_the_priced_constraints():
    """The sum of priced probabilities has the gradient of sum_j multiplier_j rate_j."""
    of = SimpleNamespace(sampling_rates=np.ones(1), elements=np.array([40]), release_shares=None)
    fair = made(smoothing=0.0, ascent=3.0, cap=50.0).bind(
        SimpleNamespace(holders=of, release_std=0.0)
    )
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(40, 3, generator=generator, requires_grad=True)
    labels = torch.randint(0, 3, (40,), generator=generator)
    targets = PART.targets(labels, {"sex": SEX[:40]})
    cells = fair.contributions(outputs, targets)
    histogram = cells.rows.new_zeros(fair.shape).index_add(0, cells.index, cells.rows)
    prices = fair.process(histogram.detach())
    loss = fair.penalised(functional.cross_entropy)
    priced = (loss(outputs, targets, prices) - loss(outputs, targets)).sum() / 40
    found = torch.autograd.grad(priced, outputs, retain_graph=True)[0]
    total = torch.zeros(())
    for one, multiplier in zip(fair.constraints, fair.multipliers, strict=True):
        value = one.expression.constant
        for weight, term in one.expression.terms:
            above, below = (torch.as_tensor(mask) for mask in (term.numerator, term.denominator))
            value = value + weight * histogram[above].sum() / histogram[below].sum()
        sign = 1 if one.sense == "≤" else -1
        total = total + sign * multiplier * (value - one.bound)
    assert (fair.multipliers > 0).sum() >= 3
    expected = torch.autograd.grad(total, outputs)[0]
    torch.testing.assert_close(found, expected, check_dtype=False)


def test_prices_only_add_to_a_loss():
    """A negative price can cancel a loss, and then rounding looks like a mixing of records."""
    fair = made().bind(plan())
    priced = fair.penalised(functional.cross_entropy)
    generator = torch.Generator().manual_seed(7)
    for outputs, targets in histograms(torch.float32):
        prices = fair.process(torch.randn(fair.shape, generator=generator) * 50 + 40)
        assert torch.equal(prices.min(dim=1).values, torch.zeros(len(prices)).double())
        assert float(prices.max()) > 0
        added = priced(outputs, targets, prices) - priced(outputs, targets)
        assert float(added.min()) >= 0


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, torch.nn.CrossEntropyLoss()], ids=["function", "module"]
)
def test_the_loss_of_a_record_is_its_own_plus_the_price_of_its_prediction(loss, temperature):
    prices = torch.randn(PART.shape, generator=torch.Generator().manual_seed(5)).double()
    fair = made(temperature=temperature)
    priced = fair.penalised(loss)
    for outputs, targets in histograms(torch.float64):
        outputs.requires_grad_()
        expected = torch.stack(
            [
                -torch.log_softmax(row, dim=0)[label]
                + prices[cell] @ torch.softmax(temperature * row, dim=0)
                for row, (label, cell) in zip(outputs, targets.tolist(), strict=True)
            ]
        )
        found = priced(outputs, targets, prices)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(one.sum(), outputs)[0] for one in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_multipliers_rise_with_the_excess_and_stay_within_bounds():
    fair = made(ascent=2.0, damping=0.0, cap=1.5, smoothing=0.0).bind(plan())
    even = torch.full(fair.shape, 100.0)
    fair.process(even)
    values = fair.record()["values"]
    assert values["parity of 0: sex F - M ≤ 0.02"] == pytest.approx(0.0)
    assert values["precision ≥ 0.9"] == pytest.approx(1 / 3)
    expected = {one.name: max(0.0, 2 * one.excess(values[one.name])) for one in fair.constraints}
    assert fair.record()["multipliers"] == pytest.approx(expected)
    for _ in range(5):
        fair.process(even)
    assert fair.multipliers.max() == 1.5
    assert fair.multipliers.min() == 0.0
    assert made().bind(plan()).record() is None
    swinging, damped = (made(ascent=0.1, damping=d, smoothing=0.0).bind(plan()) for d in (0.0, 2.0))
    for one in (swinging, damped):
        one.process(even)
        one.process(even)
    assert (damped.multipliers >= swinging.multipliers).all()
    expected = [0.2 * max(0.0, e) + 2 * e for e in excesses(damped)]
    np.testing.assert_allclose(damped.multipliers, np.maximum(expected, 0.0))


def excesses(fair):
    values = fair.record()["values"]
    return [one.excess(values[one.name]) for one in fair.constraints]


def test_denominators_are_smoothed_only_where_the_model_cannot_change_them():
    fair = made(smoothing=0.5).bind(plan())
    fair.process(torch.full(fair.shape, 100.0))
    counts = torch.full(fair.shape, 100.0)
    counts[:, 1] = 40.0
    fair.process(counts)
    values = fair.record()["values"]
    # women: (0.25 * 900 + 0.5 * 720) / 0.75 records, of whom 80 + 100 ... are predicted wrong
    women = (0.25 * 900 + 0.5 * 720) / 0.75
    assert values["error of sex = F ≤ 0.1"] == pytest.approx((3 * 100 + 140 + 40) / women)
    assert values["precision ≥ 0.9"] == pytest.approx(1 / 3)  # its own step alone


def test_a_missing_group_or_an_empty_histogram_gives_finite_prices():
    """Also where noise makes counts negative."""
    for seed in range(20):
        fair = made().bind(plan())
        generator = torch.Generator().manual_seed(seed)
        for scale in (0.0, 1.0, 100.0):
            counts = torch.randn(fair.shape, generator=generator) * scale
            counts[3:] += 30.0 if seed % 2 else 0.0
            prices = fair.process(counts)
            assert torch.isfinite(prices).all()
            assert all(math.isfinite(v) for v in fair.record()["values"].values())


def test_the_noise_of_a_value_is_what_repeated_noise_does():
    fair = made(smoothing=0.0).bind(plan())
    counts = torch.full(fair.shape, 2000.0)
    generator = torch.Generator().manual_seed(3)
    seen = []
    for _ in range(4000):
        fair.process(counts + 4.0 * torch.randn(fair.shape, generator=generator))
        seen.append(list(fair.record()["values"].values()))
    stated = list(fair.record()["noise"].values())
    np.testing.assert_allclose(np.std(seen, axis=0), stated, rtol=0.08)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_every_cell_gets_noise_of_its_own(noise):
    """Pitfall 32. A correlation of 3,000 draws has error .018; five of them are 6e-7, times 153."""
    seen = []

    class Watching(ow.RateConstraints):
        def process(self, noised):
            seen.append(noised.flatten())
            return super().process(noised)

    model, inputs, targets = records()
    paid = tools.make_plan(
        method="uniform", steps=3000, batch_size=1, release_std=9.0, release_noise=noise
    )
    step = constrained_step(model, Watching(made().constraints), paid)
    for number in range(3000):
        step(tools.batch_of(inputs[:0], targets[:0], number))
    draws = torch.stack(seen).numpy()
    correlations = np.corrcoef(draws.T) - np.eye(draws.shape[1])
    assert np.abs(correlations).max() < 5 / math.sqrt(3000)
    np.testing.assert_allclose(draws.std(axis=0), 9.0, rtol=0.15)
    kurtosis = ((draws / draws.std()) ** 4).mean()
    assert kurtosis == pytest.approx(6.0 if noise == "laplace" else 3.0, rel=0.15)


def test_an_empty_batch_makes_its_release_too():
    """Pitfall 7: noise alone is released, and the multipliers move by it."""
    model, inputs, targets = records()
    step = constrained_step(model, made(), plan())
    before = tools.weights_of(model)
    step(tools.batch_of(inputs[:0], targets[:0]))
    noise = torch.cat([extra.flatten() for extra in tools.noise_of(model, step.plan)])
    moved = (before - tools.weights_of(model)) * step.plan.expected_batch_size
    torch.testing.assert_close(moved, noise, rtol=0, atol=1e-12)
    assert step.release.record() is not None


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_change_nothing(size):
    """Pitfall 9: one histogram of the logical batch."""
    model, inputs, targets = records()
    other = tools.mlp()
    other.load_state_dict(model.state_dict())
    for number in range(3):
        steps = [(model, None), (other, size)]
        if number == 0:
            pair = [
                constrained_step(m, made(), plan(), performance=ow.Performance(micro_batch_size=s))
                for m, s in steps
            ]
        for step in pair:
            step(tools.batch_of(inputs, targets, number))
    torch.testing.assert_close(tools.weights_of(model), tools.weights_of(other))
    np.testing.assert_allclose(pair[0].release.multipliers, pair[1].release.multipliers)


def test_release_shares_scale_what_their_records_add():
    scales = np.array([1.0, 0.5, 0.25])
    model, inputs, targets = records(3)
    seen = []

    class Watching(ow.RateConstraints):
        def process(self, noised):
            seen.append(noised)
            return super().process(noised)

    paid = dataclasses.replace(plan(), release_shares=scales)
    step = constrained_step(model, Watching(made().constraints), paid)
    step.clipped_sum(tools.batch_of(inputs, targets))
    for record in range(3):
        cell = targets[record, 1]
        assert float(seen[0][cell].sum()) == pytest.approx(
            scales[targets[:, 1].eq(cell).numpy()].sum() / (1 + RELEASE_SLACK)
        )


def test_wrong_targets_outputs_and_options_are_named():
    fair = made()
    with pytest.raises(ow.OwnerwiseError, match=r"expected int64 \[records, 2\], class and cell"):
        fair.contributions(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        ow.OwnerwiseError, match=r"expected \[records, 3\], one output for each class"
    ):
        fair.contributions(torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ow.OwnerwiseError) as error:
        made(ascent=0, damping=-1, cap=-1, temperature=math.inf, smoothing=1.0, floor=0)
    assert len(error.value.problems) == 6
    with pytest.raises(ow.OwnerwiseError, match="expected at least one constraint, got none"):
        ow.RateConstraints([])
    with pytest.raises(ow.OwnerwiseError, match="is not a constraint"):
        ow.RateConstraints(["parity"])
    twice = rates.error_rate(PART, max_rate=0.1)
    with pytest.raises(ow.OwnerwiseError, match="two constraints are named"):
        ow.RateConstraints([twice, twice])
    other = ow.Partition({"sex": ("F", "M")}, classes=3)
    with pytest.raises(ow.OwnerwiseError, match="several partitions"):
        ow.RateConstraints([twice, rates.demographic_parity(other, "sex", max_gap=0.1)])
    (problem,) = loss_problems(fair.penalised(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert "trainable parameters (weight, bias)" in problem
    with pytest.raises(ow.OwnerwiseError, match="belongs to different constraints"):
        fair.load_state(ow.RateConstraints(twice).state())
