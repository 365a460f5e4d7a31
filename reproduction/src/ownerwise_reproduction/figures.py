"""Figures of a study: curves over training, gains against budgets, trade-offs and ablations.

All curves are measured on validation or test records, which no guarantee covers. Bands show one
standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise_reproduction import ablations, drawing, provenance, summary
from ownerwise_reproduction.drawing import finish, new_figure, save, say
from ownerwise_reproduction.summary import BASELINE, MANY_GROUPS, METRICS, Result, Study, spread_out

_MOST_GROUPS = 4
_STYLES = ("--", "-", ":", "-.")
_COMPARED = ("idp", "ino", "ino-budget")
_FROM_BASELINE = ("ino", "lowered", "undersample")
_FAMILIES = {
    "idp": "IDP-SGD",
    "uniform": "DP-SGD",
    "idp-calibrated": "IDP-SGD calibrated",
    "ino": "INO-SGD",
    "ino-budget": "INO-SGD budget-aware",
    "lowered": "lowered budgets",
    "undersample": "undersampled",
}


@dataclass(frozen=True)
class Picture:
    """A figure on disk.

    Attributes:
        path: path of the file.
        caption: what it shows.
    """

    path: Path
    caption: str


def write_figures(study: Study, folder: str | PathLike) -> list[Picture]:
    """Plot and return every figure for which a study has the necessary runs."""
    written = []
    for name, (draw, caption) in _FIGURES.items():
        figure = draw(study)
        if figure is not None:
            path = Path(folder) / study.name / f"{name}.svg"
            save(figure, path)
            mixed = provenance.is_mixed(study)
            written.append(Picture(path, _OF_GROUPS.get(name, caption) if mixed else caption))
    return written


def owner_curves(study: Study) -> Any:
    """Plot each owner's recall over training, from strict to lax owners, for each method."""
    methods = _compared(study)
    if not methods:
        return None
    groups = spread_out(list(study.budgets), _MOST_GROUPS)
    figure, axes = new_figure(len(groups))
    for axis, group in zip(axes, groups, strict=True):
        for style, method in zip(_STYLES, methods, strict=False):
            _curve(axis, study, method, lambda line, g=group: line["groups"][g]["recall"], style)
        axis.set_title(_title(study, group))
    strictest = groups[0]
    say(
        figure,
        f"{_title(study, strictest)}: "
        + _ends(study, methods, lambda line: line["groups"][strictest]["recall"], "recall"),
    )
    return finish(figure, axes, "step", "recall", share=True)


def overall_curves(study: Study) -> Any:
    """Plot overall, worst-group and, with many groups, worse-half accuracy over training."""
    methods = _compared(study)
    if not methods:
        return None
    shown: dict[str, Callable[[dict[str, Any]], float]] = {
        "all records": lambda line: line["accuracy"],
        "worst group": lambda line: line["worst_group"]["recall"],
    }
    if len(study.budgets) >= MANY_GROUPS:
        shown["worse half of the groups"] = summary.worst_half
    figure, axes = new_figure(len(shown))
    for axis, (title, value) in zip(axes, shown.items(), strict=True):
        for style, method in zip(_STYLES, methods, strict=False):
            _curve(axis, study, method, value, style)
        axis.set_title(title)
    say(figure, "All records: " + _ends(study, methods, shown["all records"], "accuracy"))
    return finish(figure, axes, "step", "accuracy", share=True)


def gains(study: Study) -> Any:
    """Plot the gain in recall over IDP-SGD against the budget, with a fitted line."""
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
        axis.axhline(0, color=drawing.colour(6), linewidth=0.8)
        axis.scatter(budgets, points, color=drawing.colour(1))
        axis.plot(
            budgets, np.polyval(np.polyfit(budgets, points, 1), budgets), color=drawing.colour(0)
        )
        axis.set_title(f"{study.label(method)}, r = {one.correlation:.2f}, p = {one.p:.2g}")
    linked = [
        study.label(name) for name, one in known.items() if one.p is not None and one.p < 0.05
    ]
    words = f"Gain depends on the budget: {', '.join(linked)}" if linked else ""
    say(figure, words or "The gain in recall shows no clear link with the budget")
    return finish(
        figure, axes, "ε of the owner", "gain in recall over IDP-SGD, points", legend=False
    )


def class_curves(study: Study) -> Any:
    """Plot the recall of each owner's classes over training."""
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
                    colour=drawing.colour(number),
                    label=f"{name}, {study.label(method)}",
                    band=False,
                )
        axis.set_title(_title(study, group))
    say(figure, "Classes of the same owner are learned at different times")
    return finish(figure, axes, "step", "recall", share=True)


def trade_off(study: Study) -> Any:
    """Plot the spread across groups against overall accuracy; the lower-right corner is best.

    Curves of methods that include IDP-SGD as a limiting case start at its point. Error bars show
    standard deviations over seeds; the star marks INO-SGD with the setting's values.
    """
    members = {
        method: sorted(
            (runs for runs in study.methods.values() if _method(runs) == method), key=_strength
        )
        for method in _FAMILIES
    }
    if sum(map(len, members.values())) <= 2:
        return None
    figure, axes = new_figure(2)
    for axis, overall in zip(axes, ("accuracy", "balanced_accuracy"), strict=True):
        for (method, family), marker in zip(_FAMILIES.items(), "^vPosDx", strict=True):
            start = members[BASELINE] if members[method] and method in _FROM_BASELINE else []
            points = [_point(runs, overall) for runs in (*start, *members[method])]
            if points:
                above = 3 if method == BASELINE else 2
                x, x_error, y, y_error = zip(*points, strict=True)
                (drawn,) = axis.plot(x, y, marker=marker, label=family, zorder=above)
                colour = drawn.get_color()
                axis.errorbar(x, y, y_error, x_error, fmt="none", ecolor=colour, elinewidth=0.5)
        if "ino" in study.methods:
            x, _, y, _ = _point(study.methods["ino"], overall)
            axis.plot(x, y, "*", color=drawing.colour(6), markersize=11, zorder=4)
        finish(figure, [axis], METRICS[overall], "spread over groups")
        axis.locator_params(axis="x", nbins=6)
    say(figure, "Accuracy against balance: lower and further right is better")
    return figure


def _point(runs: Sequence[Result], overall: str) -> tuple[float, float, float, float]:
    """Return the mean and standard deviation over seeds of the accuracy and of the spread."""
    measured = summary.over_seeds(runs)
    x, y = measured[overall], measured["spread"]
    return x.mean, x.deviation or 0.0, y.mean, y.deviation or 0.0


def _method(runs: Sequence[Result]) -> str:
    return runs[0]["spec"].partition(":")[0]


def _strength(runs: Sequence[Result]) -> tuple[float, ...]:
    """Return a method's argument or tail, by which the points of a curve are ordered."""
    argument = runs[0]["spec"].partition(":")[2]
    numbers = argument.split("/") if argument else [_tail(runs)]
    return tuple(map(float, numbers))


def _tail(runs: Sequence[Result]) -> float:
    return runs[0]["config"].get("weights", {}).get("tail", 0.0)


def _compared(study: Study) -> list[str]:
    return [name for name in _COMPARED if name in study.methods]


def _ends(
    study: Study, methods: Sequence[str], value: Callable[[dict[str, Any]], float], what: str
) -> str:
    """Return the mean over seeds at the end of training, for each method, in words."""
    ends = {
        method: np.mean([value(run["history"][-1]) for run in study.methods[method]])
        for method in methods
    }
    words = (f"{study.label(method)} {100 * end:.1f}%" for method, end in ends.items())
    return f"{what} at the end {', '.join(words)}"


def _title(study: Study, group: str) -> str:
    """Return the name of a group, with its budget if it has one."""
    return group if provenance.is_mixed(study) else f"{group}, ε {study.budgets[group]:g}"


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
    """Plot the mean over seeds, with the standard deviation as a band."""
    runs: Sequence[Result] = study.methods[method]
    steps = [line["step"] for line in runs[0]["history"]]
    values = np.array([[value(line) for line in run["history"]] for run in runs])
    mean = values.mean(axis=0)
    (drawn,) = axis.plot(
        steps, mean, style, color=colour, label=label or study.label(method), linewidth=1.4
    )
    if band and len(runs) > 1:
        deviation = values.std(axis=0, ddof=1)
        axis.fill_between(
            steps, mean - deviation, mean + deviation, color=drawn.get_color(), alpha=0.15
        )


_FIGURES: dict[str, tuple[Callable[[Study], Any], str]] = {
    "owners": (owner_curves, "Recall of each owner over training, from strict to lax owners."),
    "overall": (overall_curves, "Accuracy over training, overall and in the worst groups."),
    "gain": (gains, "Gain in recall over IDP-SGD against the owner's budget."),
    "classes": (class_curves, "Recall of each owner's classes over training."),
    "trade-off": (
        trade_off,
        "Spread over groups against overall accuracy; lower and further right is better. Error "
        "bars show one standard deviation over seeds; the star marks INO-SGD with the setting's "
        "tail.",
    ),
    "tails": (ablations.tails, "INO-SGD results by tail length, after each quarter of the steps."),
    "shapes": (ablations.shapes, "INO-SGD results by the tail's shape parameters, alpha and beta."),
    "orders": (ablations.orders, "INO-SGD results by the order in which records lose weight."),
    "class-budgets": (
        ablations.class_budgets,
        "Change of each class's recall, in points, if one class has another budget.",
    ),
}
"""Figures by name; they match the INO-SGD paper's Figures 5, 7 and 12, 6, 15, 20, 16, 17 and 19;
the last one matches the IDP-SGD paper's Figures 5 and 6."""

_OF_GROUPS = {
    "owners": "Recall of groups over training.",
    "gain": "Gain in recall over IDP-SGD against the group's mean budget.",
    "classes": "Recall of each group's classes over training.",
}
"""Captions for studies in which groups are not owners."""
