"""The section about importance weights: the tail functions, and the weights in a typical batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ownerwise.planning import Plan
from ownerwise.report import plots
from ownerwise.report.blocks import Block, Notes, Section, Text
from ownerwise.report.comparison import Comparison, MethodRuns
from ownerwise.report.curves import MOST_POINTS
from ownerwise.report.plots import Figure, Panel, Trace, View
from ownerwise.runs import Run

INTRODUCTION = (
    "INO ranks the records in a batch and reduces the weight of the least important ones. Records "
    "of strict owners are sampled rarely and learned late; the ranking prevents the other records "
    "from dominating the update."
)
Rebuild = Callable[[Mapping[str, Any], Plan], Any]
"""Recreates a method's weights from their settings; None if the settings do not determine them."""


def section(kind: str, rebuild: Rebuild) -> Section:
    """Return the section about weights of this kind, which `rebuild` recreates."""

    def notes(run: Run) -> Notes | None:
        used = (run.config.get("weights") or {}).get("kind") == kind
        return Notes(["the shape and length of the importance tail"]) if used else None

    return Section(
        "importance",
        "Weights",
        "Importance weights within a batch",
        partial(_build, rebuild=rebuild),
        _why_missing,
        notes=notes,
    )


def _build(comparison: Comparison, rebuild: Rebuild) -> Sequence[Block] | None:
    drawn = figure(comparison, rebuild)
    return None if drawn is None else [Text(INTRODUCTION), drawn]


def _why_missing(comparison: Comparison) -> str:
    if any(method.weights for method in comparison.methods):
        return "the run does not store the tail function of the weights it used."
    return "no importance weights were used."


def figure(comparison: Comparison, rebuild: Rebuild) -> Figure | None:
    """Return a figure of tail functions and of weights in a typical batch, or None if unused."""
    used = [
        (method, weights)
        for method in comparison.methods
        if (weights := rebuild(method.weights or {}, method.runs[0].plan)) is not None
    ]
    if not used:
        return None
    tails, ranks, words = [], [], []
    x = np.linspace(0.0, 1.0, 101)
    for method, ino in used:
        tails.append(_line(method, x, ino.tail_function.rising(1.0 - x), len(used) == 1))
        weights = _typical_weights(method, ino)
        at = np.unique(np.linspace(0, len(weights) - 1, MOST_POINTS).round().astype(int))
        ranks.append(_line(method, at + 1.0, weights[at], len(used) == 1))
        full = int((weights >= 1.0).sum())
        words.append(
            f"{method.label}: {full} of {len(weights)} records keep their full weight; the sum of "
            f"the weights is {weights.mean():.0%} of the batch size"
        )
    top: dict[str, Any] = {"range": [0, 1.05]}
    panels = [
        Panel(
            "Tail function",
            "Importance falls from 1 at the start of the tail to 0 at its end.",
            {"": View(tails, plots.axes("position in the tail", "importance", yaxis=top))},
        ),
        Panel(
            "Weights in a typical batch",
            "; ".join(words),
            {"": View(ranks, plots.axes("rank, highest score first", "weight", yaxis=dict(top)))},
        ),
    ]
    caption = (
        ". ".join(words) + ". A typical batch has the expected number of records, all with the "
        "average clip norm; no private batch was inspected. The weights have no privacy cost: "
        "adding or removing a record still changes the sum by at most its clip norm."
    )
    legend = [plots.legend_entry(method.number, method.label) for method, _ in used]
    return Figure("importance", panels, caption, legend if len(legend) > 1 else [], height=280)


def _typical_weights(method: MethodRuns, ino: Any) -> np.ndarray:
    plan = method.runs[0].plan
    count = max(1, round(plan.expected_batch_size))
    of = plan.holders
    total = float(of.sampling_rates @ (of.elements * of.clip_norms))
    clips = np.full(count, total / plan.expected_batch_size)
    return ino.weights(np.arange(count, 0, -1.0), clips)


def _line(method: MethodRuns, x: np.ndarray, y: np.ndarray, filled: bool) -> Trace:
    return {
        **plots.line(plots.numbers(x), plots.numbers(y), method.number, method.label),
        "hovertemplate": "%{y:.2f}",
        "fill": "tozeroy" if filled else "none",
        "fillcolor": plots.colour(method.number, band=True),
    }
