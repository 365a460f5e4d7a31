"""Measurements from a run: history lines with the recall of each group and of its classes.

The Trainer evaluates cells; a cell is one class within one group. The values for groups are
computed exactly from the cells: a group's recall and loss are means over its cells, weighted by
number of records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.data import (
    Assignment,
    Records,
)


@dataclass(frozen=True)
class Cells:
    """The cells of a run, identified by their names in the history.

    Attributes:
        members: {cell: (group, class)}.
        budgets: {group: declared epsilon}.
    """

    members: Mapping[str, tuple[str, str]]
    budgets: Mapping[str, float]

    @classmethod
    def of(cls, assignment: Assignment, classes: Sequence[str]) -> Cells:
        """Return the cells of an assignment; every class must belong to a single group."""
        groups = assignment.class_groups
        alone = {group for group in groups if groups.count(group) == 1}
        members = {
            group if group in alone else f"{group} / {name}": (group, name)
            for group, name in zip(groups, classes, strict=True)
        }
        return cls(members, dict(assignment.group_budgets))

    def names(self, records: Records) -> np.ndarray:
        """Return the cell of each record."""
        return np.array(list(self.members))[records.targets]

    @property
    def cell_budgets(self) -> dict[str, float]:
        """The declared epsilon of every cell."""
        return {cell: self.budgets[group] for cell, (group, _) in self.members.items()}

    def line(self, evaluation: Mapping[str, Any]) -> dict[str, Any]:
        """Convert results by cell into results by group and by class within each group."""
        cells = evaluation["groups"]
        by_group: dict[str, list[str]] = {}
        for cell, (group, _) in self.members.items():
            if cell in cells:
                by_group.setdefault(group, []).append(cell)
        groups = {group: _together([cells[c] for c in found]) for group, found in by_group.items()}
        recalls = {group: measured["recall"] for group, measured in groups.items()}
        worst = min(recalls, key=recalls.__getitem__)
        line = {
            "loss": evaluation["loss"],
            "accuracy": evaluation["accuracy"],
            "balanced_accuracy": evaluation["balanced_accuracy"],
            "worst_group": {"name": worst, "recall": recalls[worst]},
            "spread": float(np.std(list(recalls.values()))),
            "groups": groups,
        }
        if any(len(found) > 1 for found in by_group.values()):
            line["classes"] = {
                group: {self.members[cell][1]: cells[cell] for cell in found}
                for group, found in by_group.items()
            }
        return line


def _together(cells: list[dict[str, Any]]) -> dict[str, Any]:
    records = sum(cell["records"] for cell in cells)
    losses = [cell["loss"] for cell in cells]
    return {
        "loss": None if None in losses else _mean(cells, "loss", records),
        "recall": _mean(cells, "recall", records),
        "records": records,
    }


def _mean(cells: list[dict[str, Any]], what: str, records: int) -> float:
    return sum(cell[what] * cell["records"] for cell in cells) / records
