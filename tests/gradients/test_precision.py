"""What single precision, autocast and huge numbers must not take from norms and sums."""

import contextlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import Chain, Tape
from ownerwise.gradients.precision import HUGE, full_precision, without_huge
from ownerwise.mechanisms import (
    Randomness,
)
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)


class Accepts:
    """Random numbers with which every record whose norm can be told is accepted."""

    def uniforms(self, count):
        return np.zeros(count)


class Twice(nn.Module):
    """Two vector layers, for the bank of them."""

    def __init__(self, first):
        super().__init__()
        self.first, self.second = first, nn.Linear(1, 1)

    def forward(self, inputs):
        return self.first(inputs) + 0 * self.second(inputs)


class Tokens(nn.Module):
    """The same layer on three like tokens, for Gram matrices."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        return self.layer(inputs[:, None, :].expand(-1, 3, -1).contiguous()).sum(1)


@pytest.mark.parametrize("rule", [ow.ImportanceSampling(), ow.AutoS(), ow.Standard()])
@pytest.mark.parametrize(
    "wrap",
    [lambda layer: layer, lambda layer: nn.Sequential(layer, nn.Identity()), Twice, Tokens],
    ids=["chain", "vector", "bank", "tokens"],
)
def test_a_huge_input_beside_a_vanishing_gradient_stays_within_the_clip_norm(rule, wrap):
    """The square of the output's gradient vanishes in float32, the gradient itself does not."""
    classes, clip_norm = 1000, 0.01
    layer = nn.Linear(1, classes)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(-52.1)
        layer.bias[0] = 0
    model = wrap(layer).float()
    owners = ow.Owners(np.arange(50) % 2, {0: 1.0, 1: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=1, batch_size=10, clip_norm=clip_norm)
    step = tools.make_step(model, functional.cross_entropy, plan=plan, clipping=rule)
    one = np.array([0])
    batch = ow.Batch(
        0, one, one, (torch.tensor([[1.8e19]], dtype=torch.float32), torch.tensor([0]))
    )
    total = tools.flat(step.clipped_sum(batch, Randomness(rule=Accepts())))
    assert float(total.norm()) <= clip_norm * (1 + 1e-5)


KERNELS = {
    "cuda": (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn),
    "cpu": (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn),
}


def legacy():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def per_kernel():
    for kernels, reduced in zip(KERNELS.values(), ("tf32", "bf16"), strict=True):
        for kernel in kernels:
            kernel.fp32_precision = reduced


@pytest.fixture
def _settings_kept():
    before = [(k, k.fp32_precision) for kernels in KERNELS.values() for k in kernels]
    yield
    for kernel, precision in before:
        kernel.fp32_precision = precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_settings_kept")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    "allow",
    [lambda: None, legacy, per_kernel, lambda: torch.set_float32_matmul_precision("medium")],
    ids=["default", "legacy", "per kernel", "medium"],
)
def test_reduced_precision_is_off_for_norms_and_sums_and_back_on_afterwards(allow, device, fails):
    """TF32 on GPUs, bfloat16 on some CPUs; the settings of torch are checked, not the kernels."""
    allow()
    before = [kernel.fp32_precision for kernel in KERNELS[device]]
    with contextlib.suppress(ZeroDivisionError), full_precision(torch.device(device)):
        assert {kernel.fp32_precision for kernel in KERNELS[device]} <= {"ieee", "none"}
        assert not torch.is_autocast_enabled(device)
        _ = 1 / (0 if fails else 1)
    assert [kernel.fp32_precision for kernel in KERNELS[device]] == before
    if allow is legacy:
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("_settings_kept")
@pytest.mark.parametrize("wrap", [nn.Sequential, Tokens], ids=["chain", "tape"])
def test_sums_are_the_same_bits_where_products_may_be_less_precise(wrap):
    """On CPUs without bfloat16 instructions, the setting has no effect and this cannot fail."""
    model = wrap(nn.Linear(300, 300)).float()
    inputs = torch.randn(400, 300).float()
    records = []
    tape = Tape(model)
    with tape:
        outputs = model(inputs)
    losses = functional.cross_entropy(outputs, torch.zeros(400).long(), reduction="none")
    records.append(tape.backward(losses))
    if (chain := Chain.of(model, inputs)) is not None:
        outputs = chain.forward(inputs)
        losses = functional.cross_entropy(outputs, torch.zeros(400).long(), reduction="none")
        records.append(chain.backward(losses))
    assert len(records) == (2 if wrap is nn.Sequential else 1)
    for one in records:
        for in_blocks in (False, True):
            sums = one.weighted_sum(torch.ones(400), in_blocks=in_blocks)
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            again = one.weighted_sum(torch.ones(400), in_blocks=in_blocks)
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"
            assert all(torch.equal(sums[parameter], again[parameter]) for parameter in sums)


def test_huge_factors_are_not_finite_and_others_stay():
    norms = torch.tensor([1.0, 2.0, 3.0])
    large = torch.tensor([[0.0, 2 * HUGE, 0.0], [HUGE, 0.0, 0.0]])
    assert without_huge(norms.clone(), large).tolist() == [1.0, math.inf, 3.0]
    assert without_huge(norms.clone(), torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
    assert without_huge(torch.zeros(0), torch.zeros(2, 0)).tolist() == []


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Linear(4, 3),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten()),
        lambda: Tokens(nn.Linear(4, 3)),
    ],
    ids=["linear", "convolution", "tokens"],
)
def test_under_autocast_sums_are_single_precision(model):
    """In bfloat16 a sum of like gradients moves by many clip norms at once where it rounds."""
    model = model().float()
    plan = tools.make_plan()
    step = tools.make_step(model, functional.cross_entropy, plan=plan)
    inputs = (torch.randn(1, 4).expand(1100, 4) + 0.01 * torch.randn(1100, 4)).float()
    targets = torch.zeros(1100, dtype=torch.int64)

    def total(count):
        which = np.arange(count)
        batch = ow.Batch(0, which, 0 * which, (inputs[:count], targets[:count]))
        with torch.autocast("cpu", torch.bfloat16):
            sums = step.clipped_sum(batch)
        assert {one.dtype for one in sums.values()} <= {torch.float32, torch.float64}
        return tools.flat(sums)

    sums = [total(count) for count in range(1020, 1030)]
    moved = max(float((b - a).norm()) for a, b in pairwise(sums))
    assert moved <= plan.clip_norms[0] * (1 + 1e-3)
