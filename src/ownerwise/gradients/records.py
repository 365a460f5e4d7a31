"""Norms and weighted sums over all parameters, from the contributions of every use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ownerwise.gradients.contributions import (
    Contribution,
    Policy,
    accumulation_dtype,
)
from ownerwise.gradients.ghost import shared_ghost_norms
from ownerwise.gradients.precision import full_precision
from ownerwise.gradients.sources import Source

if TYPE_CHECKING:
    from ownerwise.gradients.taps import Tap

__all__ = ["Collector", "Records"]

# Terms of a record that are longer than this many times their sum would, in the sum over the batch,
# take digits from the other records: such a record is summed by itself.
CANCELLING = 1e3


class Records:
    """The per-record gradients of one batch, as norms and sums.

    Attributes:
        norms: ``[B]`` L2 norm of each record's gradient over all trainable parameters, float32 or
            better. A record whose gradient is not finite has a non-finite norm here and
            contributes exactly zero to every sum, whatever its factor.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        contributions: list[tuple[Source, Contribution]],
        norms: Tensor,
        most: Tensor | None = None,
    ) -> None:
        self._parameters = parameters
        self._contributions = contributions
        self.norms = norms
        self._apart: list[int] = []  # records whose terms cancel
        if most is not None:
            cancelling = torch.isfinite(norms) & (most > CANCELLING * norms)
            self._apart = cancelling.nonzero().flatten().tolist() if cancelling.any() else []
        for number in self._apart:
            formed = form(contributions, number, number + 1).values()
            norms[number] = torch.stack([torch.linalg.vector_norm(g) for g in formed]).norm()
        if not math.isfinite(float(norms.sum())):  # one call in the common case
            bad = ~torch.isfinite(norms)
            for _, contribution in contributions:
                contribution.drop(bad)

    def __len__(self) -> int:
        return len(self.norms)

    def weighted_sum(self, factors: Tensor) -> dict[nn.Parameter, Tensor]:
        """``{parameter: sum_i factors[i] * g_i}`` for all trainable parameters.

        Args:
            factors: ``[B]``, finite.
        """
        if factors.shape != self.norms.shape:
            raise ValueError(
                f"one factor per record expected, shape {list(self.norms.shape)}; "
                f"got {list(factors.shape)}"
            )
        with full_precision(self.norms.device):
            return self._weighted_sum(factors.detach())

    def _weighted_sum(self, factors: Tensor) -> dict[nn.Parameter, Tensor]:
        sums: dict[int, Tensor] = {}
        alone = [(number, float(factors[number])) for number in self._apart]
        if alone:
            factors = factors.clone()
            factors[self._apart] = 0
        parts = (
            (source, contribution.weighted_sum(factors.to(accumulation_dtype(source.value.dtype))))
            for source, contribution in self._contributions
        )
        add_to_roots(sums, parts, per_record=False)
        for number, factor in alone:
            for root, formed in form(self._contributions, number, number + 1).items():
                add_to(sums, root, factor * formed[0])
        result = {}
        for parameter in self._parameters:
            total = sums.get(id(parameter))
            if total is None:
                dtype = accumulation_dtype(parameter.dtype)
                total = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            result[parameter] = total
        return result

    def per_record(self, start: int = 0, stop: int | None = None) -> dict[nn.Parameter, Tensor]:
        """``{parameter: [records, *shape]}``: the gradients themselves. For tests and research."""
        stop = len(self) if stop is None else stop
        formed = form(self._contributions, start, stop)
        return {
            p: formed.get(
                id(p),
                torch.zeros(
                    stop - start, *p.shape, dtype=accumulation_dtype(p.dtype), device=p.device
                ),
            )
            for p in self._parameters
        }


class Collector:
    """Takes contributions as the backward pass delivers them."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        uses: dict[int, list[Source]],
        count: int,
        policy: Policy,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.count = count
        self.policy = policy
        self.device = device
        # Norms of a parameter can be taken use by use only if no two uses touch the same entry.
        self.separate = {root for root, used in uses.items() if len(used) == 1}
        self.done: list[tuple[Source, Contribution]] = []
        self.later: list[tuple[Source, Contribution]] = []
        self.squares: list[Tensor] = []
        self.most: list[Tensor] = []

    def arrive(self, tap: Tap, gradient: Tensor) -> None:
        """Turn the gradient of a tapped output into contributions."""
        if tap.layout is None:  # only in a trial run, where the problem is on the list
            return
        for source, contribution in tap.build(gradient, tap.layout, self.count):
            if not source.isometric or id(source.roots[0]) not in self.separate:
                self.later.append((source, contribution))
                continue
            self.done.append((source, contribution))
            self.squares.append(contribution.squared_norms())
            most = contribution.most()
            if most is not None:
                self.most.append(most)

    def finish(self) -> Records:
        """All norms."""
        dtypes = {accumulation_dtype(p.dtype) for p in self.parameters}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        if self.later:
            self.squares.extend(shared_norms(self.later, self.count, self.policy))
            for _, contribution in self.later:  # uses may cancel each other
                most = contribution.most()
                self.most.append(contribution.squared_norms().sqrt() if most is None else most)
        if len(self.squares) == 1:
            total = self.squares[0].to(dtype)
        elif self.squares:
            total = torch.stack([square.to(dtype) for square in self.squares]).sum(dim=0)
        else:
            total = torch.zeros(self.count, dtype=dtype, device=self.device)
        most = torch.stack([one.to(dtype) for one in self.most]).sum(dim=0) if self.most else None
        return Records(self.parameters, self.done + self.later, total.sqrt_(), most)


def shared_norms(
    contributions: list[tuple[Source, Contribution]], count: int, policy: Policy
) -> Iterable[Tensor]:
    """Squared norms of parameters with several uses: of the SUM of the uses."""
    rest = []
    by_root: dict[int, list[tuple[Source, Contribution]]] = {}
    for source, contribution in contributions:
        key = id(source.tensor) if source.is_root else 0
        by_root.setdefault(key, []).append((source, contribution))
    derived_roots = {id(r) for source, _ in by_root.get(0, []) for r in source.roots}
    for key, group in by_root.items():
        squares = None
        if key and key not in derived_roots:
            squares = shared_ghost_norms([contribution for _, contribution in group], policy)
        if squares is None:
            rest.extend(group)
        else:
            yield squares
    if not rest:
        return
    roots = {id(root): root for source, _ in rest for root in source.roots}
    per_record = 4 * sum(root.numel() for root in roots.values())
    step = max(1, (policy.chunk_bytes * 8) // max(1, per_record))
    norm = torch.linalg.vector_norm
    parts = []
    for start in range(0, count, step):
        formed = form(rest, start, min(start + step, count))
        squares = [norm(g.reshape(len(g), -1), dim=1).square_() for g in formed.values()]
        parts.append(torch.stack(squares).sum(dim=0))
    yield torch.cat(parts)


def form(
    contributions: list[tuple[Source, Contribution]], start: int, stop: int
) -> dict[int, Tensor]:
    """Per-record gradients of the roots, ``{id(root): [stop - start, *shape]}``."""
    roots: dict[int, Tensor] = {}
    parts = (
        (source, contribution.per_record(start, stop)) for source, contribution in contributions
    )
    add_to_roots(roots, parts, per_record=True)
    return roots


def add_to_roots(
    sums: dict[int, Tensor], parts: Iterable[tuple[Source, Tensor]], *, per_record: bool
) -> None:
    """Add the parts of sources to their roots; a derived one goes back once, with all its parts."""
    derived: dict[int, tuple[Source, Tensor]] = {}
    for source, part in parts:
        if source.is_root:
            add_to(sums, id(source.tensor), part)
        else:
            earlier = derived.get(id(source))
            derived[id(source)] = (source, part if earlier is None else earlier[1] + part)
    for source, part in derived.values():
        for root, back in zip(source.roots, source.pull_back(part, per_record), strict=True):
            if back is not None:
                add_to(sums, id(root), back.to(accumulation_dtype(back.dtype)))


def add_to(sums: dict[int, Tensor], key: int, part: Tensor) -> None:
    """Add ``part`` to the entry, without changing tensors that others may hold."""
    earlier = sums.get(key)
    sums[key] = part if earlier is None else earlier + part
