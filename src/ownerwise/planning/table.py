"""A plan as a table that a person can read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ownerwise.owners import (
    UNIT,
)

if TYPE_CHECKING:
    from ownerwise.planning.plans import Plan

_MOST_CLASSES = 12
_RANGES = 8
HEADINGS = (
    "owners", "records", "epsilon", "delta", "rate", "clip norm", "multiplier", "batch share",
    "spent",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One budget class or owner: ranges are (low, high)."""

    name: str
    records: int
    epsilon: tuple[float, float]
    delta: tuple[float, float]
    sampling_rate: tuple[float, float]
    clip_norm: tuple[float, float]
    noise_multiplier: tuple[float, float]
    batch_share: float
    epsilon_spent: tuple[float, float]


def rows(plan: Plan, owners: bool = False) -> list[Row]:
    """Return one row per owner, or per budget class (ranges of epsilon where there are many)."""
    if owners:
        groups = _by_owner(plan)
    else:
        groups = [(str(len(members)), members) for members in class_members(plan)]
    spent = plan.epsilon()
    drawn = plan.sampling_rates * plan.records

    def span(values: np.ndarray, members: np.ndarray) -> tuple[float, float]:
        return float(values[members].min()), float(values[members].max())

    return [
        Row(
            name,
            int(plan.records[members].sum()),
            span(plan.targets, members),
            span(plan.deltas, members),
            span(plan.sampling_rates, members),
            span(plan.clip_norms, members),
            span(plan.noise_multipliers, members),
            float(drawn[members].sum() / drawn.sum()),
            span(spent, members),
        )
        for name, members in groups
    ]


def _by_owner(plan: Plan) -> list[tuple[str, np.ndarray]]:
    count = len(plan.targets)
    names = map(str, plan.owners.ids if plan.owners is not None else range(count))
    return [(name, np.array([at])) for at, name in enumerate(names)]


def class_members(plan: Plan) -> list[np.ndarray]:
    """Return the owners of each budget class, or of each range of epsilon if classes are many."""
    first, index = budget_classes(plan.targets, plan.deltas)
    if len(first) > _MOST_CLASSES:
        edges = np.geomspace(plan.targets.min(), plan.targets.max(), _RANGES + 1)[1:-1]
        index = np.searchsorted(edges, plan.targets, side="right")
    return [np.flatnonzero(index == number) for number in np.unique(index)]


def budget_classes(targets: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one owner of each distinct (epsilon, delta), and every owner's class.

    Classes are sorted by delta, then by epsilon.
    """
    order = np.lexsort((targets, deltas))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(targets[order]) != 0) | (np.diff(deltas[order]) != 0)
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.cumsum(new) - 1
    return order[new], index


def describe(plan: Plan, owners: bool = False) -> str:
    """Return heading, table and notes as text."""
    cells: list[tuple[str, ...]] = [("owner", *HEADINGS[1:]) if owners else HEADINGS]
    for row in rows(plan, owners):
        cells.append(
            (
                row.name,
                str(row.records),
                _span(row.epsilon, "{:.4g}"),
                _span(row.delta, "{:.1e}"),
                _span(row.sampling_rate, "{:.4g}"),
                _span(row.clip_norm, "{:.4g}"),
                _span(row.noise_multiplier, "{:.4g}"),
                f"{100 * row.batch_share:.1f} %",
                _span(_rounded_up(row.epsilon_spent), "{:.4f}"),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*_heading(plan), "", *lines, "", *_notes(plan)])


def _rounded_up(values: tuple[float, float]) -> tuple[float, float]:
    """Return what is spent to four places, never less than it is."""
    low, high = (math.ceil(1e4 * value - 1e-8) / 1e4 for value in values)
    return low, high


def _span(values: tuple[float, float], form: str) -> str:
    low, high = (form.format(value) for value in values)
    return low if low == high else f"{low} to {high}"


def _heading(plan: Plan) -> list[str]:
    mixture = f" (mixture {plan.mixture:g})" if plan.mixture is not None else ""
    noise = f"noise std {plan.noise_std:.6g}"
    if len(plan.schedule.segments) > 1:
        noise += f" x {_factors(plan)} by schedule"
    if plan.release_std is not None:
        kind = "" if plan.release_noise == "gaussian" else f"{plan.release_noise}, "
        least = "" if plan.release_shares is None else f"{plan.release_shares.min():.3g} to "
        noise += f" (and {kind}{plan.release_std:.6g} on a release of sensitivity {least}1)"
    return [
        f"Plan {plan.hash[:12]}: method {plan.method}{mixture}, accountant {plan.accountant}",
        f"{plan.steps} steps, expected batch {plan.expected_batch_size:g} of "
        f"{int(plan.records.sum())} records, {noise} on the sum, clip norm {plan.clip_norm:g}",
    ]


def _factors(plan: Plan) -> str:
    factors = [factor for _, factor in plan.schedule.segments]
    return f"{factors[0]:g} ... {factors[-1]:g}"


def _notes(plan: Plan) -> list[str]:
    largest = int(plan.records.max())
    notes = [f"UNIT OF PRIVACY: {UNIT}."]
    if largest > 1:
        notes[0] += (
            f" The largest owner declares {largest} records: each has the stated epsilon; "
            "all of them together do not."
        )
    notes.append("Assumed public: the budgets and the declared numbers of records.")
    unspent = int(plan.unspent.sum())
    if unspent:
        notes.append(
            f"{unspent} owners cannot use up their budget (a rate is at most 1, and there is a "
            "least amount of noise); strict=True refuses such plans."
        )
    return notes
