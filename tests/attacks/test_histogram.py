"""The histogram of rate constraints: rounding in other records' outputs must not move it."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import constraints as rates
from ownerwise.step.rounding import RELEASE_SLACK, Rounding
from tools import step_tools as tools

RECORDS = 801
OWNERS = ow.Owners(np.zeros(2 * RECORDS, dtype=int), {0: 4.0}, 1e-5)
PART = ow.Partition({"sex": ("F", "M")}, classes=2)


def made(**options):
    return ow.RateConstraints(rates.demographic_parity(PART, "sex", max_gap=0.05), **options)


def plan_of(hardened, batch_size=RECORDS):
    options = {"steps": 4, "batch_size": batch_size, "release_std": 20.0}
    return ow.plan(OWNERS, "uniform", hardened=hardened, **options)


def make_step(model, fair, plan, **options):
    return ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1),
        fair.penalised(functional.cross_entropy), release=fair, **options,
    )  # fmt: skip


def histogram(step, inputs, targets, removed=None):
    """The histogram before its noise, with the records in rows that they keep."""
    chosen = np.arange(RECORDS) if removed is None else np.delete(np.arange(RECORDS), removed)
    seen = []
    randomness = dataclasses.replace(
        ow.mechanisms.Randomness(),
        rows=tools.CoupledRows(step.plan.hardened_rows, removed),
        release=lambda total: seen.append(total.double().clone()) or total,
    )
    batch = ow.Batch(0, chosen, 0 * chosen, (inputs[chosen], targets[chosen]))
    step.clipped_sum(batch, randomness)
    return seen[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro", [None, 100])
@pytest.mark.parametrize("size", [1.6e4, 2e6])
@pytest.mark.parametrize("options", [{}, {"hard": True}, {"temperature": 50.0}], ids=str)
def test_a_record_moves_the_histogram_by_one_in_hardened_plans(
    options, size, micro, dtype, threads
):
    """Outputs whose two classes tie up to the last bit; L1 movements of 801 were found."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Linear(7, 2).to(dtype)
    with torch.no_grad():  # the classes differ by rounding alone: sums in another order
        model.weight[1] = model.weight[0]
        model.bias[1] = model.bias[0]
        model.weight[1] *= 1 + torch.finfo(dtype).eps
    inputs = (size * torch.randn(RECORDS, 7)).to(dtype)
    targets = PART.targets(np.zeros(RECORDS, dtype=int), {"sex": np.resize(["F", "M"], RECORDS)})
    step = make_step(
        model, made(**options), plan_of(True), performance=ow.Performance(micro_batch_size=micro)
    )
    whole = histogram(step, inputs, targets)
    for removed in (0, 400, 800):
        moved = whole - histogram(step, inputs, targets, removed)
        assert float(moved.abs().sum()) <= 1
    torch.set_num_threads(before)


def test_without_a_hardened_plan_predicted_classes_are_refused():
    with pytest.raises(ow.OwnerwiseError, match=r"hard=True count .*: plan with hardened=True"):
        make_step(nn.Linear(7, 2), made(hard=True), plan_of(False))
    make_step(nn.Linear(7, 2), made(hard=True), plan_of(True))


def test_without_a_hardened_plan_the_temperature_is_paid_for_or_refused():
    """The oracle: outputs of size 8 that move by 8 roundoffs move the histogram by less."""
    fair, model = made(temperature=3.0), nn.Linear(7, 2)
    rounding = Rounding.of(plan_of(False), model, None, fair)
    torch.manual_seed(0)
    outputs = 16 * torch.rand(RECORDS, 2, dtype=torch.float64) - 8
    apart = 8 * 8 * 2.0**-24 * torch.tensor([1.0, -1.0], dtype=torch.float64)
    moved = (3 * outputs).softmax(1) - (3 * (outputs + apart)).softmax(1)
    assert float(moved.abs().sum()) <= rounding.release_slack - RELEASE_SLACK
    assert Rounding.of(plan_of(True), model, None, fair).release_slack == RELEASE_SLACK
    with pytest.raises(ow.OwnerwiseError, match="a lower temperature or smaller batches"):
        make_step(model, made(temperature=300.0), plan_of(False))
    make_step(model, made(temperature=300.0), plan_of(True))
