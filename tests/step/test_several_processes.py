"""The private step in several processes: the same step as in one, whatever their number."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import ownerwise as ow
from tools import groups, step_tools

COUNTS = {owner: [10, 6, 4] for owner in (0, 1, 2)}

PLANS = {
    "plain": {"method": "both"},
    "releasing": {"method": "sample", "release_std": 4.0},
    "owners": {"unit": "owner", "sampling": "owner", "batch_size": 2, "records_per_owner": 8},
    "hardened": {"hardened": True},
    "adaptive": {"method": "sample", "clip_norm": ow.AdaptiveClipNorm(0.5)},
    "calibrated": {"calibration": ow.Calibration()},
}
STEPS = {
    "plain": ("plain", "mlp", {}),
    "ino": ("plain", "cnn", {"weights": ow.INO()}),
    "parts": ("plain", "mlp", {"weights": ow.INO(), "performance": ow.Performance(2)}),
    "importance": ("plain", "mlp", {"clipping": ow.ImportanceSampling()}),
    "steered": (
        "releasing", "mlp", {"clipping": ow.ImportanceSampling(accepted_batch=4, acceptance=0.5)},
    ),
    "release": ("releasing", "mlp", {"release": step_tools.CountClasses()}),
    "owners": ("owners", "text", {"weights": ow.INO()}),
    "hardened": ("hardened", "mlp", {"weights": ow.INO()}),
    "hardened coins": ("hardened", "mlp", {"clipping": ow.ImportanceSampling()}),
    "adaptive": ("adaptive", "mlp", {}),
    "calibrated": ("calibrated", "mlp", {"performance": ow.Performance(8)}),
}  # fmt: skip


def plans():
    return {name: step_tools.make_plan(**options) for name, options in PLANS.items()}


def loss(outputs, targets, *released):
    found = functional.cross_entropy(outputs, targets, reduction="none")
    return found * (1 + 0.01 * released[0].abs().mean()) if released else found


def trained(name, plan, steps, shares=None):
    """Train in float64, and return the parameters and what each step has shown."""
    torch.set_default_dtype(torch.float64)
    _, kind, options = STEPS[name]
    model, *data = step_tools.example(kind, step_tools.RECORDS)
    step = step_tools.make_step(model, loss, plan=plan, not_private=True, **options)
    seen = []
    for batch in ow.PoissonBatches(tuple(data), plan, stream=step_tools.seeded(), steps=steps):
        step(batch)
        seen.append((step.peek.losses, step.peek.norms, step.peek.factors, step.peek.owner_index))
        if shares is not None:
            shares.append((batch.records, batch.indices))
    if step.calibration is not None:
        step.calibrate(tuple(data))
    torch.set_default_dtype(torch.float32)
    return step_tools.weights_of(model), seen


def train_all(given, steps):
    return {name: trained(name, given[STEPS[name][0]], steps) for name in STEPS}


def standardised(plan):
    """The column statistics that are released before the first step."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(step_tools.RECORDS, 4, generator=generator)
    inputs[:, 2:] = 0.0  # no value is missing
    model = torch.nn.Sequential(ow.Standardise(2), torch.nn.Linear(4, 3))
    step = step_tools.make_step(model, functional.cross_entropy, plan=plan)
    step.standardise((inputs, torch.zeros(step_tools.RECORDS, dtype=torch.int64)))
    return step.statistics.state()


def outputs_of_equal_records(plan):
    """What a random layer makes of each process's first record, in a batch of equal records."""
    seen = []

    def loss(outputs, targets):
        seen.append(outputs.detach()[0])
        return functional.cross_entropy(outputs, targets, reduction="none")

    model = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.Dropout(0.5))
    step = step_tools.make_step(model, loss, plan=plan)
    data = torch.ones(step_tools.RECORDS, 4), torch.zeros(step_tools.RECORDS, dtype=torch.int64)
    step(next(iter(ow.PoissonBatches(data, plan, stream=step_tools.seeded()))))
    return seen[-1]


def all_of_two(given, statistics, steps):
    return (
        train_all(given, steps),
        standardised(statistics),
        outputs_of_equal_records(given["plain"]),
    )


def compare(found, expected):
    """All processes have the same bits, and those of one process but for rounding in float64."""
    for name, (parameters, seen) in expected.items():
        for one in found:
            if name != "hardened coins":  # in a hardened plan, rows have the coins, and are secret
                torch.testing.assert_close(one[name][0], parameters, rtol=0, atol=1e-12, msg=name)
            assert torch.equal(one[name][0], found[0][name][0])
            for step, columns in enumerate(one[name][1]):
                for column, first, alone in zip(
                    columns, found[0][name][1][step], seen[step], strict=True
                ):
                    assert np.array_equal(column, first)
                    if (
                        "hardened" not in name
                    ):  # other rows, and another order of the batch's elements
                        np.testing.assert_allclose(column, alone, rtol=1e-9, atol=1e-12)


def test_two_processes_take_the_steps_of_one():
    given, statistics = plans(), step_tools.make_plan(statistics=ow.ColumnStatistics())
    found = groups.in_group(all_of_two, 2, given, statistics, 3)
    compare([one[0] for one in found], train_all(given, 3))
    assert found[0][1] == found[1][1] == standardised(statistics)
    assert not torch.equal(found[0][2] == 0, found[1][2] == 0)  # each has masks of its own


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_processes_takes_the_steps_of_one(count):
    given = {
        name: step_tools.make_plan(**{**options, "steps": 20}) for name, options in PLANS.items()
    }
    compare(groups.in_group(train_all, count, given, 20), train_all(given, 20))
