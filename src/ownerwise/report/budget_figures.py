"""Privacy figures: the epsilon spent over time, and the importance weights within a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerwise.mechanisms import INO
from ownerwise.report import plots
from ownerwise.report.comparison import Comparison, MethodRuns, PlanUse
from ownerwise.report.curves import MOST_POINTS
from ownerwise.report.guarantees import spent
from ownerwise.report.plots import Figure, LegendEntry, Panel, Trace, View
from ownerwise.wording import up, whole

MOST_PLANS = 4
_READINGS = 10
_LOGARITHMIC_FROM = 8.0


def spending(comparison: Comparison) -> Figure:
    """Return a figure of the epsilon spent by each budget class, with a panel per distinct plan."""
    uses = comparison.plans[:MOST_PLANS]
    panels = [_spending_panel(use, titled=len(comparison.plans) > 1) for use in uses]
    caption = (
        "The lines show the ε spent by each record after each step, as computed by the plan's "
        "accountant; pale lines show steps that were planned but not taken. The dotted lines show "
        "the budgets, which no step may exceed."
    )
    if len(comparison.plans) > len(uses):
        caption += f" {len(comparison.plans) - len(uses)} more plans are not shown."
    # One legend serves all panels only if they have the same classes.
    same = len({tuple(row.epsilon for row in use.classes) for use in uses}) == 1
    classes = uses[0].classes
    legend = [
        LegendEntry(f"class-{number}", row.name, _ramp(number, len(classes)))
        for number, row in enumerate(classes)
    ]
    return Figure("spending", panels, caption, legend if same else [])


def _ramp(number: int, count: int) -> str:
    return f"@ramp:{number / max(count - 1, 1):.3f}"


def _spending_panel(use: PlanUse, *, titled: bool) -> Panel:
    steps, classes = use.plan.steps, use.classes
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
    layout = plots.axes("step", "ε spent per record", yaxis=axis)
    title = f"Plan of {use.labels}" if titled else ""
    description = f"ε spent after {whole(use.steps_spent)} of {whole(steps)} steps. "
    return Panel(title, description + "; ".join(words), {"": View(traces, layout)})


def weights_of(method: MethodRuns) -> INO | None:
    """Return a method's importance weights, recreated from its settings for its plan."""
    settings = method.weights
    if not settings or settings.get("kind") != "INO" or settings.get("shape") is not None:
        return None
    known = ("tail", "tail_length", "alpha", "beta")
    options = {name: settings[name] for name in known if settings.get(name) is not None}
    return INO(**options).bind(method.runs[0].plan)


def importance(comparison: Comparison) -> Figure | None:
    """Return a figure of tail functions and of weights in a typical batch, or None if unused."""
    used = [(m, ino) for m in comparison.methods if (ino := weights_of(m)) is not None]
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
    numbers = {str(method.number) for method, _ in used}
    legend = [
        LegendEntry(str(m.number), m.label, plots.colour(m.number), plots.dash(m.number))
        for m in comparison.methods
        if str(m.number) in numbers
    ]
    return Figure("importance", panels, caption, legend if len(legend) > 1 else [], height=280)


def _typical_weights(method: MethodRuns, ino: INO) -> np.ndarray:
    plan = method.runs[0].plan
    count = max(1, round(plan.expected_batch_size))
    total = float(plan.sampling_rates @ (plan.records * plan.clip_norms))
    clips = np.full(count, total / plan.expected_batch_size)
    return ino.weights(np.arange(count, 0, -1.0), clips)


def _line(method: MethodRuns, x: np.ndarray, y: np.ndarray, filled: bool) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plots.text(method.label),
        "legendgroup": str(method.number),
        "x": plots.numbers(x),
        "y": plots.numbers(y),
        "hovertemplate": "%{y:.2f}",
        "line": {
            "color": plots.colour(method.number),
            "dash": plots.dash(method.number),
            "width": 2.2,
        },
        "fill": "tozeroy" if filled else "none",
        "fillcolor": plots.colour(method.number, band=True),
    }
