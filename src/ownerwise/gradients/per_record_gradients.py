"""Norms and weighted sums over all parameters, combined from every use of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ownerwise.gradients.contributions import BLOCK, Contribution, shared_ghost_norms
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import accumulation_dtype, full_precision, row_norms
from ownerwise.gradients.taps import Tap
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["Collector", "PerRecordGradients"]

# If a record's terms are this many times longer than their sum, adding them to the sum over the
# batch would cost the other records precision, so the record is summed separately.
CANCELLING = 1e3


class PerRecordGradients:
    """The per-record gradients of one batch, available as norms and sums.

    Attributes:
        norms: the L2 norm, ``[B]``, of each record's gradient over all trainable parameters,
            float32 or better. A record whose gradient is not finite has a non-finite norm here and
            contributes exactly zero to every sum, whatever its factor.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        contributions: list[tuple[TrackedParameter, Contribution]],
        norms: Tensor,
        most: Tensor | None = None,
        chunk_bytes: int = 3 << 20,
    ) -> None:
        self._parameters = parameters
        self._contributions = contributions
        self._chunk_bytes = chunk_bytes
        self.norms = norms
        self._apart: list[int] = []  # records whose terms cancel
        if most is not None:
            cancelling = torch.isfinite(norms) & (most > CANCELLING * norms)
            self._apart = cancelling.nonzero().flatten().tolist() if cancelling.any() else []
        for number in self._apart:
            formed = form(contributions, number, number + 1).values()
            norms[number] = torch.cat([row_norms(g.reshape(1, -1)) for g in formed]).norm()
        if not math.isfinite(float(norms.sum())):  # a single call in the common case
            bad = ~torch.isfinite(norms)
            for _, contribution in contributions:
                contribution.drop(bad)

    def __len__(self) -> int:
        return len(self.norms)

    def weighted_sum(
        self, factors: Tensor, *, in_blocks: bool = True
    ) -> dict[nn.Parameter, Tensor]:
        """Return ``{parameter: sum_i factors[i] * g_i}`` for all trainable parameters.

        Args:
            factors: one finite factor per record, ``[B]``.
            in_blocks: whether to sum blocks of records and add these sums in float64, which bounds
                the rounding error (:mod:`contributions.blocks`) and takes a little longer.
        """
        if factors.shape != self.norms.shape:
            raise ValueError(
                f"expected one factor per record, shape {list(self.norms.shape)}; "
                f"got {list(factors.shape)}"
            )
        with full_precision(self.norms.device):
            return self._weighted_sum(factors.detach(), in_blocks)

    def _weighted_sum(self, factors: Tensor, in_blocks: bool) -> dict[nn.Parameter, Tensor]:
        sums: dict[int, Tensor] = {}
        derived = {
            id(root): root
            for tracked, _ in self._contributions
            if not tracked.isometric
            for root in tracked.roots
        }
        alone = [(number, float(factors[number])) for number in self._apart]
        if alone:
            factors = factors.clone()
            factors[self._apart] = 0
        parts = (
            (
                tracked,
                contribution.weighted_sum(
                    factors.to(accumulation_dtype(tracked.value.dtype)), in_blocks=in_blocks
                ),
            )
            for tracked, contribution in self._contributions
            if not _through(tracked, derived)
        )
        add_to_roots(sums, parts, per_record=False)
        self._add_derived(sums, derived, factors)
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

    def _add_derived(
        self, sums: dict[int, Tensor], roots: dict[int, nn.Parameter], factors: Tensor
    ) -> None:
        """Add the sums for parameters from which the model derives other tensors.

        A derivation such as w - w.mean() may cancel almost all of a gradient. If the gradients were
        summed over the batch first, the rounding error of the sum could be far larger than a clip
        norm. Each record's gradient is therefore propagated to the parameters before summation, as
        it was for the norm.
        """
        group = [(t, c) for t, c in self._contributions if _through(t, roots)]
        if not group:
            return
        step = min(BLOCK, _records_at_once(roots, self._chunk_bytes))
        for start in range(0, len(self), step):
            part = factors[start : start + step]
            for root, formed in form(group, start, start + len(part)).items():
                total = part.to(formed.dtype) @ formed.reshape(len(part), -1)
                add_to(sums, root, total.double().reshape(formed.shape[1:]))

    def per_record(self, start: int = 0, stop: int | None = None) -> dict[nn.Parameter, Tensor]:
        """Return the gradients themselves, ``{parameter: [records, *shape]}``, for research."""
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
    """Collects contributions as the backward pass delivers them."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        uses: dict[int, list[TrackedParameter]],
        count: int,
        budget: MemoryBudget,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.count = count
        self.budget = budget
        self.device = device
        # A parameter's gradient norms can be taken right away only if it has a single use.
        self.separate = {root for root, used in uses.items() if len(used) == 1}
        self.done: list[tuple[TrackedParameter, Contribution]] = []
        self.later: list[tuple[TrackedParameter, Contribution]] = []
        self.squares: list[Tensor] = []
        self.most: list[Tensor] = []

    def arrive(self, tap: Tap, gradient: Tensor) -> None:
        """Turn the gradient of a tapped output into contributions."""
        if tap.layout is None:  # only in a trial run, which has already listed the problem
            return
        for tracked, contribution in tap.build(gradient, tap.layout, self.count):
            if not tracked.isometric or id(tracked.roots[0]) not in self.separate:
                self.later.append((tracked, contribution))
                continue
            self.done.append((tracked, contribution))
            self.squares.append(contribution.squared_norms())
            most = contribution.most()
            if most is not None:
                self.most.append(most)

    def finish(self) -> PerRecordGradients:
        """Return the gradients with all their norms."""
        dtypes = {accumulation_dtype(p.dtype) for p in self.parameters}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        if self.later:
            self.squares.extend(shared_norms(self.later, self.count, self.budget))
            for _, contribution in self.later:  # uses may cancel each other
                most = contribution.most()
                self.most.append(contribution.squared_norms().sqrt() if most is None else most)
        if len(self.squares) == 1:
            total = self.squares[0].to(dtype)
        elif self.squares:
            total = torch.stack([square.to(dtype) for square in self.squares]).sum(dim=0)
        else:
            total = torch.zeros(self.count, dtype=dtype, device=self.device)
        most = torch.stack([m.to(dtype) for m in self.most]).sum(dim=0) if self.most else None
        return PerRecordGradients(
            self.parameters, self.done + self.later, total.sqrt_(), most, self.budget.chunk_bytes
        )


def _through(tracked: TrackedParameter, roots: Mapping[int, nn.Parameter]) -> bool:
    """Return whether a used tensor is one of these parameters, or derived from one."""
    return any(id(root) in roots for root in tracked.roots)


def _records_at_once(roots: Mapping[int, nn.Parameter], chunk_bytes: int) -> int:
    """Return the number of records for which to form these parameters' gradients at once."""
    return max(1, (chunk_bytes * 8) // max(1, 4 * sum(root.numel() for root in roots.values())))


def shared_norms(
    contributions: list[tuple[TrackedParameter, Contribution]], count: int, budget: MemoryBudget
) -> Iterable[Tensor]:
    """For parameters with several uses, yield the squared norms of the SUM over the uses."""
    rest = []
    by_root: dict[int, list[tuple[TrackedParameter, Contribution]]] = {}
    for tracked, contribution in contributions:
        key = id(tracked.tensor) if tracked.is_root else 0
        by_root.setdefault(key, []).append((tracked, contribution))
    derived_roots = {id(r) for tracked, _ in by_root.get(0, []) for r in tracked.roots}
    for key, group in by_root.items():
        squares = None
        if key and key not in derived_roots:
            squares = shared_ghost_norms([contribution for _, contribution in group], budget)
        if squares is None:
            rest.extend(group)
        else:
            yield squares
    if not rest:
        return
    roots = {id(root): root for tracked, _ in rest for root in tracked.roots}
    step = _records_at_once(roots, budget.chunk_bytes)
    parts = []
    for start in range(0, count, step):
        formed = form(rest, start, min(start + step, count))
        squares = [row_norms(g.reshape(len(g), -1)).square_() for g in formed.values()]
        parts.append(torch.stack(squares).sum(dim=0))
    yield torch.cat(parts)


def form(
    contributions: list[tuple[TrackedParameter, Contribution]], start: int, stop: int
) -> dict[int, Tensor]:
    """Return per-record gradients of the roots, ``{id(root): [stop - start, *shape]}``."""
    roots: dict[int, Tensor] = {}
    parts = (
        (tracked, contribution.per_record(start, stop)) for tracked, contribution in contributions
    )
    add_to_roots(roots, parts, per_record=True)
    return roots


def add_to_roots(
    sums: dict[int, Tensor], parts: Iterable[tuple[TrackedParameter, Tensor]], *, per_record: bool
) -> None:
    """Add gradients to their roots; sum those of a derived parameter before backpropagating."""
    derived: dict[int, tuple[TrackedParameter, Tensor]] = {}
    for tracked, part in parts:
        if tracked.is_root:
            add_to(sums, id(tracked.tensor), part)
        else:
            earlier = derived.get(id(tracked))
            derived[id(tracked)] = (tracked, part if earlier is None else earlier[1] + part)
    for tracked, part in derived.values():
        for root, back in zip(tracked.roots, tracked.pull_back(part, per_record), strict=True):
            if back is not None:
                add_to(sums, id(root), back.to(accumulation_dtype(back.dtype)))


def add_to(sums: dict[int, Tensor], key: int, part: Tensor) -> None:
    """Add ``part`` to the entry, but not in place, because other code may use these tensors."""
    earlier = sums.get(key)
    sums[key] = part if earlier is None else earlier + part
