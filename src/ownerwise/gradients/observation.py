"""Backpropagate the losses of some records to find the dimension that indexes the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ownerwise.gradients.layout import WHOLE, Layout, candidates, fits, keeps_apart
from ownerwise.gradients.problems import Problem
from ownerwise.gradients.taps import Tap

__all__ = ["find_layouts"]

_RANDOM_DIVISIONS = 2  # followed, if layouts are still ambiguous, by one per bit of the index


def find_layouts(
    taps: list[Tap],
    known_layouts: dict[object, list[Layout]],
    losses: Tensor,
    observe: Callable[[Tensor, Callable[[Tap, Tensor], None]], None],
) -> list[Problem]:
    """Set the layout of every tap, known from earlier batches or determined by observation.

    Args:
        taps: the uses of parameters, in the order of the forward pass.
        known_layouts: earlier observations, keyed by the sequence of calls; new ones are added.
        losses: one loss per record, `[B]`.
        observe: backpropagates the losses with the given weights, and passes every gradient to the
            given function.

    Returns:
        One problem for each tap whose records cannot be told apart; its layout stays None.
    """
    count = len(losses)
    if count == 1:
        for tap in taps:
            tap.layout = WHOLE
        return []
    signature = tuple([tap.key for tap in taps])
    known = known_layouts.get(signature)
    if known is not None:
        for tap, layout in zip(taps, known, strict=True):
            if not fits(layout, tap.shape, count):
                break
            tap.layout = layout
        else:
            return []
    certain, problems = _observe_layouts(taps, losses, observe)
    if certain:
        known_layouts[signature] = [tap.layout or WHOLE for tap in taps]
    return problems


def _observe_layouts(
    taps: list[Tap],
    losses: Tensor,
    observe: Callable[[Tensor, Callable[[Tap, Tensor], None]], None],
) -> tuple[bool, list[Problem]]:
    """Find every tap's layout; return whether all layouts are certain, and the problems.

    If a tap has several layouts left after every split of the batch, they all assign each nonzero
    gradient in this batch to the same record, so any of them will do, but only for this batch.
    """
    count = len(losses)
    generator = torch.Generator().manual_seed(count)  # the user's generator must not advance
    seen: set[int] = set()
    for tap in taps:
        tap.trials = candidates(tap.shape, count, tap.dims)
    for number, half in enumerate(_halves(count, generator)):
        kept = half.to(losses.device)

        def arrived(tap: Tap, gradient: Tensor, kept: Tensor = kept) -> None:
            passed = [(t, *keeps_apart(t, gradient, kept)) for t in tap.trials]
            tap.trials = [t for t, apart, _ in passed if apart]
            if any(apart and touched for _, apart, touched in passed):
                seen.add(id(tap))

        observe(kept.to(losses.dtype), arrived)
        decided = all(len(tap.trials) < 2 for tap in taps)
        if decided and (number or len(seen) == len(taps)):  # both halves, or all taps, seen
            break
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


def _halves(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield masks that select about half of the records, each followed by its complement.

    Both halves are needed because some records may have no gradient. Neither half is ever empty.
    The first splits are random because a folded layout could match a periodic pattern. The last
    splits follow the bits of a record's index, so that every pair of records is separated by at
    least one of them.
    """
    for _ in range(_RANDOM_DIVISIONS):
        half = torch.zeros(count, dtype=torch.bool)
        half[torch.randperm(count, generator=generator)[: (count + 1) // 2]] = True
        yield half
        yield ~half
    for bit in range((count - 1).bit_length()):
        half = (torch.arange(count) >> bit) % 2 == 1
        yield half
        yield ~half
