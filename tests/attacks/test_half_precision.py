"""Half precision: no sum over records may pass through a type below float32 before the noise.

bfloat16 keeps 8 bits. A sum of 4,000 agreeing gradients that is rounded to it moves by many clip
norms at once, although each gradient has been clipped. The attack removes one record after another
from such a batch and looks for the largest step.
"""

import copy
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import Refused
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

RECORDS, REMOVALS = 4000, 12
OWNERS = ow.Owners(np.zeros(2 * RECORDS, dtype=int), {0: 4.0}, 1e-5)
HALF = torch.bfloat16


class Positions(nn.Module):
    """A table longer than the sequence: a slice of it is added to every record."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(0.1 * torch.randn(9, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head((x[:, None, :] + self.table[:4]).tanh().mean(1))


class Derived(nn.Module):
    """One matrix, turned into what the layer uses by a function of the parameter alone."""

    def __init__(self, derive, use=None, shape=(3, 6)):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(*shape))
        self.derive, self.use = derive, use or functional.linear

    def forward(self, x):
        return self.use(x.to(HALF), self.derive(self.weight))


class Adapter(nn.Module):
    """A product of two parameters, as in LoRA."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2))
        self.scale = scale

    def forward(self, x):
        return functional.linear(x, self.scale * (self.b @ self.a))


class Mixing(nn.Module):
    """softmax(w) @ x: a parameter on the left of the product."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 5)), nn.Linear(6, 3)

    def forward(self, x):
        tokens = x[:, None, :] * torch.linspace(0.5, 1.5, 5, dtype=x.dtype)[:, None]
        return self.head((functional.softmax(self.weight, dim=-1) @ tokens).mean(1))


class Turned(nn.Module):
    """x @ w.t(), and the same parameter once more through a slice."""

    def __init__(self, twice=False):
        super().__init__()
        self.weight, self.twice = nn.Parameter(0.3 * torch.randn(3, 6)), twice

    def forward(self, x):
        out = x @ self.weight.t()
        return out + x[:, :3] @ self.weight[:, :3].t() if self.twice else out


class Words(nn.Module):
    """A table that is cast before rows are looked up in it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(7, 6)), nn.Linear(6, 3)

    def forward(self, x):
        ids = (x[:, :2].abs() * 3).long().clamp(max=6)
        return self.head(functional.embedding(ids, self.table.to(HALF)).float().mean(1))


def normalised(weight):
    weight = weight.to(HALF)
    return weight / weight.norm(dim=1, keepdim=True)


def images(x, kernel):
    return functional.conv2d(x[:, :, None, None].expand(-1, -1, 4, 4), kernel).mean((2, 3))


# model, whether its parameters are bfloat16, whether it runs under autocast
CASES = {
    "position table": (Positions, True, False),
    "position table, autocast": (Positions, False, True),
    "cast weight": (lambda: Derived(lambda w: w.to(HALF)), False, False),
    "cast weight, by keyword": (lambda: Derived(lambda w: w.to(dtype=HALF)), False, False),
    "cast weight, by method": (lambda: Derived(lambda w: w.bfloat16()), False, False),
    "cast weight, by type": (lambda: Derived(lambda w: w.type(HALF)), False, False),
    "cast like a constant": (
        lambda: Derived(lambda w: w.to(torch.zeros(1, dtype=HALF))), False, False,
    ),
    "cast and back": (
        lambda: Derived(lambda w: w.half().float(), lambda x, w: x.float() @ w.t()), False, False,
    ),
    "normalised weight": (lambda: Derived(normalised), False, False),
    "softmax in half": (
        lambda: Derived(lambda w: functional.softmax(w, 1, dtype=HALF)), False, False,
    ),
    "cast kernel": (
        lambda: Derived(lambda w: w.to(HALF), images, (3, 6, 2, 2)), False, False,
    ),
    "adapter": (Adapter, True, False),
    "adapter, autocast": (Adapter, False, True),
    "scaled adapter, autocast": (lambda: Adapter(0.125), False, True),
    "softmax of a weight": (Mixing, True, False),
    "softmax of a weight, autocast": (Mixing, False, True),
    "transposed": (Turned, True, False),
    "transposed and sliced": (lambda: Turned(twice=True), True, False),
    "cast table": (Words, False, False),
    "linear": (lambda: nn.Linear(6, 3), True, False),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), True, False),
}  # fmt: skip


def agreeing(count=RECORDS):
    """Records that nearly agree, so that their sum is as long as it can be."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(1, 6, generator=generator) + 0.02 * torch.rand(
        count, 6, generator=generator
    )
    return inputs, torch.zeros(count, dtype=torch.long)


def built(name, clip_norm=1.0, hardened=False):
    make, half, autocast = CASES[name]
    torch.manual_seed(3)
    model = make().to(HALF) if half else make()
    plan = ow.plan(
        OWNERS, "uniform", steps=2, batch_size=RECORDS, clip_norm=clip_norm, hardened=hardened
    )
    loss = lambda out, y: functional.cross_entropy(out.float(), y, reduction="none")  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, plan, optimizer, loss, not_private=True)
    inputs, targets = agreeing()
    inputs = inputs.to(HALF) if half else inputs

    def total(chosen):
        batch = ow.Batch(0, chosen, 0 * chosen, (inputs[chosen], targets[chosen]))
        with torch.autocast("cpu", HALF) if autocast else nullcontext():
            return step.clipped_sum(batch)

    return model, step, total


@pytest.mark.parametrize("name", CASES)
def test_one_of_4000_records_moves_the_sum_by_its_clip_norm_alone(name):
    _, step, total = built(name)
    sums = [total(np.arange(RECORDS - removed)) for removed in range(REMOVALS)]
    assert {one.dtype for one in sums[0].values()} <= {torch.float32, torch.float64}
    flat = [tools.flat(one) for one in sums]
    moved = max(float((a - b).norm()) for a, b in pairwise(flat))
    assert moved <= float(step.plan.clip_norms[0]) * (1 + 1e-3)


class InDouble(torch.overrides.TorchFunctionMode):
    """Run a model with every cast to half precision, or to float32, turned into float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda v: torch.float64 if v in (HALF, torch.float16) else v  # noqa: E731
        kwargs = {name: wide(v) for name, v in (kwargs or {}).items()}
        if func in (torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float):
            return args[0].double()
        output = func(*map(wide, args), **kwargs)
        half = isinstance(output, torch.Tensor) and output.dtype == HALF
        return output.double() if half else output


@pytest.mark.parametrize("name", CASES)
def test_sums_agree_with_a_float64_loop_over_the_records(name):
    """The oracle: the same model in float64, one record at a time, through autograd."""
    half = CASES[name][1]
    model, step, total = built(name, clip_norm=1e-2)
    chosen = np.arange(40)
    sums = tools.flat(total(chosen))
    factors = step.peek.factors
    exact = copy.deepcopy(model).double()
    inputs, targets = agreeing()
    inputs = (inputs.to(HALF) if half else inputs).double()
    expected = 0
    for number in chosen:
        with InDouble():
            outputs = exact(inputs[number : number + 1])
        loss = functional.cross_entropy(outputs, targets[number : number + 1])
        gradients = torch.autograd.grad(loss, list(exact.parameters()))
        expected = expected + factors[number] * torch.cat([g.flatten() for g in gradients])
    assert float((sums - expected).norm()) <= 0.04 * float(expected.norm())


class Dropped(nn.Module):
    """A weight with random zeros: repeated, the call would draw other ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return functional.linear(x, functional.dropout(self.weight, 0.5))


class InPlace(nn.Module):
    """A half-precision copy of a weight that is changed in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return functional.linear(x.to(HALF), self.weight.to(HALF).mul_(2.0))


@pytest.mark.parametrize(
    ("make", "what"), [(Dropped, "gives a different result"), (InPlace, "changed in place")]
)
def test_what_cannot_be_repeated_in_single_precision_is_refused(make, what):
    torch.manual_seed(0)
    model = make().to(HALF) if make is Dropped else make()
    step = tools.make_step(model, functional.cross_entropy)
    inputs, targets = agreeing(12)
    batch = tools.batch_of(inputs.to(HALF), targets)
    with pytest.raises(Refused, match=what):
        step.clipped_sum(batch)
