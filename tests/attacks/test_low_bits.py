"""The low bits of what a step releases must not show which records took part.

A float sum plus float noise lies on the grid of its larger summand wherever the two nearly cancel.
The attack looks at the small outputs of one step and counts how many lie on the grid that the
record's contribution would force. Without a public grid it told 100 of 100 runs apart.
"""

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.randomness import Noise, grid_of
from tools.step_tools import one_thread

_one_thread = pytest.fixture(autouse=True)(one_thread)

FEATURES = 20_000


def released(present: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The gradient that the optimizer sees after one step, with or without the record."""
    owners = ow.Owners(np.zeros(1, dtype=int), {0: 1.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=1, batch_size=1)
    model = nn.Linear(FEATURES, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    step = ow.PrivateStep(model, plan, optimizer, lambda out, y: (out[:, 0] - y) ** 2)
    rows = np.arange(1 if present else 0)
    data = (torch.ones(len(rows), FEATURES, dtype=dtype), -1e6 * torch.ones(len(rows), dtype=dtype))
    step(ow.Batch(0, rows, np.zeros(len(rows), dtype=np.int64), data))
    return optimizer.state[model.weight]["momentum_buffer"].flatten().clone()


def share_on(grid: float, values: torch.Tensor, below: float) -> float:
    small = values[values.abs() < below].double() / grid
    return float((small == small.round()).double().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_outputs_lie_on_the_same_grid_with_and_without_the_record(dtype):
    part = 1 / np.sqrt(FEATURES)  # of the record, in every coordinate
    forced = float(np.spacing(np.array(part, dtype=str(dtype).removeprefix("torch."))) / 2)
    shares = [
        [share_on(forced, released(present, dtype, seed), part / 4) for seed in range(3)]
        for present in (False, True)
    ]
    # all lie on the public grid, which is coarser than what the record would force
    assert shares == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-9, 0.3, 7.0, 1e4, 1e9])
def test_noised_sums_are_whole_multiples_of_the_grid_or_rounded_from_them(dtype, size):
    sums = [size * torch.randn(5000, dtype=dtype), torch.zeros(3, dtype=dtype)]
    grid = grid_of(1.0, 5003, 1e-4)
    for step, kind in enumerate(("gaussian", "laplace")):
        noise = Noise(ow.SecretStream.from_seed(3))
        first = getattr(noise, kind)(step, sums, 1.0, grid)
        again = Noise(ow.SecretStream.from_seed(3))
        zero = getattr(again, kind)(step, [0 * total.double() for total in sums], 1.0, grid)
        for total, noised, extra in zip(sums, first, zero, strict=True):
            exact = torch.round(total.double() / grid) + extra / grid
            assert torch.equal(extra / grid, torch.round(extra / grid))
            assert torch.equal(noised, (exact * grid).to(dtype))


def test_the_float_sum_that_was_used_before_is_told_apart():
    """The attack itself: it works where noise is added to a float sum."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(FEATURES, generator=generator)
    part = torch.tensor(1 / np.sqrt(FEATURES), dtype=torch.float32)
    forced = float(np.spacing(part.numpy()) / 2)
    with_record = share_on(forced, noise + part, float(part) / 4)
    without = share_on(forced, noise, float(part) / 4)
    assert with_record == 1.0
    assert without < 0.6


@pytest.mark.parametrize("numbers", [1, 10**4, 10**8])
def test_the_grid_is_a_power_of_two_within_its_tolerance(numbers):
    for std, tolerance in ((1.0, 1e-4), (3e-7, 1e-9), (5e5, 1.0)):
        grid = grid_of(std, numbers, tolerance)
        assert np.frexp(grid)[0] == 0.5
        assert grid <= std * 2**-20
        assert grid * np.sqrt(numbers) <= tolerance
    with pytest.raises(ValueError, match="too fine for float64"):
        grid_of(1.0, 10**8, 1e-12)
