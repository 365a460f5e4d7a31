"""Backpropagate the losses of some records to find the dimension that indexes the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ownerwise.gradients.layout import WHOLE, Layout, candidates, fits, keeps_apart
from ownerwise.gradients.problems import Problem
from ownerwise.gradients.relocation import Relocations
from ownerwise.gradients.taps import Tap

__all__ = ["Kept", "find_layouts"]

_FACTORS = 32  # powers of two by which the losses are multiplied, 2 ** 0 to 2 ** 31
_AT_ONCE = 1 << 20  # numbers that are converted to float64 at once

Observe = Callable[[Tensor, Callable[[Tap, Tensor], None]], None]


@dataclass
class Kept:
    """What earlier batches have shown about one sequence of calls.

    Attributes:
        layouts: the layout of every tap.
        shown: for every tap, whether it has had a nonzero gradient, which shows its layout.
        count: the most records for which this is known; larger batches confirm it.
    """

    layouts: list[Layout]
    shown: list[bool]
    count: int


def find_layouts(
    taps: list[Tap],
    known_layouts: dict[object, Kept],
    losses: Tensor,
    observe: Observe,
    relocations: Relocations,
) -> list[Problem]:
    """Set the layout of every tap, known from earlier batches or determined by observation.

    Known layouts are confirmed if data may have moved the records, if some layout has not been
    shown yet, and in a larger batch than any before: a model may treat large batches differently.

    Args:
        taps: the uses of parameters, in the order of the forward pass.
        known_layouts: what is known, keyed by the sequence of calls; new observations are added.
        losses: one loss per record, `[B]`.
        observe: backpropagates the losses with the given weights, and passes every gradient to the
            given function.
        relocations: what may have put the records in another order.

    Returns:
        One problem for each tap whose records cannot be told apart; its layout stays None.
    """
    count = len(losses)
    if count == 1:
        for tap in taps:
            tap.layout = WHOLE
        return []
    signature = (*[tap.key for tap in taps], *relocations.places)
    known = known_layouts.get(signature)
    if known is not None and all(
        fits(layout, tap.shape, count) for tap, layout in zip(taps, known.layouts, strict=True)
    ):
        unshown = set()
        for tap, layout, shown in zip(taps, known.layouts, known.shown, strict=True):
            tap.layout = layout
            if not shown:
                unshown.add(id(tap))
        if not (unshown or relocations.by_data or count > known.count):
            return []
        if _confirmed(losses, observe, unshown):
            known.count = max(known.count, count)
            return []
    seen, problems = _observe_layouts(taps, losses, observe)
    if not problems and all(
        len(tap.trials) == 1 or not shown for tap, shown in zip(taps, seen, strict=True)
    ):
        known_layouts[signature] = Kept([tap.layout or WHOLE for tap in taps], seen, count)
    return problems


def _confirmed(losses: Tensor, observe: Observe, unshown: set[int]) -> bool:
    """Return whether the gradients of a batch are where the layouts of the taps say they are.

    If a record's loss is multiplied by a power of two, so is the absolute sum of its gradients,
    without rounding. The factors tell every two records apart, and each of two records has the
    larger factor in one of the first two passes, which magnifies whatever reaches the other one.
    Where gradients overflow or a call rounds differently each time, the layouts count as not
    confirmed and are observed again, as they do if the taps in `unshown`, whose gradients have
    always been zero, now have others.
    """
    count = len(losses)
    number = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    exponents = [number % _FACTORS, _FACTORS - 1 - number % _FACTORS]
    while (number := number // _FACTORS).any():
        exponents.append(number % _FACTORS)
    first: dict[int, Tensor] = {}
    same = True
    for exponent in exponents:
        factors = torch.exp2(exponent.double()).to(losses.device)
        begins = exponent is exponents[0]

        def compare(
            tap: Tap, gradient: Tensor, factors: Tensor = factors, begins: bool = begins
        ) -> None:
            nonlocal same
            if not same:
                return
            sums = _absolute_sums(tap, gradient, count) / factors
            if begins:
                first[id(tap)] = sums
                same = bool(sums.isfinite().all()) and not (id(tap) in unshown and sums.any())
            else:
                expected = first.get(id(tap))
                same = expected is not None and torch.equal(sums, expected)

        observe(factors.to(losses.dtype), compare)
        if not same:
            return False
    return True


def _absolute_sums(tap: Tap, gradient: Tensor, count: int) -> Tensor:
    """Return the absolute sum of each record's gradients, float64 `[count]`."""
    assert tap.layout is not None
    parts = tap.layout.records(gradient, count)
    at_once = max(1, _AT_ONCE * count // max(1, gradient.numel()))
    return torch.cat(
        [
            torch.linalg.vector_norm(some.reshape(len(some), -1), 1, dim=1, dtype=torch.float64)
            for some in parts.split(at_once)
        ]
    )


def _observe_layouts(
    taps: list[Tap], losses: Tensor, observe: Observe
) -> tuple[list[bool], list[Problem]]:
    """Find every tap's layout; return whether each had a nonzero gradient, and the problems.

    If a tap has several layouts left after every division of the batch, they all assign each
    nonzero gradient in this batch to the same record, so any of them will do, but only for this
    batch.
    """
    count = len(losses)
    seen: set[int] = set()
    for tap in taps:
        tap.trials = candidates(tap.shape, count, tap.dims)
    for part in _parts(count):
        kept = part.to(losses.device)

        def arrived(tap: Tap, gradient: Tensor, kept: Tensor = kept) -> None:
            passed = [(t, *keeps_apart(t, gradient, kept)) for t in tap.trials]
            tap.trials = [t for t, apart, _ in passed if apart]
            if any(apart and touched for _, apart, touched in passed):
                seen.add(id(tap))

        observe(kept.to(losses.dtype), arrived)
    problems = []
    for tap in taps:
        if tap.trials:
            tap.layout = tap.trials[0]
            continue
        problems.append(
            Problem(
                tap.name,
                f"records cannot be told apart in its output of shape {list(tap.shape)} for "
                f"{count} records: a later call mixes records, or no dimension corresponds to them",
                "make every operation treat records separately and keep a dimension for them",
            )
        )
    return [id(tap) in seen for tap in taps], problems


def _parts(count: int) -> Iterator[Tensor]:
    """Yield masks of which at least one contains any given record but not any given other record.

    Each record is in as many masks as every other, but no two are in the same ones, so neither can
    be in all masks of the other. Which masks a record is in is random, because a folded layout
    could match a pattern.
    """
    number = next(n for n in range(1, count + 1) if math.comb(n, n // 2) >= count)
    ways = torch.tensor(list(combinations(range(number), number // 2)))
    generator = torch.Generator().manual_seed(count)  # the user's generator must not advance
    chosen = ways[torch.randperm(len(ways), generator=generator)[:count]]
    masks = torch.zeros(count, number, dtype=torch.bool).scatter_(1, chosen, True)
    for mask in masks.T:
        if mask.any():
            yield mask
