"""The owners of validation and test records, which no guarantee covers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ownerwise.errors import name_some
from ownerwise.evaluation import Evaluation
from ownerwise.planning import Plan
from ownerwise.wording import name_of


def held_out_counts(plan: Plan, evaluations: Iterable[Evaluation]) -> dict[str, int]:
    """Return how many owners of evaluated records are outside the plan, and how many are in it.

    The result is empty if the owners are unknown.
    """
    given = [each.owner_ids for each in evaluations if each.owner_ids is not None]
    if not given:
        return {}
    owners = set().union(*(each.tolist() for each in given))
    shared = set().union(*(_in_plan(plan, each).tolist() for each in given))
    return {"unprotected": len(owners - shared), "in_plan": len(shared)}


def shared_owner_problems(plan: Plan, evaluation: Evaluation, name: str) -> list[str]:
    """Return a problem if owners are evaluated whom the plan protects with all of their records."""
    if plan.unit != "owner" or evaluation.owner_ids is None:
        return []
    shared = _in_plan(plan, evaluation.owner_ids)
    if not len(shared):
        return []
    return [
        f"{name}: owner {name_some(shared)} is also in the plan, whose epsilon holds for an owner "
        "with ALL of their records, but no guarantee covers evaluated records: hold out whole "
        "owners (split_by 'owner'), or evaluate on records of other owners"
    ]


def _in_plan(plan: Plan, owners: np.ndarray) -> np.ndarray:
    """Return the distinct owners of evaluated records who are in the plan.

    Ids are compared as text: 7, 7.0 and "7" are the same person, whichever way they were read.
    """
    distinct = np.unique(owners)
    if plan.owners is None:
        return distinct[:0]
    planned = set(map(name_of, plan.owners.ids.tolist()))
    return distinct[[name_of(owner) in planned for owner in distinct.tolist()]]
