"""Norms and gradients against Opacus 1.6, where both support the layer."""

import pytest
import torch
from record_loop import norms_of, run, wavy
from torch import nn

from ownerwise.gradients import Tape

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus' own


def compare(model, private, x):
    """``private`` is the model as Opacus needs it, with the same parameters in the same order."""
    sampled = opacus.GradSampleModule(private, loss_reduction="sum")
    wavy(sampled(x)).sum().backward()
    theirs = {
        p: q.grad_sample for p, q in zip(model.parameters(), private.parameters(), strict=True)
    }
    records = run(Tape(model), x)
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
        (lambda: [nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 1)], (4, 3, 5, 5)),
        (lambda: [nn.RMSNorm(5), nn.Linear(5, 3)], (4, 3, 5)),
    ],
    ids=["linear", "sequence", "conv1d", "conv2d", "conv3d", "layer", "instance", "rms"],
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


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_recurrent(name):
    from opacus import layers

    class Last(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.layer = kind(3, 4, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    model, private = Last(getattr(nn, name)), Last(getattr(layers, f"DP{name}"))
    private.layer.load_state_dict(model.layer.state_dict())
    x = torch.randn(4, 5, 3)
    sampled = opacus.GradSampleModule(private, loss_reduction="sum")
    wavy(sampled(x)).sum().backward()
    squares = [p.grad_sample.flatten(1).square().sum(dim=1) for p in private.parameters()]
    records = run(Tape(model), x)
    torch.testing.assert_close(records.norms, torch.stack(squares).sum(dim=0).sqrt())
