"""Metrics of regression, overall and in each group of evaluated records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ownerwise.evaluation.groups import SMALLEST_GROUP, mean_over_owners
from ownerwise.wording import name_of


def regression_summary(
    losses: np.ndarray,
    predicted: np.ndarray,
    actual: np.ndarray,
    groups: np.ndarray | None,
    owners: np.ndarray | None,
) -> dict[str, Any]:
    """Return RMSE, MAE and R2, overall and by group, with those of a trivial prediction.

    The trivial prediction is the mean of the evaluated targets, the same for everyone. R2 is the
    fraction of its squared error that the model removes: 0 is no better than the trivial
    prediction, overall or in a group. Groups of fewer than `SMALLEST_GROUP` records are left out.

    Args:
        losses: loss of each record, in the loss's own units.
        predicted, actual: numbers, [records].
        groups, owners: group and owner of each record, if known.
    """
    actual = actual.astype(np.float64)
    errors, trivial = predicted - actual, actual.mean() - actual
    found = {}
    for name in np.unique(groups) if groups is not None else ():
        of_group = groups == name
        if of_group.sum() >= SMALLEST_GROUP:
            found[name_of(name.item())] = {
                **_metrics(losses[of_group], errors[of_group], trivial[of_group]),
                "records": int(of_group.sum()),
                **_per_owner(errors[of_group], None if owners is None else owners[of_group]),
            }
    by_group = {name: group["rmse"] for name, group in found.items()}
    worst = max(by_group, key=by_group.__getitem__, default=None)
    return {
        **_metrics(losses, errors, trivial),
        **_per_owner(errors, owners),
        "worst_group": None if worst is None else {"name": worst, "rmse": by_group[worst]},
        "spread": float(np.std(list(by_group.values()))) if by_group else None,
        "groups": found,
    }


def _metrics(losses: np.ndarray, errors: np.ndarray, trivial: np.ndarray) -> dict[str, Any]:
    unexplained, all_of_it = float(np.square(errors).sum()), float(np.square(trivial).sum())
    loss = float(losses.mean())
    return {
        "loss": loss if math.isfinite(loss) else None,
        "rmse": math.sqrt(unexplained / len(errors)),
        "mae": float(np.abs(errors).mean()),
        "r2": 1 - unexplained / all_of_it if all_of_it else None,
        "trivial_rmse": math.sqrt(all_of_it / len(errors)),
    }


def _per_owner(errors: np.ndarray, owners: np.ndarray | None) -> dict[str, Any]:
    """Return the mean over owners of each one's mean absolute error: every owner counts equally."""
    if owners is None:
        return {}
    count, mean = mean_over_owners(np.abs(errors), owners)
    return {"owners": count, "owner_mae": mean}
