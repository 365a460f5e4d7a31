"""Building blocks for charts, as plain dictionaries for plotly.

Colours are tokens such as "@series-0". Whenever the page draws a chart, it replaces them with the
colours of its light or dark theme. "@ramp:0.25" is a colour on a scale from the strictest (0) to
the laxest budget (1).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ownerwise.report.curves import Curve

COLOURS = 7
_DASHES = ("dash", "solid", "dot", "dashdot", "longdash")
_MARKERS = ("circle", "diamond", "square", "triangle-up", "cross")
_MARKS_PER_LINE = 5
_GOLDEN = 0.618  # spreads the marks of any number of lines
Trace = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One drawing: its traces, and how its layout differs from the shared layout."""

    traces: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One chart in a figure.

    Attributes:
        title: heading above the chart; "" for none.
        description: a description of the chart for readers who cannot see it.
        views: drawings by name; the reader can switch between them.
        shown: whether the chart is drawn initially, or only when the reader selects it.
    """

    title: str
    description: str
    views: dict[str, View]
    shown: bool = True


@dataclass(frozen=True)
class LegendEntry:
    """A legend entry; clicking it hides or shows the traces in its series."""

    series: str
    label: str
    colour: str
    dash: str = "solid"
    marker: str = ""


@dataclass(frozen=True)
class Figure:
    """Charts with a common legend and caption."""

    name: str
    panels: list[Panel]
    caption: str
    legend: list[LegendEntry] = field(default_factory=list)
    height: int = 340
    small: bool = False


def legend_entry(number: int, label: str) -> LegendEntry:
    """Return the legend entry of series `number`."""
    return LegendEntry(str(number), label, colour(number), dash(number), marker(number))


def dash(number: int) -> str:
    """Return the dash pattern for method `number`; the baseline, 0, is dashed."""
    return _DASHES[number % len(_DASHES)]


def marker(number: int) -> str:
    """Return the marker of method `number`."""
    return _MARKERS[number % len(_MARKERS)]


def colour(number: int, band: bool = False) -> str:
    """Return the colour token for method `number`, or for its translucent band."""
    return f"@{'band' if band else 'series'}-{number % COLOURS}"


def text(value: object) -> str:
    """Return a name as text that plotly shows literally, whatever it contains."""
    return html.escape(str(value), quote=False)


def numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Return the values rounded to `digits` significant digits, with None for non-finite values."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values]


def line_with_band(curve: Curve, number: int, label: str, form: str, most: int) -> list[Trace]:
    """Return a method's line over steps and its band of one standard deviation."""
    curve = curve.thinned(most)
    traces: list[Trace] = []
    hover = f"%{{y:{form}}}"
    drawn = line(numbers(curve.steps, 9), numbers(curve.mean), number, label)
    if curve.deviation is not None:
        known = np.isfinite(curve.mean) & np.isfinite(curve.deviation)
        x, mean, deviation = (a[known] for a in (curve.steps, curve.mean, curve.deviation))
        outline = np.concatenate([mean - deviation, (mean + deviation)[::-1]])
        if form.endswith("%"):
            outline = outline.clip(0.0, 1.0)
        traces.append(
            {
                "type": "scatter",
                "mode": "none",
                "fill": "toself",
                "hoverinfo": "skip",
                "legendgroup": str(number),
                "x": numbers(np.concatenate([x, x[::-1]]), 9),
                "y": numbers(outline),
                "fillcolor": colour(number, band=True),
            }
        )
        drawn["customdata"] = numbers(curve.deviation, 3)
        hover += f" ± %{{customdata:{form}}}"
    drawn["hovertemplate"] = hover
    return [*traces, drawn]


def line(x: Sequence[Any], y: Sequence[Any], number: int, label: str) -> Trace:
    """Return the line of series `number` through these points.

    Lines that coincide can be told apart: dashed lines are drawn on top of solid ones, and the
    markers of different series are of different shape and at different places.
    """
    apart = max(1, len(x) // _MARKS_PER_LINE)
    first = int(apart * (number * _GOLDEN % 1))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "zorder": COLOURS - number,
        "marker": {
            "symbol": f"{marker(number)}-open",
            "size": [7 if at % apart == first else 0 for at in range(len(x))],
            "color": colour(number),
            "line": {"color": colour(number), "width": 1.6},
        },
        "name": text(label),
        "legendgroup": str(number),
        "x": x,
        "y": y,
        "line": {"color": colour(number), "dash": dash(number), "width": 2.2},
    }


def points(
    x: Sequence[float],
    y: Sequence[float],
    number: int,
    label: str,
    *,
    names: Sequence[str],
    hover: str,
    x_error: Sequence[float] | None = None,
    y_error: Sequence[float] | None = None,
    size: int = 10,
    opacity: float = 1.0,
) -> Trace:
    """Return a method's points, with error bars if there are any; `hover` may use %{text}."""
    trace: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": text(label),
        "legendgroup": str(number),
        "x": numbers(x),
        "y": numbers(y),
        "text": [text(name) for name in names],
        "hovertemplate": hover + "<extra></extra>",
        "marker": {
            "color": colour(number),
            "size": size,
            "opacity": opacity,
            "symbol": marker(number),
            "line": {"color": "@card", "width": 1},
        },
    }
    for axis, error in (("error_x", x_error), ("error_y", y_error)):
        if error is not None:
            trace[axis] = {
                "array": numbers(error, 3),
                "color": colour(number),
                "thickness": 1.2,
                "width": 3,
            }
    return trace


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Return a layout with titled axes; keywords such as `yaxis={...}` extend it."""
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for name, value in more.items():
        if name in layout:
            layout[name].update(value)
        else:
            layout[name] = value
    return layout


TEMPLATE: dict[str, Any] = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
                 "size": 12, "color": "@muted"},
        "margin": {"l": 56, "r": 14, "t": 10, "b": 44},
        "showlegend": False,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@muted", "activecolor": "@accent"},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@rule", "font": {"color": "@ink"}},
        "xaxis": {"gridcolor": "@grid", "zerolinecolor": "@grid", "linecolor": "@rule",
                  "automargin": True, "title": {"standoff": 8}},
        "yaxis": {"gridcolor": "@grid", "zerolinecolor": "@rule", "linecolor": "@rule",
                  "automargin": True, "title": {"standoff": 8}},
    }
}  # fmt: skip
"""The layout that all charts share."""
