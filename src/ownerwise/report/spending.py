"""The figure of the epsilon spent over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerwise.report import plots
from ownerwise.report.comparison import Comparison
from ownerwise.report.facts import PlanFacts
from ownerwise.report.guarantees import spent
from ownerwise.report.plots import Figure, LegendEntry, Panel, Trace, View
from ownerwise.wording import up, whole

MOST_PLANS = 4
_READINGS = 10
_LOGARITHMIC_FROM = 8.0


def spending(comparison: Comparison) -> Figure:
    """Return a figure of the epsilon spent by each budget class, with a panel per distinct plan."""
    plans = comparison.facts.plans
    uses = plans[:MOST_PLANS]
    panels = [_spending_panel(use, titled=len(plans) > 1) for use in uses]
    caption = (
        f"The lines show the ε spent per {comparison.facts.units} after each step, as "
        "computed by the plan's accountant; pale lines show steps that were planned but not taken. "
        "The dotted lines show the budgets, which no step may exceed."
    )
    if len(plans) > len(uses):
        caption += f" {len(plans) - len(uses)} more plans are not shown."
    # One legend serves all panels only if they have the same classes.
    same = len({tuple(row.budget.epsilon for row in use.budgets) for use in uses}) == 1
    classes = [row.budget for row in uses[0].budgets]
    legend = [
        LegendEntry(f"class-{number}", row.name, _ramp(number, len(classes)))
        for number, row in enumerate(classes)
    ]
    return Figure("spending", panels, caption, legend if same else [])


def _ramp(number: int, count: int) -> str:
    return f"@ramp:{number / max(count - 1, 1):.3f}"


def _spending_panel(use: PlanFacts, *, titled: bool) -> Panel:
    steps, classes = use.plan.steps, [row.budget for row in use.budgets]
    # Epsilon grows roughly as the square root of the steps, so readings are denser at the start.
    readings = np.ceil(steps * (np.arange(1, _READINGS + 1) / _READINGS) ** 2).astype(int)
    at = sorted({1, *readings.tolist(), max(1, use.steps_spent)})
    targets = [row.epsilon[1] for row in classes]
    wide = max(targets) > _LOGARITHMIC_FROM * min(targets)
    spending = spent(use.plan, classes, max(1, use.steps_spent))
    owners = [each.highest_owner for each in spending]
    epsilon = {k: use.plan.epsilon_of(owners, k) for k in at}
    traces: list[Trace] = []
    words = []
    for number, row in enumerate(classes):
        colour, series, name = _ramp(number, len(classes)), f"class-{number}", row.name
        so_far = {k: float(epsilon[k][number]) for k in at}
        words.append(f"{name}: {up(so_far[max(1, use.steps_spent)], 3)} spent")
        shared = {"type": "scatter", "mode": "lines", "legendgroup": series, "name": name}
        for part, opacity in (
            ([k for k in at if k <= use.steps_spent], 1.0),
            ([k for k in at if k >= use.steps_spent], 0.35),
        ):
            if len(part) < 2:
                continue
            traces.append(
                {
                    **shared,
                    "x": part,
                    "y": plots.numbers(so_far[k] for k in part),
                    "opacity": opacity,
                    "hovertemplate": "%{y:.3g}" if opacity == 1 else "%{y:.3g} (planned)",
                    "line": {"color": colour, "width": 2.2},
                }
            )
        traces.append(
            {
                **shared,
                "x": [0, steps],
                "y": [row.epsilon[1]] * 2,
                "hoverinfo": "skip",
                "line": {"color": colour, "width": 1.4, "dash": "dot"},
            }
        )
    axis: dict[str, Any] = {"rangemode": "tozero"}
    if wide:
        axis = {"type": "log", "dtick": "D2", "tickformat": "~g"}
    layout = plots.axes("step", f"ε spent per {use.plan.unit}", yaxis=axis)
    title = f"Plan of {use.labels}" if titled else ""
    description = (
        f"ε spent per {use.plan.unit} after {whole(use.steps_spent)} of {whole(steps)} steps. "
    )
    return Panel(title, description + "; ".join(words), {"": View(traces, layout)})
