"""Products by oneDNN: the same numbers as torch's own, in half the time on some processors."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from ownerwise.gradients import Tape, products
from ownerwise.gradients.products import Linear, Tanh
from ownerwise.torch_internals import onednn_linear

ROUNDOFF = 2.0**-24
PATHS = [
    pytest.param(
        True,
        id="oneDNN",
        marks=pytest.mark.skipif(onednn_linear is None, reason="torch was built without oneDNN"),
    ),
    pytest.param(False, id="torch"),
]


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


class Calls(list):
    """OneDNN's product, and what was asked of it."""

    def __call__(self, *args):
        self.append(args[3])
        return onednn_linear(*args)

    def binary(self, *args):
        self.append(args[4])
        return onednn_linear.binary(*args)


@pytest.fixture(params=PATHS)
def calls(request, monkeypatch):
    """Whether products run in oneDNN, and the calls; the processor of the test does not matter."""
    calls = Calls()
    monkeypatch.setattr(products, "_onednn", lambda: calls if request.param else None)
    calls.possible = request.param
    return calls


@pytest.mark.parametrize(
    ("processor", "fast"),
    [
        ({"avx512_f": True, "cpu_name": "AMD EPYC 9755 128-Core Processor"}, True),
        ({"avx512_f": True, "cpu_name": "Intel(R) Xeon(R) Platinum 8480+"}, False),
        ({"avx512_f": False, "cpu_name": "AMD EPYC 7763 64-Core Processor"}, False),
        ({"avx512_f": True}, False),
        ({}, False),
    ],
)
def test_the_processor_decides(processor, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    products._onednn.cache_clear()
    try:
        usable = torch.backends.mkl.is_available() and onednn_linear is not None
        assert (products._onednn() is not None) == (fast and usable)
    finally:
        products._onednn.cache_clear()


def close(found, exact, terms):
    """Compare with a float64 result, within the rounding errors of sums of so many terms."""
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert (found - exact).abs().max() <= 4 * terms**0.5 * ROUNDOFF * exact.abs().max().clamp(1)


def layouts(matrix):
    """Return the same matrix, contiguous, transposed and with gaps."""
    wide = torch.zeros(len(matrix), matrix.shape[1] + 3)
    wide[:, 1:-2] = matrix
    return [matrix, matrix.t().contiguous().t(), wide[:, 1:-2]]


@pytest.mark.parametrize("sizes", [(200, 80, 96), (64, 1500, 40), (1, 4000, 300)])
def test_product(sizes, calls):
    height, terms, width = sizes
    first, second, plus = (
        torch.randn(*shape) for shape in ((height, terms), (terms, width), (height, width))
    )
    exact = first.double() @ second.double()
    for left in layouts(first):
        for right in layouts(second):
            close(products.product(left, right), exact, terms)
            close(products.product(left, right, plus), exact + plus, terms)
    assert bool(calls) == calls.possible
    before = len(calls)
    products.product(first[:, :8], second[:8])
    products.product(first.double(), second.double())
    products.product(first.bfloat16(), second.bfloat16())
    gradient = torch.autograd.grad(products.product(first.requires_grad_(), second).sum(), first)
    assert torch.allclose(gradient[0], second.sum(1).expand_as(first), atol=1e-3)
    assert len(calls) == before


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_many(transposed, out, calls):
    left, right = torch.randn(3, 140, 200), torch.randn(3, 200, 100)
    if transposed:
        left, right = left.mT.contiguous().mT, right.transpose(0, 1).contiguous().transpose(0, 1)
    into = torch.empty(3, 140, 100) if out else None
    found = products.products(left, right, into)
    assert into is None or found is into
    close(found, torch.bmm(left.double(), right.double()), 200)
    assert len(calls) == (3 if calls.possible else 0)
    close(products.products(left[:, :9], right), torch.bmm(left[:, :9].double(), right.double()), 9)
    assert products.products(left[:0], right[:0]).shape == (0, 140, 100)
    assert len(calls) == (3 if calls.possible else 0)


@pytest.mark.parametrize("then", ["none", "sigmoid", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_affine(bias, then, calls):
    x, weight = torch.randn(120, 100), torch.randn(110, 100) / 10
    offset = torch.randn(110) if bias else None
    exact = functional.linear(x.double(), weight.double(), None if not bias else offset.double())
    if then != "none":
        exact = getattr(torch, then)(exact)
    close(products.affine(x, weight, offset, then), exact, 100)
    assert calls == ([then] if calls.possible else [])


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_tanh_is_exact_for_numbers_of_any_size(format, calls):
    x = torch.cat([torch.logspace(-38, 38, 150_000), torch.tensor([0.0, torch.inf, torch.nan])])
    x = torch.cat([x, -x, torch.zeros(26)]).view(2, 4, 4, -1).contiguous(memory_format=format)
    found, exact = products.tanh(x), x.double().tanh()
    assert found.is_contiguous(memory_format=format)
    assert torch.equal(found.isnan(), exact.isnan())
    error = (found - exact).abs() / exact.abs().clamp(min=torch.finfo(torch.float32).tiny)
    assert error.nan_to_num().max() <= 2e-7
    assert torch.equal(products.tanh(x[:, 1:3]), torch.tanh(x[:, 1:3]))  # with gaps: torch's own


@pytest.mark.parametrize("kind", [Linear, Tanh])
def test_gradients_and_their_gradients(kind, calls):
    """A loss may contain gradients: the backward pass has derivatives, too."""
    weight, bias = torch.randn(256, 64) / 8, torch.randn(256)
    layer = (lambda x: Linear.of(x, weight, bias)) if kind is Linear else Tanh.of
    plain = (lambda x: functional.linear(x, weight, bias)) if kind is Linear else torch.tanh
    x = torch.randn(6, 70, 64, requires_grad=True)
    found, exact = layer(x), plain(x)
    if calls.possible:
        assert (
            f"{kind.__name__}Backward" in str(found.grad_fn.next_functions) + found.grad_fn.name()
        )
    if kind is Linear:
        found.mul_(1)  # its output may be changed in place
    for outputs in (found, exact):
        (first,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        if outputs is found:
            results = first, second
        else:
            assert torch.allclose(results[0], first, rtol=1e-5, atol=1e-4)
            assert torch.allclose(results[1], second, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's forward mode
@pytest.mark.parametrize("kind", [Linear, Tanh])
def test_other_ways_to_differentiate(kind, calls):
    """As in networks that solve differential equations, whose outputs are derivatives."""
    weight = torch.randn(256, 256) / 16
    layer = (lambda x: Linear.of(x, weight)) if kind is Linear else Tanh.of
    plain = (lambda x: functional.linear(x, weight)) if kind is Linear else torch.tanh
    x, along = torch.randn(2, 3, 70, 256)

    def forward_mode(layer):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along))).tangent.clone()

    for derive in (
        forward_mode,
        lambda layer: torch.func.jvp(layer, (x,), (along,))[1],
        lambda layer: torch.func.grad(lambda x: layer(x).square().sum())(x),
        lambda layer: torch.vmap(layer)(x),
    ):
        assert torch.allclose(derive(layer), derive(plain), rtol=1e-4, atol=1e-5)
    before = len(calls)
    layer(x)
    assert (len(calls) > before) == (calls.possible and kind is Linear)


def test_a_weight_that_data_made_keeps_its_gradient(calls):
    """A bias is a parameter, and the matrix depends on data: its gradient must not get lost."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 300)
            self.offset = nn.Parameter(torch.zeros(300))

        def forward(self, x):
            matrix = self.first(x)[0].expand(300, 300)
            return functional.linear(torch.ones(1, 60, 300), matrix, self.offset).sum(1)

    model = Hyper()
    tape = Tape(model)
    x = torch.randn(1, 8)
    with tape:
        outputs = model(x)
    found = tape.backward(outputs.square().sum(1)).weighted_sum(torch.ones(1))
    model(x).square().sum().backward()
    for parameter in model.parameters():
        assert torch.allclose(found[parameter].float(), parameter.grad, rtol=1e-4)


def test_rows_do_not_depend_on_other_rows(calls):
    """Hardened plans rely on it: without a record, the others' outputs keep every bit."""
    x, weight, bias = torch.randn(300, 128), torch.randn(160, 128), torch.randn(160)
    other = x.clone()
    other[7] = 0
    kept = torch.arange(300) != 7
    for then in ("none", "sigmoid", "tanh"):
        pair = [products.affine(rows, weight, bias, then)[kept] for rows in (x, other)]
        assert torch.equal(*pair)
    assert torch.equal(*[products.product(rows, weight.t())[kept] for rows in (x, other)])
    assert torch.equal(*[products.tanh(rows)[kept] for rows in (x, other)])


def test_long_sums_are_as_exact_as_blocks_of_64(calls):
    """What the slack of a step assumes of one kernel call: see contributions/blocks.py."""
    for left in (torch.rand(5120, 200), torch.randn(5120, 200), torch.ones(5120, 200) / 3):
        right = torch.rand(5120, 130)
        found = products.product(left.t(), right)
        exact = left.t().double() @ right.double()
        largest = left.t().abs().double() @ right.abs().double()
        assert ((found - exact).abs() / largest).max() <= 64 * ROUNDOFF
    assert bool(calls) == calls.possible


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(40, 64, batch_first=True, bidirectional=True)
        self.norm = nn.Linear(128, 128)
        self.head = nn.Linear(128, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.lstm(x)[0])).mean(1))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(8, 32, 3, padding=1), nn.Tanh()),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        )
        self.head = nn.Linear(32 * 64, 3)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


@pytest.mark.parametrize("make", [Words, Images])
def test_gradients_of_whole_models(make, calls):
    """Against plain backward passes in float64, one record at a time."""
    model = make()
    count = 48
    x = torch.randn(count, 6, 40) if make is Words else torch.randn(count, 8, 16, 16)
    targets = torch.randint(0, 3, (count,))
    tape = Tape(model)
    with tape:
        outputs = model(x)
    records = tape.backward(functional.cross_entropy(outputs, targets, reduction="none"))
    weights = torch.linspace(0.5, 1.5, count)
    total = records.weighted_sum(weights)
    assert bool(calls) == calls.possible
    exact = copy.deepcopy(model).double()
    sums = [torch.zeros_like(parameter) for parameter in exact.parameters()]
    for index in range(count):
        row = slice(index, index + 1)
        loss = functional.cross_entropy(exact(x[row].double()), targets[row])
        gradients = torch.autograd.grad(loss, list(exact.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert records.norms[index].double() == pytest.approx(norm.item(), rel=2e-5)
        for whole, gradient in zip(sums, gradients, strict=True):
            whole += weights[index] * gradient
    for parameter, whole in zip(model.parameters(), sums, strict=True):
        error = (total[parameter].double() - whole).norm() / whole.norm()
        assert error < 2e-5
