"""Finding where the records are, by sending back the losses of some of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ownerwise.gradients.layout import WHOLE, Layout, candidates, fits, keeps_apart
from ownerwise.gradients.problems import Problem
from ownerwise.gradients.taps import Tap

__all__ = ["find_layouts"]


def find_layouts(
    taps: list[Tap],
    known_layouts: dict[object, list[Layout]],
    losses: Tensor,
    observe: Callable[[Tensor, Callable[[Tap, Tensor], None]], None],
) -> list[Problem]:
    """Set the layout of every tap, from earlier batches or by observation.

    Args:
        taps: the uses of parameters in the order of the forward pass.
        known_layouts: what was observed before, by the sequence of calls; added to.
        losses: ``[B]``.
        observe: sends the losses back with the given weights, and calls back with every gradient.

    Returns:
        Problems of taps whose records cannot be told apart; their layout stays None.
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
    seen, problems = _observe_layouts(taps, losses, observe)
    if seen:
        known_layouts[signature] = [tap.layout or WHOLE for tap in taps]
    return problems


def _observe_layouts(
    taps: list[Tap],
    losses: Tensor,
    observe: Callable[[Tensor, Callable[[Tap, Tensor], None]], None],
) -> tuple[bool, list[Problem]]:
    """Find every tap's layout; whether all were really seen (none had a zero gradient)."""
    count = len(losses)
    # A private generator: the user's random stream must not shift. Half of the records, never
    # all or none, and no periodic pattern that a folded layout could imitate.
    generator = torch.Generator().manual_seed(count)
    kept = torch.zeros(count, dtype=torch.bool)
    kept[torch.randperm(count, generator=generator)[: (count + 1) // 2]] = True
    kept = kept.to(losses.device)
    seen: set[int] = set()

    def arrived(tap: Tap, gradient: Tensor) -> None:
        trials = candidates(tap.shape, count, tap.dims)
        passed = [(t, *keeps_apart(t, gradient, kept)) for t in trials]
        tap.trials = [t for t, apart, _ in passed if apart]
        if any(apart and touched for _, apart, touched in passed):
            seen.add(id(tap))

    for tap in taps:
        tap.trials = candidates(tap.shape, count, tap.dims)
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
                f"{count} records: something after it mixes records, or no dimension is theirs",
                "let every operation work on each record alone, with the records as a dimension",
            )
        )
    return len(seen) == len(taps), problems
