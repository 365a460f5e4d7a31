"""The section about rate constraints: what was asked, what came of it, and what it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ownerwise.report import markup, plots
from ownerwise.report.curves import MOST_POINTS, Curve
from ownerwise.report.figures import study_data
from ownerwise.report.plots import Figure, Key, Panel, View
from ownerwise.report.study import Method, Study, last
from ownerwise.runs import (
    Run,
)

MOST_DRAWN = 12
_ROUNDING = 1e-9

INTRODUCTION = (
    "Every step released a histogram of predictions by group, with noise that the plan pays for "
    "together with the gradient. The noised values and the multipliers follow from it and cost "
    "nothing further. A multiplier is the price of breaking its constraint: it rises while the "
    "constraint is broken."
)


def constrained(study: Study) -> list[Method]:
    """Return the methods that were trained under constraints and have taken steps."""
    return [m for m in study.methods if all(_tracks(run) for run in m.runs)]


def _tracks(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.history if line.get("constraints")]


def _asked(method: Method) -> list[dict[str, Any]]:
    return method.runs[0].config["constraints"]["constraints"]


def figure(study: Study) -> Figure | None:
    """Return multipliers and noised values over the steps, one panel per method."""
    methods = constrained(study)
    if not methods:
        return None
    names = list(dict.fromkeys(one["name"] for method in methods for one in _asked(method)))
    drawn = names[:MOST_DRAWN]
    keys = [Key(str(at), name, plots.colour(at), plots.dash(at)) for at, name in enumerate(drawn)]
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
            for title, kind in (("Multiplier", "multipliers"), ("Value, with noise", "values"))
        }
        ends = [
            f"{name} {curve.mean[-1]:.3g}"
            for name in drawn
            if (curve := _curve(method.runs, "multipliers", name)) is not None
        ]
        words = f"{method.label}: multipliers at the end: {'; '.join(ends)}"
        panels.append(Panel(method.label if len(methods) > 1 else "", words, views))
    caption = "Multipliers, and values of the constraints as the noised histograms tell them."
    if len(names) > len(drawn):
        caption += f" {len(names) - len(drawn)} further constraints are in the table alone."
    return Figure("constraints", panels, caption, keys)


def _curve(runs: Sequence[Run], kind: str, name: str) -> Curve | None:
    """Return mean and deviation over seeds at the steps that all runs have lines for."""
    found = [
        {line["step"]: line["constraints"][kind].get(name) for line in _tracks(run)} for run in runs
    ]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    values = np.array([[one[step] for step in steps] for one in found], dtype=np.float64)
    if not steps or not np.isfinite(values).any():
        return None
    deviation = values.std(axis=0, ddof=1) if len(runs) > 1 else None
    return Curve(np.array(steps, dtype=np.float64), values.mean(axis=0), deviation)


def table(study: Study) -> str:
    """Return every constraint's values at the end, and whether it is satisfied."""
    rows = []
    for method in constrained(study):
        for asked in _asked(method):
            at_end = [_tracks(run)[-1]["constraints"] for run in method.runs]
            noised, noise, multiplier = (
                float(np.mean([end[kind][asked["name"]] for end in at_end]))
                for kind in ("values", "noise", "multipliers")
            )
            measured = _measured(study, method, asked["name"])
            rows.append(
                [
                    asked["name"],
                    method.label,
                    f"{asked['sense']} {asked['bound']:g}",
                    f"{noised:.3f} ± {noise:.3f}",
                    "–" if not measured else f"{np.mean(measured):.3f}",
                    _satisfied(asked, measured),
                    f"{multiplier:.3g}",
                ]
            )
    data = study_data(study) if study.source else "validation"
    headings = [
        "Constraint", "Method", "Asked", "Value of the last step (noised)", f"Value on {data} data",
        "Satisfied there", "Multiplier",
    ]  # fmt: skip
    caption = (
        f"Constraints at the end; values on {data} data count predicted classes and are not "
        "private, ± is the noise of one step's histogram"
    )
    return markup.table(caption, headings, rows, words=2)


def _measured(study: Study, method: Method, name: str) -> list[float]:
    if study.source is None:
        return []
    found = [last(run, study.source) for run in method.runs]
    values = [one["constraints"].get(name) for one in found if one and "constraints" in one]
    return [value for value in values if value is not None]


def _satisfied(asked: dict[str, Any], measured: Sequence[float]) -> str:
    if not measured:
        return "not measured"
    sign = 1.0 if asked["sense"] == "≤" else -1.0
    excess = sign * (float(np.mean(measured)) - asked["bound"])
    return "yes" if excess <= 0 else f"no, by {excess:.3f}"


def warnings(study: Study) -> list[str]:
    """Return what keeps constraints from meaning what they say."""
    return [words for method in constrained(study) for words in _warnings(method)]


def _warnings(method: Method) -> Iterator[str]:
    settings = method.runs[0].config["constraints"]
    for asked in settings["constraints"]:
        name = asked["name"]
        noise = max(_tracks(run)[-1]["constraints"]["noise"][name] for run in method.runs)
        if noise > abs(asked["bound"]):
            yield (
                f"{method.label}, {name}: the noise of a step's histogram, {noise:.3f}, is larger "
                f"than the bound {abs(asked['bound']):g} that was asked for. Use larger batches, "
                "fewer cells, or a larger release_share."
            )
        stuck = []
        for run in method.runs:
            lines = _tracks(run)
            half = lines[len(lines) // 2 :]
            least = min(line["constraints"]["multipliers"][name] for line in half)
            stuck.append(least >= settings["cap"] * (1 - _ROUNDING))
        if any(stuck):
            yield (
                f"{method.label}, {name}: the multiplier stayed at its cap {settings['cap']:g} in "
                "the second half of training. The constraint cannot be met by this model, or the "
                "cap or the clip norm is too small."
            )
