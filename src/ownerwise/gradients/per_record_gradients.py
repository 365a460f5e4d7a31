"""Norms and weighted sums over all parameters, combined from every use of each parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.gradients.contributions import BLOCK, Contribution, Grouped, shared_ghost_norms
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import accumulation_dtype, full_precision, row_norms
from ownerwise.gradients.segments import Segments
from ownerwise.gradients.taps import Tap, Use
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["Collector", "PerRecordGradients"]

# If a record's terms are this many times longer than their sum, adding them to the sum over the
# batch would cost the other records precision, so the record is summed separately.
CANCELLING = 1e3
# By how much a norm is rounded up for the sum over a record's terms, in rounding errors of the
# upper bound on their lengths. Sums of 400 terms were too short by up to 2 of them.
TERM_ROUNDINGS = 4

Gradients = dict[nn.Parameter, Tensor]


class PerRecordGradients:
    """The per-record gradients of one batch, available as norms and sums.

    Attributes:
        norms: the L2 norm, `[B]`, of each record's gradient over all trainable parameters,
            float32 or better. A record whose gradient is not finite has a non-finite norm here and
            contributes exactly zero to every sum, whatever its factor.
        finite: whether all norms are finite.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        uses: list[Use],
        norms: Tensor,
        terms_bound: Tensor | None,
        chunk_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._uses = uses
        self._chunk_bytes = chunk_bytes
        self.norms = norms
        self._cancelling: list[int] = []  # records whose terms nearly cancel
        if terms_bound is not None:
            # a bound is nan (0 * inf) where one factor underflows and the other one overflows
            terms_bound = terms_bound.nan_to_num(nan=math.inf, posinf=math.inf)
            cancelling = torch.isfinite(norms) & (terms_bound > CANCELLING * norms)
            self._cancelling = cancelling.nonzero().flatten().tolist() if cancelling.any() else []
            norms.add_(terms_bound, alpha=TERM_ROUNDINGS * torch.finfo(norms.dtype).eps)
        for number in self._cancelling:
            formed = _form(uses, number, number + 1).values()
            norms[number] = torch.cat([row_norms(g.reshape(1, -1)) for g in formed]).norm()
        self.finite = math.isfinite(float(norms.sum()))  # a single call in the common case
        if not self.finite:
            bad = ~torch.isfinite(norms)
            for _, contribution in uses:
                contribution.drop(bad)

    def __len__(self) -> int:
        return len(self.norms)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return self._parameters

    def row_lengths(self) -> Tensor:
        """Return an upper bound on the norm of the gradient of each row of segments, `[rows]`."""
        lengths = [c.row_lengths() for _, c in self._uses if isinstance(c, Grouped)]
        return torch.stack(lengths).sum(dim=0) if lengths else self.norms

    def weighted_sum(self, factors: Tensor, *, in_blocks: bool = True) -> Gradients:
        """Return `{parameter: sum_i factors[i] * g_i}` for all trainable parameters.

        Args:
            factors: one finite factor per record, `[B]`.
            in_blocks: whether to sum blocks of records and add these sums in float64, which bounds
                the rounding error (`contributions.blocks`) and takes a little longer.
        """
        if factors.shape != self.norms.shape:
            raise ValueError(
                f"expected one factor per record, shape {list(self.norms.shape)}; "
                f"got {list(factors.shape)}"
            )
        with full_precision(self.norms.device):
            sums = self._weighted_sum(factors.detach(), in_blocks)
        return {p: sums[p] if p in sums else _zeros(p) for p in self._parameters}

    def _weighted_sum(self, factors: Tensor, in_blocks: bool) -> Gradients:
        alone = [(number, float(factors[number])) for number in self._cancelling]
        if alone:
            factors = factors.clone()
            factors[self._cancelling] = 0
        distorted = {  # roots that reach some call through a derivation that may change norms
            root for tracked, _ in self._uses if not tracked.isometric for root in tracked.roots
        }
        direct = [use for use in self._uses if distorted.isdisjoint(use[0].roots)]
        through = [use for use in self._uses if not distorted.isdisjoint(use[0].roots)]

        def summed(tracked: TrackedParameter, contribution: Contribution) -> Tensor:
            given = factors.to(accumulation_dtype(tracked.tensor.dtype))
            return contribution.weighted_sum(given, in_blocks=in_blocks)

        sums = _to_roots(((use[0], summed(*use)) for use in direct), per_record=False)
        # A derivation such as w - w.mean() may cancel almost all of a gradient. If the gradients
        # were summed over the batch first, the rounding error of the sum could be far larger than a
        # clip norm. Each record's gradient is therefore propagated to the parameters before
        # summation, as it was for the norm.
        for start, stop in _chunks(through, len(self), self._chunk_bytes, BLOCK):
            for root, formed in _form(through, start, stop).items():
                total = factors[start:stop].to(formed.dtype) @ formed.reshape(stop - start, -1)
                _add(sums, root, total.double().reshape(formed.shape[1:]))
        for number, factor in alone:
            for root, formed in _form(self._uses, number, number + 1).items():
                _add(sums, root, factor * formed[0])
        return sums

    def per_record(self, start: int = 0, stop: int | None = None) -> Gradients:
        """Return the gradients themselves, `{parameter: [records, *shape]}`, for research."""
        stop = len(self) if stop is None else stop
        formed = _form(self._uses, start, stop)
        return {p: formed[p] if p in formed else _zeros(p, stop - start) for p in self._parameters}


class Collector:
    """Collects contributions as the backward pass delivers them.

    Attributes:
        single: the parameters with a single use, whose norms are taken right away.
        uses: the uses of these parameters.
        shared: all other uses, which are added up before the norm is taken.
        squares: squared norms, one entry per parameter or group of parameters.
        terms_bounds: for each record, upper bounds on the sum of the norms of its terms.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        taps: list[Tap],
        losses: Tensor,
        budget: MemoryBudget,
        segments: Segments | None = None,
    ) -> None:
        self.parameters = parameters
        self.losses = losses
        self.segments = segments
        self.budget = budget
        counts = Counter(root for tap in taps for tracked in tap.used for root in tracked.roots)
        self.single = {root for root, count in counts.items() if count == 1}
        self.uses: list[Use] = []
        self.shared: list[Use] = []
        self.squares: list[Tensor] = []
        self.terms_bounds: list[Tensor] = []

    def arrive(self, tap: Tap, gradient: Tensor) -> None:
        """Turn the gradient of a tapped output into contributions."""
        if tap.layout is None:  # only in a trial run, which has already listed the problem
            return
        for tracked, rows in tap.build(gradient, tap.layout, len(self.losses)):
            contribution = rows
            if self.segments is not None:
                contribution = Grouped(rows, self.segments, self.budget)
            if tracked.isometric and tracked.roots[0] in self.single:
                self.uses.append((tracked, contribution))
                self.squares.append(contribution.squared_norms())
                if (bound := contribution.terms_bound()) is not None:
                    self.terms_bounds.append(bound)
            else:
                self.shared.append((tracked, contribution))

    def finish(self) -> PerRecordGradients:
        """Return the gradients with all their norms."""
        count = len(self.losses if self.segments is None else self.segments)
        for squares, bound in _shared_norms(self.shared, count, self.budget):
            self.squares.append(squares)
            self.terms_bounds.append(bound)
        double = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        dtype = torch.float64 if double else torch.float32
        squares = self.squares or [self.losses.new_zeros(count)]
        return PerRecordGradients(
            self.parameters,
            self.uses + self.shared,
            _total(squares, dtype).sqrt_(),
            _total(self.terms_bounds, dtype) if self.terms_bounds else None,
            self.budget.chunk_bytes,
        )


def _total(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([part.to(dtype) for part in parts]).sum(dim=0)


def _zeros(parameter: nn.Parameter, *records: int) -> Tensor:
    dtype = accumulation_dtype(parameter.dtype)
    return torch.zeros((*records, *parameter.shape), dtype=dtype, device=parameter.device)


def _shared_norms(
    uses: list[Use], count: int, budget: MemoryBudget
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield squared norms of parameters with several uses, computed from the SUM over the uses.

    Uses may cancel each other, so upper bounds on the sums of the norms of their terms come too.
    """
    with_derived = {root for tracked, _ in uses if not tracked.is_root for root in tracked.roots}
    by_root: dict[nn.Parameter, list[Use]] = {}
    rest = []
    for use in uses:
        tracked, root = use[0], use[0].roots[0]
        if tracked.is_root and root not in with_derived:
            by_root.setdefault(root, []).append(use)
        else:
            rest.append(use)
    for group in by_root.values():
        found = shared_ghost_norms(_as_records(group), budget)
        if found is None:
            rest += group
        else:
            yield found
    # Bounds come first: they may form the gradients of segments, which are then those of the sum.
    # Where rows cancel each other, gradients that are formed in another way have other norms.
    bounds = [_bound_of(use) for _, use in rest]
    parts = []
    for start, stop in _chunks(rest, count, budget.chunk_bytes):
        formed = _form(rest, start, stop)
        squares = [row_norms(g.reshape(len(g), -1)).square_() for g in formed.values()]
        parts.append(torch.stack(squares).sum(dim=0))
    if parts:
        yield torch.cat(parts), torch.stack(bounds).sum(dim=0)


def _bound_of(contribution: Contribution) -> Tensor:
    """Return an upper bound on the sum of the norms of each record's terms, `[count]`."""
    bound = contribution.terms_bound()
    if bound is not None:
        return bound
    lengths = contribution.squared_norms().sqrt()
    bound = contribution.terms_bound()  # of segments, known only now
    return lengths if bound is None else bound


def _as_records(uses: list[Use]) -> list[Contribution]:
    """Return the contributions, those of segments as records with more terms if possible."""
    found = [(c, c.padded() if isinstance(c, Grouped) else c) for _, c in uses]
    return [contribution if padded is None else padded for contribution, padded in found]


def _chunks(
    uses: list[Use], count: int, chunk_bytes: int, most: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield ranges of records for which the gradients of these uses are formed at once."""
    roots = {root for tracked, _ in uses for root in tracked.roots}
    if not roots:
        return
    step = max(1, (chunk_bytes * 8) // max(1, 4 * sum(root.numel() for root in roots)))
    step = min(step, most or step)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _form(uses: Iterable[Use], start: int, stop: int) -> Gradients:
    """Return per-record gradients of the roots, `{root: [stop - start, *shape]}`."""
    return _to_roots(((t, c.per_record(start, stop)) for t, c in uses), per_record=True)


def _to_roots(parts: Iterable[tuple[TrackedParameter, Tensor]], *, per_record: bool) -> Gradients:
    """Return the gradients of the roots; gradients of a derived tensor are added up first."""
    sums: Gradients = {}
    of_derived: dict[TrackedParameter, Tensor] = {}
    for tracked, part in parts:
        if tracked.is_root:
            _add(sums, tracked.roots[0], part)
        else:
            _add(of_derived, tracked, part)
    for tracked, part in of_derived.items():
        for root, back in zip(tracked.roots, tracked.pull_back(part, per_record), strict=True):
            if back is not None:
                _add(sums, root, back.to(accumulation_dtype(back.dtype)))
    return sums


def _add(sums: dict[Any, Tensor], key: object, part: Tensor) -> None:
    """Add `part` to the entry, but not in place, because other code may use these tensors."""
    sums[key] = sums[key] + part if key in sums else part
