"""The oracle: one record at a time through autograd, and comparison of a tape with it.

Also how random cases are drawn: few, the same in every run, with batches of one record.
"""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ownerwise.gradients import PerRecordGradients, Segments, Tape

FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
COUNT = st.integers(1, 5)


class Model(nn.Module):
    """A model from a forward function and its parameters and modules."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
        self.run = forward

    def forward(self, *x):
        return self.run(self, *x)


def wavy(outputs: Tensor, _: Tensor | None = None) -> Tensor:
    """A loss per record in which every output counts, with its own weight."""
    flat = outputs.reshape(len(outputs), -1)
    ramp = torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype)
    return ((flat + 0.1).sin() * ramp).sum(dim=1)


def loop(model: nn.Module, x: Tensor, loss=wavy) -> dict[nn.Parameter, Tensor]:
    """{parameter: [B, *shape]} by a plain loop over single records."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        value = loss(model(x[i : i + 1])).sum()
        back = torch.autograd.grad(value, parameters, allow_unused=True)
        pairs = zip(parameters, back, strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in pairs])
    return {p: torch.stack([row[k] for row in rows]) for k, p in enumerate(parameters)}


def run(tape: Tape, x: Tensor, loss=wavy, segments: Segments | None = None) -> PerRecordGradients:
    with tape:
        outputs = tape.model(x)
    return tape.backward(loss(outputs), segments)


def segments_of(*sizes: int) -> Segments:
    """Segments with these numbers of rows."""
    return Segments(torch.tensor(sizes))


def averaged(gradients: dict[nn.Parameter, Tensor], sizes) -> dict[nn.Parameter, Tensor]:
    """The gradients of segments: the means over their rows."""
    return {
        p: torch.stack([part.mean(dim=0) for part in g.split(list(sizes))])
        for p, g in gradients.items()
    }


def some_sizes(rows: int) -> list[int]:
    """Ragged sizes that add up to a number of rows: 2, 1, 3, 1, 4, ..., and what is left."""
    sizes = []
    while rows:
        sizes.append(min(rows, 1 if len(sizes) % 2 else 2 + len(sizes) // 2))
        rows -= sizes[-1]
    return sizes


def norms_of(gradients: dict[nn.Parameter, Tensor]) -> Tensor:
    total = sum(g.reshape(len(g), -1).square().sum(dim=1) for g in gradients.values())
    assert isinstance(total, Tensor)
    return total.sqrt()


def assert_equal(
    records: PerRecordGradients, expected: dict[nn.Parameter, Tensor], tolerance=1e-9
) -> None:
    norms = norms_of(expected)
    scale = float(norms.max()) if len(norms) else 1.0
    near = {"rtol": tolerance, "atol": tolerance * max(scale, 1e-3)}
    torch.testing.assert_close(records.norms, norms, **near)
    factors = (0.5 / norms.clamp_min(1e-12)).clamp_max(1)
    sums = records.weighted_sum(factors)
    assert set(sums) == set(expected)
    near["atol"] = max(near["atol"], tolerance)
    for parameter, gradients in expected.items():
        total = torch.tensordot(factors, gradients, dims=1)
        torch.testing.assert_close(sums[parameter], total, **near)
    for parameter, formed in records.per_record().items():
        torch.testing.assert_close(formed, expected[parameter], **near)


def assert_matches_loop(model: nn.Module, x: Tensor, loss=wavy, **options) -> None:
    """Norms, clipped sums and gradients as the loop has them, in every memory mode, twice.

    Then the same for segments of rows, as for an owner with several records.
    """
    expected = loop(model, x, loss)
    for mode in ({}, {"lean": True}):
        tape = Tape(model, **mode, **options)
        for _ in range(2):  # the second time with the layouts known
            assert_equal(run(tape, x, loss), expected)
        for sizes in (some_sizes(len(x)), [len(x)]) if len(x) else ():
            records = run(tape, x, loss, segments_of(*sizes))
            assert_equal(records, averaged(expected, sizes))
