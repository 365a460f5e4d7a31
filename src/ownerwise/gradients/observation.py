"""Backpropagate the losses of some records to find the dimension that indexes the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from ownerwise.gradients.layout import WHOLE, Layout, candidates, fits, keeps_apart
from ownerwise.gradients.problems import Problem
from ownerwise.gradients.relocation import Relocations
from ownerwise.gradients.taps import Tap

__all__ = ["find_layouts"]

_FACTORS = 32  # powers of two by which the losses are multiplied, 2 ** 0 to 2 ** 31

Observe = Callable[[Tensor, Callable[[Tap, Tensor], None]], None]


def find_layouts(
    taps: list[Tap],
    known_layouts: dict[object, list[Layout]],
    losses: Tensor,
    observe: Observe,
    relocations: Relocations,
) -> list[Problem]:
    """Set the layout of every tap, known from earlier batches or determined by observation.

    Args:
        taps: the uses of parameters, in the order of the forward pass.
        known_layouts: earlier observations, keyed by the sequence of calls; new ones are added.
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
    if known is not None:
        for tap, layout in zip(taps, known, strict=True):
            if not fits(layout, tap.shape, count):
                break
            tap.layout = layout
        else:
            if not relocations.by_data or _confirmed(taps, losses, observe):
                return []
    certain, problems = _observe_layouts(taps, losses, observe)
    if certain:
        known_layouts[signature] = [tap.layout or WHOLE for tap in taps]
    return problems


def _confirmed(taps: list[Tap], losses: Tensor, observe: Observe) -> bool:
    """Return whether the gradients of a batch are where the layouts of the taps say they are.

    If a record's loss is multiplied by a power of two, so is the absolute sum of its gradients,
    without rounding. The factors tell every two records apart. Where gradients overflow or a call
    rounds differently each time, the layouts count as not confirmed and are observed again.
    """
    count = len(losses)
    plain: dict[int, Tensor] = {}
    same = True

    def sums_of(tap: Tap, gradient: Tensor) -> Tensor:
        assert tap.layout is not None
        parts = tap.layout.records(gradient, count).reshape(count, -1)
        return torch.linalg.vector_norm(parts, 1, dim=1, dtype=torch.float64)

    def remember(tap: Tap, gradient: Tensor) -> None:
        plain[id(tap)] = sums_of(tap, gradient)

    observe(torch.ones_like(losses), remember)
    number = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    while same and bool(number.any()):
        factors = torch.exp2((number % _FACTORS).double()).to(losses.device)

        def compare(tap: Tap, gradient: Tensor, factors: Tensor = factors) -> None:
            nonlocal same
            expected = plain.get(id(tap))
            same &= expected is not None and torch.equal(sums_of(tap, gradient), expected * factors)

        observe(factors.to(losses.dtype), compare)
        number //= _FACTORS
    return same


def _observe_layouts(
    taps: list[Tap], losses: Tensor, observe: Observe
) -> tuple[bool, list[Problem]]:
    """Find every tap's layout; return whether all layouts are certain, and the problems.

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
    certain = len(seen) == len(taps) and all(len(tap.trials) == 1 for tap in taps)
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
    return certain, problems


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
