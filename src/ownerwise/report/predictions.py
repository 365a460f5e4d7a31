"""The section on the quality of predictions: AUC, sensitivity, calibration, the majority class.

The numbers are those of `ownerwise.evaluation.classification`, at the end of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ownerwise.evaluation import SMALLEST_GROUP, Estimate
from ownerwise.report import plots
from ownerwise.report.blocks import Block, Details, Section, Table, Text, Tile
from ownerwise.report.comparison import Comparison, MethodRuns
from ownerwise.report.plots import Figure, Panel, Trace, View
from ownerwise.runs import Run
from ownerwise.wording import epsilon, percent, signed_points, whole

_TITLES = {
    "accuracy": "Accuracy",
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
    "auc": "AUC",
    "calibration_error": "Calibration error",
}
_UNKNOWN = "–"
_FEW_CLASSES = 6
_INTERVALS = (
    "In parentheses: 95% intervals for chance in the evaluated records, not in training (Wilson; "
    "for the AUC with the variance of DeLong or of Hanley and McNeil, whichever is larger; for the "
    "calibration error, a conservative interval)."
)


def estimate(evaluations: Sequence[Mapping[str, Any]], *path: str) -> Estimate | None:
    """Return an estimate, averaged over evaluations together with the ends of its interval."""
    found = []
    for evaluation in evaluations:
        value: Any = evaluation.get("classification")
        for name in path:
            value = None if value is None else value.get(name)
        if value is None:
            return None
        found.append((value["value"], value["low"], value["high"]))
    return Estimate(*map(float, np.mean(found, axis=0))) if found else None


def auc_tile(comparison: Comparison, method: MethodRuns) -> list[Tile]:
    """Return a tile with the AUC of a classifier with two classes."""
    area = estimate(_finals(comparison, method), "auc")
    if area is None or not _is_binary(comparison, method):
        return []
    return [
        Tile(
            _number(area.value),
            "area under the ROC curve",
            f"{method.label}; 95% interval {_number(area.low)} to {_number(area.high)}, 0.5 for a "
            "coin",
        )
    ]


def majority_note(comparison: Comparison, method: MethodRuns) -> str:
    """Return the accuracy of always answering the most frequent class; "" if not measured."""
    name, share = _majority(comparison, method)
    return f"always answering “{name}”: {percent(share)}" if name else ""


def no_better(comparison: Comparison, method: MethodRuns) -> str:
    """Return a sentence if a method is not better than always answering one class, else ""."""
    gain = estimate(_finals(comparison, method), "majority", "gain")
    if gain is None or gain.low > 0:
        return ""
    name, share = _majority(comparison, method)
    return (
        f"{method.label} is not clearly better than always answering “{name}”, which is right for "
        f"{percent(share)} of these records: the difference is {_difference(gain)}."
    )


def unrecognised(comparison: Comparison, method: MethodRuns) -> str:
    """Return a sentence on the classes of which a method recognises no record, or ""."""
    finals = _finals(comparison, method)
    recalls: list[tuple[int, tuple[str, ...]]] = [(0, ("specificity",)), (1, ("sensitivity",))]
    for each in finals[:1]:
        known = (each.get("classification") or {}).get("recalls", {})
        recalls += [(int(number), ("recalls", number)) for number in known]
    names = [
        f"“{_class_name(comparison, number)}”"
        for number, path in recalls
        if (recall := estimate(finals, *path)) is not None and recall.value == 0
    ]
    if not names:
        return ""
    return f"{method.label} recognises no record of {' and of '.join(names)}."


def _better(comparison: Comparison, methods: Sequence[MethodRuns]) -> str:
    """Return what always answering one class would achieve, and which methods are better."""
    sentences, better = [], []
    for method in methods:
        gain = estimate(_finals(comparison, method), "majority", "gain")
        if gain is not None:
            words = no_better(comparison, method)
            sentences += [words] if words else []
            better += [] if words else [f"{method.label} by {_difference(gain)}"]
    if better:
        name, share = _majority(comparison, methods[0])
        sentences.insert(
            0,
            f"Always answering “{name}”, the most frequent class of these records, would be right "
            f"for {percent(share)}. Better than that: {', '.join(better)}.",
        )
    return " ".join(sentences)


def quality(comparison: Comparison) -> tuple[dict[str, str], list[str]] | None:
    """Return the results of a single method for the card, and sentences about them."""
    method = comparison.baseline
    if estimate(_finals(comparison, method), "accuracy") is None:
        return None
    cells = _cells(_finals(comparison, method)).items()
    known = {_title(comparison, key): cell for key, cell in cells if cell != _UNKNOWN}
    recalls = _recalls(comparison, [method])
    known |= dict(recalls) if len(recalls) <= _FEW_CLASSES else {}
    found = f"{_better(comparison, [method])} {unrecognised(comparison, method)}".strip()
    return known, [found, f"{_INTERVALS} {_dependence(comparison)}"]


def _build(comparison: Comparison) -> Sequence[Block] | None:
    methods = [m for m in comparison.methods if estimate(_finals(comparison, m), "accuracy")]
    if not methods:
        return None
    titles = {key: _title(comparison, key) for key in _TITLES}
    columns = [_cells(_finals(comparison, method)) for method in methods]
    rows = [[titles[key], *(cells[key] for cells in columns)] for key in titles]
    recalls = _recalls(comparison, methods)
    rows += recalls if len(recalls) <= _FEW_CLASSES else []
    caption = f"Measured on {comparison.data_split} records (not private; no guarantee covers them)"
    if any(len(method.runs) > 1 for method in methods):
        caption += ", mean over runs. The interval is that of a single run, also a mean over runs"
    content: list[Block] = [
        Text(_better(comparison, methods)),
        Table(caption, ["", *(method.label for method in methods)], [r for r in rows if _known(r)]),
        Text(f"{_INTERVALS} {_dependence(comparison)}", "note"),
    ]
    if (figure := reliability(comparison)) is not None:
        content.append(figure)
    if len(recalls) > _FEW_CLASSES:
        names = ["", *(method.label for method in methods)]
        content.append(Details("The recall of each class", Table(caption, names, recalls)))
    if (groups := _group_table(comparison, methods, titles)) is not None:
        content.append(groups)
    return content


def _recalls(comparison: Comparison, methods: Sequence[MethodRuns]) -> list[list[str]]:
    """Return a row with the recall of each class, if there are more than two.

    There are none if the groups are classes, which have recalls of their own.
    """
    if comparison.group_noun == "Class":
        return []
    evaluations = [_finals(comparison, method) for method in methods]
    first = (evaluations[0][0].get("classification") or {}).get("recalls", {})
    return [
        [f"Recall of “{_class_name(comparison, int(number))}”"]
        + [_cell("recalls", estimate(each, "recalls", number)) for each in evaluations]
        for number in first
    ]


def _known(row: Sequence[str]) -> bool:
    return any(cell != _UNKNOWN for cell in row[1:])


def reliability(comparison: Comparison) -> Figure | None:
    """Return observed shares against predicted probabilities."""
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "hoverinfo": "skip",
            "x": [0, 1],
            "y": [0, 1],
            "line": {"color": "@muted", "width": 1.2, "dash": "dot"},
        }
    ]
    words = []
    for method in comparison.methods:
        points = _points(_finals(comparison, method))
        if not points:
            continue
        predicted, observed, low, high = np.array(points).T
        trace = plots.points(
            predicted.tolist(),
            observed.tolist(),
            method.number,
            method.label,
            names=[method.label] * len(points),
            hover="%{text}<br>predicted %{x:.1%}<br>observed %{y:.1%}",
            size=9,
        )
        trace["mode"] = "lines+markers"
        trace["line"] = {"color": plots.colour(method.number), "dash": plots.dash(method.number)}
        trace["error_y"] = {
            "array": plots.numbers(high - observed, 3),
            "arrayminus": plots.numbers(observed - low, 3),
            "color": plots.colour(method.number),
            "thickness": 1.2,
            "width": 3,
        }
        traces.append(trace)
        error = estimate(_finals(comparison, method), "calibration_error")
        words.append(f"{method.label}: calibration error {_cell('calibration_error', error)}")
    if len(traces) == 1:
        return None
    what = (
        f"the probability of “{_class_name(comparison, 1)}”"
        if _is_binary(comparison, comparison.methods[0])
        else "the probability of the predicted class"
    )
    axis = {"range": [-0.03, 1.03], "tickformat": ".0%"}
    layout = plots.axes("predicted", "observed", hovermode="closest", xaxis=axis, yaxis=dict(axis))
    caption = (
        f"Reliability: {what} against the share of {comparison.data_split} records for which it "
        "came true (not private), in bins of equally many records. On the dotted line, "
        "probabilities can be taken at face value; above it, they are too low, and below it too "
        "high. Bars are 95% "
        f"intervals. {'. '.join(words)}."
    )
    panel = Panel("", f"Reliability. {'; '.join(words)}", {"": View(traces, layout)})
    legend = [plots.legend_entry(m.number, m.label) for m in comparison.methods]
    return Figure("reliability", [panel], caption, legend if len(legend) > 1 else [], height=380)


def _points(evaluations: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the points of the curve, averaged over evaluations with as many bins as the first."""
    curves = [(each.get("classification") or {}).get("reliability") or [] for each in evaluations]
    curves = [curve for curve in curves if curve and len(curve) == len(curves[0])]
    if not curves:
        return []
    keys = ("predicted", "observed", "low", "high")
    values = [[[point[key] for key in keys] for point in curve] for curve in curves]
    return np.mean(values, axis=0).tolist()


def _group_table(
    comparison: Comparison, methods: Sequence[MethodRuns], titles: Mapping[str, str]
) -> Details | None:
    found = []
    for group in comparison.groups:
        if len(group.members) > 1:
            continue
        for method in methods:
            of_group = [each["groups"][group.name] for each in _finals(comparison, method)]
            if estimate(of_group, "accuracy") is not None:
                budget = "–" if group.epsilon is None else epsilon(group.epsilon)
                records = whole(float(np.mean([each["records"] for each in of_group])))
                found.append(([group.name, budget, method.label, records], _cells(of_group)))
    if not found:
        return None
    shown = [key for key in titles if any(cells[key] != _UNKNOWN for _, cells in found)]
    headings = [comparison.group_noun, f"ε per {comparison.facts.units}", "Method", "Records"]
    caption = (
        f"By group, on {comparison.data_split} records (not private). Each number rests on at "
        f"least {SMALLEST_GROUP} records"
    )
    rows = [[*names, *(cells[key] for key in shown)] for names, cells in found]
    return Details(
        "The same by group", Table(caption, [*headings, *(titles[key] for key in shown)], rows)
    )


def _cells(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {key: _cell(key, estimate(evaluations, key)) for key in _TITLES}


def _cell(key: str, found: Estimate | None) -> str:
    if found is None:
        return _UNKNOWN
    if key == "auc":
        return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"
    return f"{percent(found.value)} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _difference(gain: Estimate) -> str:
    low, high = (f"{100 * end:.1f}".replace("-", "−") for end in (gain.low, gain.high))
    return f"{signed_points(gain.value)} ({low} to {high})"


def _title(comparison: Comparison, key: str) -> str:
    number = {"sensitivity": 1, "specificity": 0}.get(key)
    if number is None:
        return _TITLES[key]
    return f"{_TITLES[key]} (recall of “{_class_name(comparison, number)}”)"


def _dependence(comparison: Comparison) -> str:
    """Return what the intervals assume about records of the same owner."""
    if all("owners" in each for m in comparison.methods for each in _finals(comparison, m)):
        return "They allow for records of the same owner being alike."
    return (
        "They treat records as independent; if owners have several of these records, pass "
        "validation_owners (or test_owners), because the intervals are too narrow otherwise."
    )


def _finals(comparison: Comparison, method: MethodRuns) -> list[dict[str, Any]]:
    if comparison.source is None:
        return []
    return [comparison.final(run) for run in method.runs]


def _is_binary(comparison: Comparison, method: MethodRuns) -> bool:
    return any(
        key in (each.get("classification") or {})
        for each in _finals(comparison, method)
        for key in ("sensitivity", "specificity")
    )


def _majority(comparison: Comparison, method: MethodRuns) -> tuple[str, float]:
    """Return the most frequent class and its mean share; ("", 0) if it was not measured."""
    found = [
        (each.get("classification") or {}).get("majority") for each in _finals(comparison, method)
    ]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return "", 0.0
    names = {_named(method.runs[0], one["class"]) for one in known}
    name = names.pop() if len(names) == 1 else "the most frequent class"
    return name, float(np.mean([one["share"] for one in known]))


def _class_name(comparison: Comparison, number: int) -> str:
    return _named(comparison.runs[0], str(number))


def _named(run: Run, number: str) -> str:
    """Return the name of a class, if the run knows it, else its number."""
    classes = run.classes
    if classes is not None and number.isdigit() and int(number) < len(classes):
        return classes[int(number)]
    return number


SECTION = Section(
    "predictions",
    "Predictions",
    "How good are the predictions?",
    _build,
    lambda comparison: "is measured after the last step, for classifiers with validation data.",
)
