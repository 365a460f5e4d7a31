"""The utility figures: how well each group is learned, which groups gain, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import stats

from ownerwise.evaluation import FEW_GROUPS
from ownerwise.report import plots
from ownerwise.report.comparison import METRICS, Comparison, MethodRuns
from ownerwise.report.curves import MOST_POINTS, Curve, curve
from ownerwise.report.groups import MOST_NAMED, ValidationGroup, by_member, most_telling
from ownerwise.report.plots import Figure, LegendEntry, Panel, Trace, View
from ownerwise.report.verdicts import stricter_half
from ownerwise.wording import epsilon, percent, points

MOST_PANELS = 12
_FEWEST_POINTS, _ALL_POINTS = 40, 150_000
_MARGIN = 0.04
_WIDE_BUDGETS = 8.0


def method_legend(comparison: Comparison) -> list[LegendEntry]:
    """Return the legend for the methods; empty if there is only one."""
    if len(comparison.methods) == 1:
        return []
    return [plots.legend_entry(method.number, method.label) for method in comparison.methods]


def learning_curves(comparison: Comparison) -> Figure | None:
    """Return recall and loss over training, one panel per group."""
    named = comparison.groups[:MOST_NAMED]
    tracks = {
        what: {
            (group, method.label): track
            for group in named
            for method in comparison.methods
            if (track := curve(method.runs, lambda e, g=group, w=what: g.of(e, w))) is not None
        }
        for what in ("recall", "loss")
    }
    if not tracks["recall"] or max(len(c.steps) for c in tracks["recall"].values()) < 2:
        return None
    ends = [min(_end(m, g, tracks["recall"]) for m in comparison.methods) for g in named]
    shown = most_telling(named, ends, MOST_PANELS)
    most = max(_FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // (6 * len(tracks["recall"]))))
    ranges = {what: _range(tracks[what].values(), unit=what == "recall") for what in tracks}

    def view(group: ValidationGroup, what: str) -> View:
        form = ".1%" if what == "recall" else ".3g"
        traces = [
            trace
            for method in comparison.methods
            if (track := tracks[what].get((group, method.label))) is not None
            for trace in plots.line_with_band(track, method.number, method.label, form, most)
        ]
        axis: dict[str, Any] = {"range": ranges[what], "nticks": 5}
        if what == "recall":
            axis["tickformat"] = ".0%"
        layout = plots.axes("step", "", yaxis=axis, xaxis={"nticks": 5})
        layout["margin"] = {"l": 42, "r": 10, "t": 6, "b": 38}
        return View(traces, layout)

    panels = [
        Panel(
            _group_title(comparison, group),
            f"{_group_title(comparison, group)}: recall from start to end of training. "
            + "; ".join(
                _journey(m, tracks["recall"].get((group, m.label))) for m in comparison.methods
            ),
            {"Recall": view(group, "recall"), "Loss": view(group, "loss")},
            shown=group in shown,
        )
        for group in named
    ]
    caption = (
        "Recall is the share of a group's validation records that are classified correctly (not "
        "private). All panels have the same axes; the strictest budget comes first. "
        + _band(comparison)
    )
    if len(named) < len(comparison.groups):
        caption += f" {len(comparison.groups) - len(named)} more groups are not shown."
    return Figure("learning", panels, caption, method_legend(comparison), height=210, small=True)


def _end(method: MethodRuns, group: ValidationGroup, tracks: dict[Any, Curve]) -> float:
    track = tracks.get((group, method.label))
    return math.inf if track is None else float(track.mean[-1])


def _group_title(comparison: Comparison, group: ValidationGroup) -> str:
    if group.pooled:
        return group.name
    budget = "" if group.epsilon is None else f" · ε {epsilon(group.epsilon)}"
    budget += f" per {comparison.facts.units}" if budget else ""
    return f"{comparison.group_noun} {group.name}{budget}"


def _journey(method: MethodRuns, track: Curve | None) -> str:
    if track is None:
        return f"{method.label} not measured"
    return f"{method.label} {percent(track.mean[0])} to {percent(track.mean[-1])}"


def _band(comparison: Comparison) -> str:
    most = max(len(method.runs) for method in comparison.methods)
    if most == 1:
        return "With one run per method, it is unclear which differences are due to chance."
    return f"The band shows one standard deviation over runs (up to {most} per method)."


def _range(tracks: Iterable[Curve], *, unit: bool) -> list[float]:
    """Return an axis range that covers all curves and bands."""
    ends = [
        edge
        for track in tracks
        for deviation in (0.0 if track.deviation is None else track.deviation,)
        for edge in (track.mean - deviation, track.mean + deviation)
    ]
    values = np.concatenate(ends)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = _MARGIN * (high - low or 1.0)
    low, high = low - margin, high + margin
    if unit:
        low, high = max(low, -_MARGIN), min(high, 1 + _MARGIN)
    return [round(low, 4), round(high, 4)]


def worst_and_overall(comparison: Comparison) -> Figure | None:
    """Return the worst group's recall and the overall accuracy over training."""
    picks: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "Worst group": lambda e: (e.get("worst_group") or {}).get("recall"),
        "All records": lambda e: e.get("accuracy"),
    }
    panels = []
    for title, pick in picks.items():
        tracks = {m.label: t for m in comparison.methods if (t := curve(m.runs, pick)) is not None}
        tracks = {label: t for label, t in tracks.items() if np.isfinite(t.mean).sum() > 1}
        if not tracks:
            continue
        traces = [
            trace
            for m in comparison.methods
            if m.label in tracks
            for trace in plots.line_with_band(
                tracks[m.label], m.number, m.label, ".1%", MOST_POINTS
            )
        ]
        axis = {"tickformat": ".0%", "range": _range(tracks.values(), unit=True)}
        words = "; ".join(_journey(m, tracks.get(m.label)) for m in comparison.methods)
        layout = plots.axes("step", "recall" if "group" in title else "accuracy", yaxis=axis)
        panels.append(Panel(title, f"{title}: {words}", {"": View(traces, layout)}))
    if not panels:
        return None
    caption = (
        "“Worst group” is the lowest recall of any group at each evaluation. “All records” is the "
        "share of validation records that are classified correctly. Neither is private. "
        + _band(comparison)
    )
    if len(panels) == 1:
        caption = "Share of validation records that are classified correctly (not private). "
        caption += _band(comparison)
    return Figure("worst", panels, caption, method_legend(comparison))


def gain_against_budget(comparison: Comparison) -> Figure | None:
    """Return each group's gain over the baseline against its budget, with a regression line."""
    budgets = {n: e for run in reversed(comparison.runs) for n, e in run.group_budgets.items()}
    groups = [g for g in by_member(comparison.groups, budgets) if g.epsilon is not None]
    if not comparison.others or len(groups) < 2:
        return None
    noun, units = comparison.group_noun, comparison.facts.units
    named = len(groups) <= MOST_NAMED
    names = [
        g.name if g.pooled else f"{noun} {g.name}" if named else f"One {noun.lower()}"
        for g in groups
    ]
    x = np.array([group.epsilon for group in groups], dtype=np.float64)
    scales = {"ε": x}
    if x.max() > _WIDE_BUDGETS * x.min():
        scales["log ε"] = np.log10(x)
    traces: dict[str, list[Trace]] = {scale: [] for scale in scales}
    findings, bars = [], ""
    for method in comparison.others:
        gains = [_gain(comparison, method, group) for group in groups]
        y = np.array([gain for gain, _ in gains])
        errors = [error for _, error in gains if error is not None]
        cloud = plots.points(
            x.tolist(),
            y.tolist(),
            method.number,
            method.label,
            names=names,
            hover=f"%{{text}}<br>ε %{{x:.3g}} per {units}<br>%{{y:+.1f}} points",
            y_error=errors or None,
        )
        if errors:
            bars = " Error bars show the standard deviation of the difference over runs."
        correlations = []
        for scale, values in scales.items():
            line, words = _regression(x, values, y, method)
            correlations.append(words.format(scale=scale))
            traces[scale] += [cloud, *line]
        correlations = list(dict.fromkeys(correlations))
        half = stricter_half(comparison, method, comparison.baseline)
        words = [f"{' and '.join(correlations)}, n = {len(x)}", half]
        findings.append(f"{method.label}: {'; '.join(filter(None, words))}.")
    unit = f"recall vs {plots.text(comparison.baseline.label)} (points)"
    views = {}
    for scale, drawn in traces.items():
        layout = plots.axes(f"ε of the {noun.lower()} (per {units})", unit, hovermode="closest")
        layout["yaxis"].update(zeroline=True, zerolinewidth=2)
        if scale != "ε":
            layout["xaxis"].update(type="log", dtick="D2", tickformat="~g")
        views[scale] = View(drawn, layout)
    caption = (
        f"Each point is one {noun.lower()} at the end of training, on {comparison.data_split} data "
        f"(not private). Above zero, recall is higher than under {comparison.baseline.label}; "
        "budgets are stricter towards the left. The lines are least-squares fits, and Pearson’s r "
        f"describes these points; neither is a test. {' '.join(findings)}{bars}"
    )
    panel = Panel("", f"Gain in recall against budget. {' '.join(findings)}", views)
    baseline = str(comparison.baseline.number)
    legend = [entry for entry in method_legend(comparison) if entry.series != baseline]
    return Figure("gain", [panel], caption, legend if len(legend) > 1 else [], height=380)


def _gain(
    comparison: Comparison, method: MethodRuns, group: ValidationGroup
) -> tuple[float, float | None]:
    """Return a group's gain over the baseline in points, and its standard deviation over seeds."""
    mine, theirs = (
        comparison.group_recall(method, group),
        comparison.group_recall(comparison.baseline, group),
    )
    error = None
    if mine.deviation is not None and theirs.deviation is not None:
        error = 100 * math.hypot(mine.deviation, theirs.deviation)
    return 100 * (mine.mean - theirs.mean), error


def _regression(
    x: np.ndarray, values: np.ndarray, y: np.ndarray, method: MethodRuns
) -> tuple[list[Trace], str]:
    """Return the regression line at x, and a label with Pearson's r between `values` and y."""
    if len(x) < FEW_GROUPS or np.allclose(x, x[0]) or np.allclose(y, y[0]):
        return [], "too few distinct points for a correlation"
    result: Any = stats.pearsonr(values, y)
    r = float(result.statistic)
    slope, intercept = np.polyfit(values, y, 1)
    ends = [int(x.argmin()), int(x.argmax())]
    trace = {
        "type": "scatter",
        "mode": "lines",
        "hoverinfo": "skip",
        "legendgroup": str(method.number),
        "x": plots.numbers(x[ends]),
        "y": plots.numbers(intercept + slope * values[ends]),
        "line": {
            "color": plots.colour(method.number),
            "width": 2,
            "dash": plots.dash(method.number),
        },
    }
    r_words = f"{r:.2f}".replace("-", "−")
    return [trace], f"r = {r_words} with {{scale}}"


def trade_off(comparison: Comparison) -> Figure | None:
    """Return overall accuracy against spread, with a point per run and a mean per method."""
    accuracy, spread = METRICS[0], METRICS[-1]
    if not comparison.others:
        return None
    singles, means, words = [], [], []
    for method in comparison.methods:
        x, y = comparison.amounts(method, accuracy), comparison.amounts(method, spread)
        if x is None or y is None:
            continue
        words.append(f"{method.label}: accuracy {percent(x.mean)}, spread {points(y.mean)}")
        hover = "%{text}<br>accuracy %{x:.1f}%<br>spread %{y:.1f} points"
        if x.deviation is not None and y.deviation is not None:
            singles.append(
                plots.points(
                    [100 * (comparison.value(run, accuracy) or 0.0) for run in method.runs],
                    [100 * (comparison.value(run, spread) or 0.0) for run in method.runs],
                    method.number,
                    method.label,
                    names=[f"{method.label}, {run.name}" for run in method.runs],
                    hover=hover,
                    size=7,
                    opacity=0.35,
                )
            )
        means.append(
            plots.points(
                [100 * x.mean],
                [100 * y.mean],
                method.number,
                method.label,
                names=[method.label],
                hover=hover,
                x_error=None if x.deviation is None else [100 * x.deviation],
                y_error=None if y.deviation is None else [100 * y.deviation],
                size=15,
            )
        )
    if not means:
        return None
    layout = plots.axes("overall accuracy (%)", "spread over groups (points)", hovermode="closest")
    layout["annotations"] = [
        {"text": "better: lower right ↘", "xref": "paper", "yref": "paper", "x": 1, "y": 1,
         "xanchor": "right", "yanchor": "top", "showarrow": False}
    ]  # fmt: skip
    caption = (
        "Spread is the standard deviation of recall over groups; 0 means equal recall for all. "
        "Large markers are means over runs, with error bars of one standard deviation; faint "
        f"markers are single runs. Measured at the end of training on {comparison.data_split} data "
        "(not private)."
    )
    panel = Panel("", "Trade-off. " + "; ".join(words), {"": View(singles + means, layout)})
    return Figure("trade-off", [panel], caption, method_legend(comparison), height=380)
