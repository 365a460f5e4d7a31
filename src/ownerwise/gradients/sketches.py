"""Random projections of per-record gradients, by which two passes can be compared.

A sketch is a linear function of a record's gradient: inner products with a few random matrices,
divided by the square root of their number, so that it is about as long as the gradient. If a
gradient changes, so does its sketch, by about as much, with probability nearly one. The matrices
are outer products of two random vectors, so an outer product's sketch follows from those of its
factors, and a use of a parameter can be forgotten once its sketch has been added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ownerwise.gradients.contributions import Contribution, sketch_of
from ownerwise.gradients.taps import Tap, Use

__all__ = ["SKETCHES", "Sketcher"]

SKETCHES = 8
"""How many numbers a sketch has."""
_AT_ONCE = 1 << 22  # numbers in the gradients that are formed at once


class Sketcher:
    """Adds up the sketches of all uses of parameters as the backward pass delivers them.

    Args:
        parameters: the trainable parameters; parameters with the same place in this list have the
            same random matrices in every sketcher.
        count: number of records.
    """

    def __init__(self, parameters: list[nn.Parameter], count: int) -> None:
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._count = count
        self._total = torch.zeros(count, SKETCHES, dtype=torch.float64)
        self._derived: list[Use] = []

    def arrive(self, tap: Tap, gradient: Tensor) -> None:
        """Add the sketches of the uses that a tapped output's gradient stands for."""
        if tap.layout is None:
            return
        for tracked, contribution in tap.build(gradient, tap.layout, self._count):
            if tracked.is_root:
                self._add(tracked.roots[0], contribution)
            else:
                self._derived.append((tracked, contribution))

    def finish(self) -> Tensor:
        """Return the sketches, float64 `[count, SKETCHES]`, on the CPU."""
        for tracked, contribution in self._derived:
            size = max(tracked.tensor.numel(), *(root.numel() for root in tracked.roots))
            step = max(1, _AT_ONCE // max(1, size))
            for start in range(0, self._count, step):
                stop = min(start + step, self._count)
                formed = contribution.per_record(start, stop)
                parts = tracked.pull_back(formed, True)
                for root, part in zip(tracked.roots, parts, strict=True):
                    if part is not None:
                        vectors = self._vectors(root)
                        self._total[start:stop] += sketch_of(part, *vectors).double().cpu()
        return self._total / SKETCHES**0.5

    def _add(self, root: nn.Parameter, contribution: Contribution) -> None:
        self._total += contribution.sketch(*self._vectors(root)).double().cpu()

    def _vectors(self, root: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return the random vectors of a parameter: `[SKETCHES, rows]`, `[SKETCHES, columns]`."""
        rows = root.shape[0] if root.dim() else 1
        columns = root.numel() // max(1, rows)
        numbers = torch.Generator().manual_seed(self._places[root])
        left = torch.randn(SKETCHES, rows, generator=numbers)
        right = torch.randn(SKETCHES, columns, generator=numbers)
        return left, (torch.ones_like(right) if columns == 1 else right)
