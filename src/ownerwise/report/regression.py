"""The results of runs that predict numbers: errors overall and by group, beside a trivial guess."""

from __future__ import annotations

import numpy as np

from ownerwise.report.blocks import Block, Cell, Details, Table, Text, Tile, Tiles
from ownerwise.report.comparison import Comparison, MethodRuns, last
from ownerwise.report.groups import MOST_NAMED, ValidationGroup
from ownerwise.runs import Run
from ownerwise.wording import Amount, epsilon

TRIVIAL = "the mean alone"
ERRORS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "trivial_rmse": f"RMSE of {TRIVIAL}"}
"""The metrics of a regression, by their names in the history."""


def final_errors(run: Run, source: str | None) -> dict[str, float]:
    """Return the final metrics of a run that predicts numbers, by their keys in `ERRORS`."""
    found = {} if source is None else last(run, source) or {}
    return {key: found[key] for key in ERRORS if found.get(key) is not None}


def regression_results(comparison: Comparison) -> list[Block]:
    """Return the tiles and tables about errors."""
    blocks = [_tiles(comparison), _methods(comparison)]
    if comparison.groups:
        blocks.append(_groups(comparison))
    return [*blocks, _measured_on(comparison)]


def _amount(comparison: Comparison, method: MethodRuns, key: str) -> Amount | None:
    values = [final_errors(run, comparison.source).get(key) for run in method.runs]
    known = [value for value in values if value is not None]
    return Amount.of(known) if len(known) == len(values) else None


def _words(value: Amount | None) -> str:
    if value is None:
        return "–"
    deviation = "" if value.deviation is None else f" ± {value.deviation:.2g}"
    return f"{value.mean:.4g}{deviation}"


def _tiles(comparison: Comparison) -> Tiles:
    method = comparison.methods[-1]
    errors = {key: _amount(comparison, method, key) for key in ERRORS}
    trivial = errors.pop("trivial_rmse")
    notes = {"rmse": f"{method.label}; {TRIVIAL}: {_words(trivial)}"}
    return Tiles(
        [
            Tile(_words(value), ERRORS[key], notes.get(key, method.label))
            for key, value in errors.items()
            if value is not None
        ]
    )


def _methods(comparison: Comparison) -> Table:
    rows = [
        [
            Cell(method.label),
            Cell(str(len(method.runs))),
            *(Cell(_words(_amount(comparison, method, key))) for key in ERRORS),
        ]
        for method in comparison.methods
    ]
    caption = f"Errors at the end of training on {comparison.data_split} data (not private)"
    if any(len(method.runs) > 1 for method in comparison.methods):
        caption += ", mean ± standard deviation over runs"
    return Table(caption, ["Method", "Runs", *ERRORS.values()], rows)


def _groups(comparison: Comparison) -> Details:
    """Return a table with the errors of each group under each method."""
    rows = []
    for group in comparison.groups[:MOST_NAMED]:
        budget = "–" if group.epsilon is None else epsilon(group.epsilon)
        cells = [
            f"{_of_group(comparison, method, group, key):.4g}"
            for method in comparison.methods
            for key in ERRORS
        ]
        rows.append([group.name, budget, *cells])
    several = len(comparison.methods) > 1
    titles = [
        f"{title}{f': {method.label}' if several else ''}"
        for method in comparison.methods
        for title in ERRORS.values()
    ]
    caption = f"Errors by group on {comparison.data_split} data (not private), mean over runs"
    headings = [comparison.group_noun, f"ε per {comparison.facts.units}", *titles]
    return Details("All groups as a table", Table(caption, headings, rows))


def _of_group(
    comparison: Comparison, method: MethodRuns, group: ValidationGroup, key: str
) -> float:
    source = comparison.source
    assert source is not None
    found = [group.of(last(run, source) or {}, key) for run in method.runs]
    return float(np.mean(found))


def _measured_on(comparison: Comparison) -> Text:
    return Text(
        f"Not private: these errors were measured on {comparison.data_split} records, which are "
        "not covered by any guarantee. RMSE is the root of the mean squared error and MAE the mean "
        f"absolute error, both in the target's own units; “{TRIVIAL}” predicts the mean of these "
        "records for everyone, and R² is the fraction of its squared error that the model removes, "
        "overall or in a group (0: no better).",
        "note",
    )
