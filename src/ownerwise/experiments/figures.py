"""Figures of results with matplotlib (`pip install 'ownerwise[figures]'`).

All curves are measured on validation or test records, which no guarantee covers. Bands are one
standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError
from ownerwise.experiments import summary
from ownerwise.experiments.summary import BASELINE, Result, Study, spread_out
from ownerwise.plan_files import write_whole

_MOST_GROUPS = 4
_STYLES = ("--", "-", ":", "-.")
_COMPARED = ("idp", "ino", "ino-budget")
_FAMILIES = {
    "idp": "IDP-SGD",
    "uniform": "DP-SGD",
    "ino": "INO-SGD",
    "ino-budget": "INO-SGD budget-aware",
    "lowered": "lowered budgets",
    "undersample": "undersampled",
}


def write_figures(study: Study, folder: str | PathLike) -> list[Path]:
    """Draw every figure that a study has the runs for, and return where they lie."""
    written = []
    for name, draw in _FIGURES.items():
        figure = draw(study)
        if figure is not None:
            path = Path(folder) / f"{study.name}-{name}.svg"
            save(figure, path)
            written.append(path)
    return written


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ownerwise"}):
        write_whole(
            path,
            lambda file: figure.savefig(
                file, format="svg", bbox_inches="tight", metadata={"Date": None}
            ),
        )


def owner_curves(study: Study) -> Any:
    """Recall of owners with budgets from strict to lax over training, method against method."""
    methods = _compared(study)
    if not methods:
        return None
    groups = spread_out(list(study.budgets), _MOST_GROUPS)
    figure, axes = new_figure(len(groups))
    for axis, group in zip(axes, groups, strict=True):
        for style, method in zip(_STYLES, methods, strict=False):
            _curve(axis, study, method, lambda line, g=group: line["groups"][g]["recall"], style)
        axis.set_title(f"{group}, epsilon {study.budgets[group]:g}")
    return _finish(figure, axes, "step", "recall", share=True)


def overall_curves(study: Study) -> Any:
    """Overall accuracy and the worst group over training."""
    methods = _compared(study)
    if not methods:
        return None
    figure, axes = new_figure(2)
    for style, method in zip(_STYLES, methods, strict=False):
        _curve(axes[0], study, method, lambda line: line["accuracy"], style)
        _curve(axes[1], study, method, lambda line: line["worst_group"]["recall"], style)
    axes[0].set_title("all records")
    axes[1].set_title("worst group")
    return _finish(figure, axes, "step", "accuracy", share=True)


def gains(study: Study) -> Any:
    """Gain in recall over IDP-SGD against the budget, with a straight line."""
    if BASELINE not in study.methods:
        return None
    found = {
        method: summary.gain(study.methods[BASELINE], study.methods[method])
        for method in _compared(study)
        if method != BASELINE
    }
    known = {name: one for name, one in found.items() if one and one.correlation is not None}
    if not known:
        return None
    figure, axes = new_figure(len(known))
    for axis, (method, one) in zip(axes, known.items(), strict=True):
        budgets = np.array([study.budgets[group] for group in one.by_group])
        points = 100 * np.array(list(one.by_group.values()))
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.scatter(budgets, points)
        axis.plot(budgets, np.polyval(np.polyfit(budgets, points, 1), budgets), color="tab:orange")
        axis.set_title(f"{study.label(method)}, r = {one.correlation:.2f}, p = {one.p:.2g}")
    return _finish(figure, axes, "epsilon", "gain in recall, points", legend=False)


def class_curves(study: Study) -> Any:
    """Recall of classes within each owner over training."""
    methods = _compared(study)[:2]
    if not methods or "classes" not in study.methods[methods[0]][0]["history"][0]:
        return None
    classes = study.methods[methods[0]][0]["history"][0]["classes"]
    figure, axes = new_figure(len(study.budgets))
    for axis, group in zip(axes, study.budgets, strict=True):
        for number, name in enumerate(spread_out(list(classes[group]), _MOST_GROUPS)):
            for style, method in zip(_STYLES, methods, strict=False):
                _curve(
                    axis,
                    study,
                    method,
                    lambda line, g=group, n=name: line["classes"][g][n]["recall"],
                    style,
                    colour=f"C{number}",
                    label=f"{name}, {study.label(method)}",
                    band=False,
                )
        axis.set_title(f"{group}, epsilon {study.budgets[group]:g}")
    return _finish(figure, axes, "step", "recall", share=True)


def trade_off(study: Study) -> Any:
    """Spread over groups against overall accuracy: down and to the right is better."""
    figure, axes = new_figure(1)
    drawn = 0
    for (method, family), marker in zip(_FAMILIES.items(), "^vosDx", strict=True):
        members = [runs for runs in study.methods.values() if _method(runs) == method]
        measured = map(summary.over_seeds, sorted(members, key=_strength))
        points = [(one["accuracy"].mean, one["spread"].mean) for one in measured]
        if points:
            axes[0].plot(*zip(*points, strict=True), marker=marker, label=family)
            drawn += len(points)
    return _finish(figure, axes, "accuracy", "spread over groups") if drawn > 2 else None


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    """Return a figure with panels side by side, at most three to a row, and the panels."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OwnerwiseError(
            f"figures need another package: {error}; pip install 'ownerwise[figures]'"
        ) from None
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=True)).flatten())
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def _method(runs: Sequence[Result]) -> str:
    return runs[0]["spec"].partition(":")[0]


def _strength(runs: Sequence[Result]) -> float:
    """Return how strongly a method acts, for the order of a curve: its argument, or its tail."""
    argument = runs[0]["spec"].partition(":")[2]
    return float(argument or runs[0]["config"].get("weights", {}).get("tail", 0.0))


def _compared(study: Study) -> list[str]:
    return [name for name in _COMPARED if name in study.methods]


def _curve(
    axis: Any,
    study: Study,
    method: str,
    value: Callable[[dict[str, Any]], float],
    style: str,
    *,
    colour: str | None = None,
    label: str | None = None,
    band: bool = True,
) -> None:
    """Draw the mean over seeds and, as a band, the deviation."""
    runs: Sequence[Result] = study.methods[method]
    steps = [line["step"] for line in runs[0]["history"]]
    values = np.array([[value(line) for line in run["history"]] for run in runs])
    mean, deviation = values.mean(axis=0), values.std(axis=0)
    (drawn,) = axis.plot(
        steps, mean, style, color=colour, label=label or study.label(method), linewidth=1.4
    )
    if band and len(runs) > 1:
        axis.fill_between(
            steps, mean - deviation, mean + deviation, color=drawn.get_color(), alpha=0.15
        )


def _finish(
    figure: Any, axes: list[Any], x: str, y: str, *, legend: bool = True, share: bool = False
) -> Any:
    for axis in axes:
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
        if share:
            axis.set_ylim(-0.02, 1.02)
        if legend:
            axis.legend(fontsize=7)
    return figure


_FIGURES = {
    "owners": owner_curves,
    "overall": overall_curves,
    "gain": gains,
    "classes": class_curves,
    "trade-off": trade_off,
}
"""Figures by name: those of INO-SGD numbered 5, 7 and 12, 6, 15 and 20."""
