"""The section about rate constraints: bounds, values, multipliers and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ownerwise.report import plots
from ownerwise.report.blocks import Block, Notes, Section, Table, Text
from ownerwise.report.comparison import Comparison, MethodRuns, last
from ownerwise.report.curves import MOST_POINTS, Curve
from ownerwise.report.plots import Figure, Panel, View
from ownerwise.runs import Run

MOST_DRAWN = 12
_ROUNDING = 1e-9

INTRODUCTION = (
    "Every step released a noisy histogram of predictions by group, which the plan accounts for "
    "together with the gradient. The noisy values and the multipliers are computed from it at no "
    "additional cost. A multiplier sets the penalty for violating its constraint and rises while "
    "the constraint is violated."
)


def constrained(comparison: Comparison) -> list[MethodRuns]:
    """Return the methods that were trained under constraints for at least one step."""
    return [m for m in comparison.methods if all(_tracks(run) for run in m.runs)]


def _tracks(run: Run) -> list[dict[str, Any]]:
    """Return the lines of the history about constraints; none if another mechanism wrote them."""
    return [line for line in run.history if line.get("constraints") and _constraints(run)]


def _constraints(run: Run) -> list[dict[str, Any]]:
    return (run.config.get("constraints") or {}).get("constraints", [])


def _notes(run: Run) -> Notes | None:
    if not (constraints := _constraints(run)):
        return None
    public = (
        "the constraints and the rule that assigns records to cells (but not the cells themselves)"
    )
    names = "; ".join(constraint["name"] for constraint in constraints)
    return Notes([public], "one histogram of predictions", {"Rate constraints": names})


def figure(comparison: Comparison) -> Figure | None:
    """Return a figure of multipliers and noisy values, one panel per method, or None."""
    methods = constrained(comparison)
    if not methods:
        return None
    names = list(
        dict.fromkeys(constraint["name"] for m in methods for constraint in _constraints(m.runs[0]))
    )
    drawn = names[:MOST_DRAWN]
    legend = [plots.legend_entry(at, name) for at, name in enumerate(drawn)]
    panels = []
    for method in methods:
        views = {
            title: View(
                [
                    trace
                    for at, name in enumerate(drawn)
                    if (curve := _curve(method.runs, kind, name)) is not None
                    for trace in plots.line_with_band(curve, at, name, ".3f", MOST_POINTS)
                ],
                plots.axes("step", title.lower()),
            )
            for title, kind in (("Multiplier", "multipliers"), ("Noisy value", "values"))
        }
        ends = [
            f"{name} {curve.mean[-1]:.3g}"
            for name in drawn
            if (curve := _curve(method.runs, "multipliers", name)) is not None
        ]
        words = f"{method.label}, multipliers at the end of training: {'; '.join(ends)}"
        panels.append(Panel(method.label if len(methods) > 1 else "", words, views))
    caption = "Multipliers, and constraint values computed from the noisy histograms."
    if len(names) > len(drawn):
        caption += f" {len(names) - len(drawn)} more constraints appear only in the table."
    return Figure("constraints", panels, caption, legend)


def _curve(runs: Sequence[Run], kind: str, name: str) -> Curve | None:
    """Return the mean and standard deviation over seeds at the steps that all runs recorded."""
    tracks = [
        {line["step"]: line["constraints"][kind].get(name) for line in _tracks(run)} for run in runs
    ]
    steps = sorted(set.intersection(*(set(track) for track in tracks)))
    values = np.array([[track[step] for step in steps] for track in tracks], dtype=np.float64)
    if not steps or not np.isfinite(values).any():
        return None
    return Curve.over_seeds(np.array(steps, dtype=np.float64), values)


def table(comparison: Comparison) -> Table:
    """Return each constraint's final values and whether it is satisfied."""
    rows = []
    for method in constrained(comparison):
        for constraint in _constraints(method.runs[0]):
            at_end = [_tracks(run)[-1]["constraints"] for run in method.runs]
            noisy, noise, multiplier = (
                float(np.mean([end[kind][constraint["name"]] for end in at_end]))
                for kind in ("values", "noise", "multipliers")
            )
            measured = _measured(comparison, method, constraint["name"])
            rows.append(
                [
                    constraint["name"],
                    method.label,
                    f"{constraint['sense']} {constraint['bound']:g}",
                    f"{noisy:.3f} ± {noise:.3f}",
                    "–" if not measured else f"{np.mean(measured):.3f}",
                    _satisfied(constraint, measured),
                    f"{multiplier:.3g}",
                ]
            )
    data = comparison.data_split
    headings = [
        "Constraint", "Method", "Bound", "Noisy value at the last step", f"Value on {data} data",
        "Satisfied there", "Multiplier",
    ]  # fmt: skip
    caption = (
        f"Constraints at the end of training. Values on {data} data are computed from predicted "
        "classes and are not private; ± shows the noise in the histogram of one step"
    )
    return Table(caption, headings, rows, words=2)


def _measured(comparison: Comparison, method: MethodRuns, name: str) -> list[float]:
    if comparison.source is None:
        return []
    evaluations = [last(run, comparison.source) for run in method.runs]
    values = [
        each["constraints"].get(name) for each in evaluations if each and "constraints" in each
    ]
    return [value for value in values if value is not None]


def _satisfied(constraint: dict[str, Any], measured: Sequence[float]) -> str:
    if not measured:
        return "not measured"
    sign = 1.0 if constraint["sense"] == "≤" else -1.0
    excess = sign * (float(np.mean(measured)) - constraint["bound"])
    return "yes" if excess <= 0 else f"no, by {excess:.3f}"


def warnings(comparison: Comparison) -> list[str]:
    """Return reasons why the constraints may not work as intended."""
    return [words for method in constrained(comparison) for words in _warnings(method)]


def _warnings(method: MethodRuns) -> Iterator[str]:
    settings = method.runs[0].config["constraints"]
    for constraint in settings["constraints"]:
        name = constraint["name"]
        noise = max(_tracks(run)[-1]["constraints"]["noise"][name] for run in method.runs)
        if noise > abs(constraint["bound"]):
            yield (
                f"{method.label}, {name}: the noise in the histogram of one step, {noise:.3f}, is "
                f"larger than the bound {abs(constraint['bound']):g}. Use larger batches, fewer "
                "cells or a larger release_share."
            )
        if any(_at_cap(run, name, settings["cap"]) for run in method.runs):
            yield (
                f"{method.label}, {name}: the multiplier stayed at its cap of {settings['cap']:g} "
                "throughout the second half of training. Either this model cannot satisfy the "
                "constraint, or the cap or the clip norm is too small."
            )


def _at_cap(run: Run, name: str, cap: float) -> bool:
    """Return whether a multiplier stayed at its cap throughout the second half of training."""
    lines = _tracks(run)
    second_half = lines[len(lines) // 2 :]
    lowest = min(line["constraints"]["multipliers"][name] for line in second_half)
    return lowest >= cap * (1 - _ROUNDING)


def _build(comparison: Comparison) -> Sequence[Block] | None:
    drawn = figure(comparison)
    if drawn is None:
        return None
    notes = [Text(words, "note") for words in warnings(comparison)]
    return [Text(INTRODUCTION), *notes, table(comparison), drawn]


SECTION = Section(
    "constraints", "Constraints", "Constraints", _build, follows="trade-off", notes=_notes
)
