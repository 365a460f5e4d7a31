"""Common constraints: fairness across groups, and lower and upper bounds on the usual rates.

Each function returns a list of one-sided constraints. The gap between a group and all others is
bounded from both sides; with two groups, it is enough to bound one gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.constraints.partition import LABEL, Column, Condition, Partition
from ownerwise.mechanisms.constraints.rates import Constraint, rate


def demographic_parity(
    part: Partition, column: str, *, max_gap: float, pred: Any = None
) -> list[Constraint]:
    """Limit how much the rate of predicting a class differs between each group and all others.

    Args:
        part: the partition.
        column: the column whose values are the groups.
        max_gap: the largest allowed difference, from 0 to 1.
        pred: the predicted class; by default the second of two classes, or every class if there are
            more.
    """
    return _gaps("parity", part, column, max_gap, _counted(part, pred), [None])


def equalized_odds(
    part: Partition, column: str, *, max_gap: float, pred: Any = None
) -> list[Constraint]:
    """Apply the limit of `demographic_parity` within each true class."""
    return _gaps("odds", part, column, max_gap, _counted(part, pred), part[LABEL].values)


def equal_opportunity(
    part: Partition, column: str, *, max_gap: float, positive: Any = None
) -> list[Constraint]:
    """Limit how much the recall of a class (by default the last) differs between groups."""
    positive = _positive(part, positive)
    return _gaps("opportunity", part, column, max_gap, [positive], [positive])


def false_negative_rate(
    part: Partition, *, max_rate: float, positive: Any = None, by: str | None = None
) -> list[Constraint]:
    """Cap the fraction of a class's records predicted as another class, overall or by group."""
    predicted, actual = _conditions(part, positive)
    return _bounded("false negatives", part, by, ~predicted, actual, max_rate=max_rate)


def false_positive_rate(
    part: Partition, *, max_rate: float, positive: Any = None, by: str | None = None
) -> list[Constraint]:
    """Cap the fraction of records of other classes that are predicted as this class."""
    predicted, actual = _conditions(part, positive)
    return _bounded("false positives", part, by, predicted, ~actual, max_rate=max_rate)


def recall(
    part: Partition, *, min_rate: float, positive: Any = None, by: str | None = None
) -> list[Constraint]:
    """Require at least a given fraction of a class's records to be predicted correctly."""
    predicted, actual = _conditions(part, positive)
    return _bounded("recall", part, by, predicted, actual, min_rate=min_rate)


def precision(
    part: Partition, *, min_rate: float, positive: Any = None, by: str | None = None
) -> list[Constraint]:
    """Require at least a given fraction of the predictions of a class to be correct."""
    predicted, actual = _conditions(part, positive)
    return _bounded("precision", part, by, actual, predicted, min_rate=min_rate)


def selection_rate(
    part: Partition,
    *,
    max_rate: float | None = None,
    min_rate: float | None = None,
    pred: Any = None,
    by: str | None = None,
) -> list[Constraint]:
    """Bound the fraction of all records that are predicted as a class."""
    event = part.predicted == _positive(part, pred)
    rates = {"max_rate": max_rate, "min_rate": min_rate}
    return _bounded("selection", part, by, event, part.everyone, **rates)


def error_rate(part: Partition, *, max_rate: float, by: str | None = None) -> list[Constraint]:
    """Cap the fraction of records that are predicted incorrectly."""
    return _bounded("error", part, by, part.wrong, part.everyone, max_rate=max_rate)


def balanced_predictions(
    part: Partition, width: float, *, by: str | None = None
) -> list[Constraint]:
    """Keep each class's share of the predictions within `width` of its share of the labels.

    Both shares come from the histogram of the same step, so neither the labels nor their counts
    need to be public. The histogram represents all owners equally, so with individual budgets these
    bands counteract a tilt towards the classes of lax owners while the model trains.

    Args:
        part: the partition, with a column "label".
        width: the largest allowed difference between the two shares, from 0 to 1.
        by: column whose values are balanced separately, such as a site; by default, all records
            together.
    """
    _check_fraction("width", width)
    groups = [part.everyone] if by is None else [part[by] == value for value in part[by].values]
    constraints = []
    for group in groups:
        for value in _counted(part, None):
            predicted = rate(pred=value, where=group)
            true = rate(part[LABEL] == value, where=group)
            words = f"balance of {value}: " + " in ".join(
                filter(None, ("predicted - true share", group.name))
            )
            constraints += [
                (predicted - true <= width).named(f"{words} ≤ {width:g}"),
                (predicted - true >= -width).named(f"{words} ≥ {-width:g}"),
            ]
    return constraints


def _gaps(
    kind: str,
    part: Partition,
    column: str,
    max_gap: float,
    counted: Iterable[Any],
    labels: Iterable[Any],
) -> list[Constraint]:
    """Return bounds on each group's gap to the rest, for each predicted class and label."""
    groups = part[column]
    _check_fraction("max_gap", max_gap)
    if len(groups.values) < 2:
        raise OwnerwiseError(
            f"column {column!r} has the values {groups.values}; a gap needs at least two groups"
        )
    constraints = []
    for label in labels:
        given = part.everyone if label is None else part[LABEL] == label
        for pred in counted:
            for value in groups.values if len(groups.values) > 2 else groups.values[:1]:
                here = rate(pred=pred, where=groups == value, given=given)
                rest = rate(pred=pred, where=groups != value, given=given)
                words = f"{kind} of {pred}: {column} {value} - {_rest(groups, value)}"
                words += "" if label is None else f", {given.name}"
                constraints += [
                    (here - rest <= max_gap).named(f"{words} ≤ {max_gap:g}"),
                    (here - rest >= -max_gap).named(f"{words} ≥ {-max_gap:g}"),
                ]
    return constraints


def _rest(groups: Column, value: Any) -> str:
    others = [other for other in groups.values if other != value]
    return str(others[0]) if len(others) == 1 else "others"


def _bounded(
    kind: str,
    part: Partition,
    by: str | None,
    event: Condition,
    given: Condition,
    *,
    max_rate: float | None = None,
    min_rate: float | None = None,
) -> list[Constraint]:
    """Return the bounds on one rate, overall or for each value of the column `by`."""
    if max_rate is None and min_rate is None:
        raise OwnerwiseError(f"{kind}: expected max_rate, min_rate, or both")
    groups = [part.everyone] if by is None else [part[by] == value for value in part[by].values]
    constraints = []
    for group in groups:
        value = rate(event, where=group, given=given)
        name = " of ".join(filter(None, (kind, group.name)))
        if max_rate is not None:
            _check_fraction("max_rate", max_rate)
            constraints.append((value <= max_rate).named(f"{name} ≤ {max_rate:g}"))
        if min_rate is not None:
            _check_fraction("min_rate", min_rate)
            constraints.append((value >= min_rate).named(f"{name} ≥ {min_rate:g}"))
    return constraints


def _check_fraction(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise OwnerwiseError(f"{name}={value}: expected a number from 0 to 1")


def _positive(part: Partition, given: Any) -> Any:
    return part.classes[-1] if given is None else given


def _conditions(part: Partition, positive: Any) -> tuple[Condition, Condition]:
    """Return the conditions that the predicted and the true class are the positive one."""
    positive = _positive(part, positive)
    return part.predicted == positive, part[LABEL] == positive


def _counted(part: Partition, pred: Any) -> list[Any]:
    if pred is not None:
        return [pred]
    return list(part.classes[1:] if len(part.classes) == 2 else part.classes)
