"""Norms and gradients against Opacus 1.6, where both support the layer."""

import pytest
import torch
from torch import nn

from ownerwise.gradients import Tape
from tools.record_loop import norms_of, run, wavy

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus' own


def in_order(private):
    return [parameter.grad_sample for parameter in private.parameters()]


def compare(model, private, x, gradients=in_order, loss=wavy, **options):
    """``private`` is the model as Opacus needs it, with the same values of the parameters.

    ``gradients`` gives what Opacus found in the order of the parameters of ``model``.
    """
    sampled = opacus.GradSampleModule(private, loss_reduction="sum", **options)
    loss(sampled(x)).sum().backward()
    theirs = dict(zip(model.parameters(), gradients(private), strict=True))
    records = run(Tape(model), x, loss)
    torch.testing.assert_close(records.norms, norms_of(theirs), rtol=1e-9, atol=1e-12)
    ours = records.per_record()
    for parameter, gradients in theirs.items():
        torch.testing.assert_close(ours[parameter], gradients, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (lambda: [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)], (6, 5)),
        (lambda: [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)], (6, 7, 5)),
        (
            lambda: [nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.Tanh(), nn.GroupNorm(2, 6)],
            (5, 4, 9),
        ),
        (lambda: [nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv2d(6, 3, 2)], (5, 4, 7, 7)),
        (lambda: [nn.Conv3d(2, 3, 2, padding=1), nn.Tanh()], (4, 2, 4, 4, 4)),
        (lambda: [nn.LayerNorm(5), nn.Linear(5, 3)], (4, 3, 5)),
        (lambda: [nn.LayerNorm([3, 5]), nn.Tanh(), nn.LayerNorm(5)], (4, 2, 3, 5)),
        (lambda: [nn.GroupNorm(2, 6), nn.Tanh(), nn.GroupNorm(3, 6)], (4, 6)),
        (lambda: [nn.GroupNorm(1, 6), nn.Tanh(), nn.GroupNorm(6, 6)], (4, 6, 3, 4)),
        (lambda: [nn.InstanceNorm1d(3, affine=True), nn.Conv1d(3, 2, 1)], (4, 3, 5)),
        (lambda: [nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 1)], (4, 3, 5, 5)),
        (lambda: [nn.InstanceNorm3d(3, affine=True), nn.Conv3d(3, 2, 1)], (4, 3, 2, 3, 4)),
        (lambda: [nn.RMSNorm(5), nn.Linear(5, 3)], (4, 3, 5)),
        (lambda: [nn.RMSNorm([3, 5]), nn.Tanh(), nn.RMSNorm(5, eps=1e-3)], (4, 2, 3, 5)),
    ],
    ids=[
        *("linear", "sequence", "conv1d", "conv2d", "conv3d", "layer", "layer of two dimensions"),
        *("group of vectors", "group", "instance1d", "instance2d", "instance3d", "rms"),
        "rms of two dimensions",
    ],
)
def test_layers(layers, shape):
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    torch.manual_seed(0)
    private = nn.Sequential(*layers())
    compare(model, private, torch.randn(shape))


def test_embedding():
    """Without padding: Opacus gives padding rows a gradient, torch (and the tape) do not."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 2))
    private = nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 2))
    private.load_state_dict(model.state_dict())
    compare(model, private, torch.randint(0, 7, (5, 6)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(3, 4, **options)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_recurrent(name, both_ways, bias):
    options = {"num_layers": 2, "bidirectional": both_ways, "bias": bias, "batch_first": True}
    model = Recurrent(getattr(nn, name), **options)
    private = Recurrent(getattr(opacus.layers, f"DP{name}"), **options)
    private.layer.load_state_dict(model.layer.state_dict())

    def gradients(private):  # by the names of torch, in another order
        found = {path: p.grad_sample for path, p in private.layer.named_parameters()}
        return [found[path] for path, _ in model.layer.named_parameters()]

    compare(model, private, torch.randn(4, 5, 3), gradients)


class Attending(nn.Module):
    """``[time, records, features]``: Opacus 1.6 mixes heads and time if records come first."""

    def __init__(self, kind, heads, masked, **options):
        super().__init__()
        self.layer = kind(6, heads, **options)
        self.masked = masked

    def forward(self, x):
        length, count, _ = x.shape
        padding = mask = None
        if self.masked:
            padding = torch.zeros(count, length, dtype=torch.bool)
            padding[::2, -1] = True
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        key, value = (x[..., : getattr(self.layer, name)].cos() for name in ("kdim", "vdim"))
        return self.layer(x, key, value, padding, attn_mask=mask)[0]


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "open"])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"bias": False}),
        (2, {"kdim": 4, "vdim": 5}),
        (2, {"add_bias_kv": True, "add_zero_attn": True}),
    ],
    ids=["one head", "three heads", "no bias", "other widths", "extra keys"],
)
def test_attention(heads, options, masked):
    model = Attending(nn.MultiheadAttention, heads, masked, **options)
    private = Attending(opacus.layers.DPMultiheadAttention, heads, masked, **options)
    private.layer.load_state_dict(dict(model.layer.state_dict()))

    def gradients(private):
        found = {path: p.grad_sample for path, p in private.layer.named_parameters()}
        for kind in ("weight", "bias") if "kdim" not in options else ("bias",):
            parts = [found.pop(f"{part}linear.{kind}", None) for part in "qkv"]
            if parts[0] is not None:
                found[f"in_proj_{kind}"] = torch.cat(parts, dim=1)
        for part in "qkv":
            found[f"{part}_proj_weight"] = found.get(f"{part}linear.weight")
        for part in "kv":
            found[f"bias_{part}"] = found.get(f"seq_bias_{part}.bias")
        wanted = dict(model.layer.named_parameters())
        return [found[path].reshape(-1, *parameter.shape) for path, parameter in wanted.items()]

    x = torch.randn(5, 4, 6)
    compare(model, private, x, gradients, lambda y: wavy(y.transpose(0, 1)), batch_first=False)
