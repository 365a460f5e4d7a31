"""The figures about privacy: what was spent when, and how importance falls within a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerwise.mechanisms import INO
from ownerwise.report import plots
from ownerwise.report.budget_classes import spent
from ownerwise.report.curves import MOST_POINTS
from ownerwise.report.plots import Figure, Key, Panel, Trace, View
from ownerwise.report.study import Method, PlanUse, Study
from ownerwise.wording import up, whole

MOST_PLANS = 4
_READINGS = 10
_LOGARITHMIC_FROM = 8.0


def spending(study: Study) -> Figure:
    """Return epsilon spent over steps for each budget class, a panel for each distinct plan."""
    uses = study.plans[:MOST_PLANS]
    panels = [_spending_panel(use, titled=len(study.plans) > 1) for use in uses]
    caption = (
        "Lines: what the plan's accountant says each record has spent after so many steps, pale "
        "where the steps were planned but not taken. Dotted: the budget, which no step may exceed."
    )
    if len(study.plans) > len(uses):
        caption += f" {len(study.plans) - len(uses)} further plans are left out here."
    # One legend serves all panels only if they have the same classes.
    same = len({tuple(one.epsilon for one in use.classes) for use in uses}) == 1
    classes = uses[0].classes
    keys = [Key(f"class-{at}", one.name, _ramp(at, len(classes))) for at, one in enumerate(classes)]
    return Figure("spending", panels, caption, keys if same else [])


def _ramp(at: int, count: int) -> str:
    return f"@ramp:{at / max(count - 1, 1):.3f}"


def _spending_panel(use: PlanUse, *, titled: bool) -> Panel:
    steps, classes = use.plan.steps, use.classes
    # Epsilon grows about as the root of the steps: closer readings at the start.
    readings = np.ceil(steps * (np.arange(1, _READINGS + 1) / _READINGS) ** 2).astype(int)
    at = sorted({1, *readings.tolist(), max(1, use.steps_spent)})
    targets = [one.epsilon[1] for one in classes]
    wide = max(targets) > _LOGARITHMIC_FROM * min(targets)
    dearest = [one.dearest for one in spent(use.plan, classes, max(1, use.steps_spent))]
    epsilon = {k: use.plan.epsilon_of(dearest, k) for k in at}
    traces: list[Trace] = []
    words = []
    for number, one in enumerate(classes):
        colour, series, name = _ramp(number, len(classes)), f"class-{number}", one.name
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
                "y": [one.epsilon[1]] * 2,
                "hoverinfo": "skip",
                "line": {"color": colour, "width": 1.4, "dash": "dot"},
            }
        )
    axis: dict[str, Any] = {"rangemode": "tozero"}
    if wide:
        axis = {"type": "log", "dtick": "D2", "tickformat": "~g"}
    layout = plots.axes("step", "ε of one record", yaxis=axis)
    title = f"Plan of {use.labels}" if titled else ""
    description = f"Spent after {whole(use.steps_spent)} of {whole(steps)} steps. "
    return Panel(title, description + "; ".join(words), {"": View(traces, layout)})


def weights_of(method: Method) -> INO | None:
    """Return a method's importance weights from its settings, bound to its plan."""
    settings = method.weights
    if not settings or settings.get("kind") != "INO" or settings.get("shape") is not None:
        return None
    known = ("tail", "tail_length", "alpha", "beta")
    given = {name: settings[name] for name in known if settings.get(name) is not None}
    return INO(**given).bind(method.runs[0].plan)


def importance(study: Study) -> Figure | None:
    """Return the tail functions and the weights by rank in a typical batch."""
    used = [(m, ino) for m in study.methods if (ino := weights_of(m)) is not None]
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
            f"{method.label}: {full} of {len(weights)} records count in full, together "
            f"{weights.mean():.0%} of the batch is kept"
        )
    top: dict[str, Any] = {"range": [0, 1.05]}
    panels = [
        Panel(
            "Tail function",
            "Importance from 1 at the start of the tail to 0 at its end.",
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
        "average clip norm: no private batch was looked at. Weights do not cost privacy: adding "
        "or removing a record still moves the sum by at most its clip norm."
    )
    numbers = {str(method.number) for method, _ in used}
    keys = [
        Key(str(m.number), m.label, plots.colour(m.number), plots.dash(m.number))
        for m in study.methods
        if str(m.number) in numbers
    ]
    return Figure("importance", panels, caption, keys if len(keys) > 1 else [], height=280)


def _typical_weights(method: Method, ino: INO) -> np.ndarray:
    plan = method.runs[0].plan
    count = max(1, round(plan.expected_batch_size))
    total = float(plan.sampling_rates @ (plan.records * plan.clip_norms))
    clips = np.full(count, total / plan.expected_batch_size)
    return ino.weights(np.arange(count, 0, -1.0), clips)


def _line(method: Method, x: np.ndarray, y: np.ndarray, filled: bool) -> Trace:
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
