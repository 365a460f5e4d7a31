"""Pictures of what budgets do to groups: who gains, who falls behind, and why.

These are statistics of whatever they are given, without noise. On public or validation data they
may be shown (no guarantee covers validation records: say so). On training data they are NOT
private: functions that could be handed training data ask for `not_private=True` there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.losses import per_record
from ownerwise.mechanisms.ino import INO

if TYPE_CHECKING:
    from ownerwise.plans import Plan


@dataclass(frozen=True)
class InitialDrop:
    """The minority initial drop of one group.

    Attributes:
        first, last: the first evaluations in a row (one in between may be better) at which the
            group's loss lies above its start while the overall loss lies below its own, as indices.
        depth: by how much the group's loss rises above its start there, at most.
    """

    first: int
    last: int
    depth: float


def minority_initial_drop(
    group_losses: np.ndarray, overall_losses: np.ndarray
) -> list[InitialDrop | None]:
    """Return the drop of every group from losses over training; None for a group without.

    Args:
        group_losses: [evaluations, groups], the first row before training.
        overall_losses: [evaluations].
    """
    groups = np.asarray(group_losses, dtype=np.float64)
    overall = np.asarray(overall_losses, dtype=np.float64)
    if groups.ndim != 2 or overall.shape != groups.shape[:1]:
        raise ValueError(
            f"group losses of shape {groups.shape} and overall losses of shape {overall.shape}; "
            "expected [evaluations, groups] and [evaluations]"
        )
    dropped = (groups > groups[0]) & (overall < overall[0])[:, None]
    drops: list[InitialDrop | None] = []
    for column in range(groups.shape[1]):
        at = np.flatnonzero(dropped[:, column])
        if not len(at):
            drops.append(None)
            continue
        in_a_row = np.split(at, np.flatnonzero(np.diff(at) > 2) + 1)[0]
        depth = float((groups[in_a_row, column] - groups[0, column]).max())
        drops.append(InitialDrop(int(in_a_row[0]), int(in_a_row[-1]), depth))
    return drops


def owner_gradients(
    model: nn.Module,
    loss: Callable[..., Tensor],
    inputs: Any,
    targets: Any,
    owner_index: np.ndarray,
    owners: int,
    *,
    not_private: bool,
) -> np.ndarray:
    """Return the summed gradient of every owner's records, [owners, parameters].

    Args:
        model, loss, inputs, targets: as in training; all records at once.
        owner_index: owner of each record.
        owners: number of owners.
        not_private: True for training records, and then nobody else may see the result; False
            states that these records are public or validation data.
    """
    if not isinstance(not_private, bool):
        raise TypeError("not_private must be True (training data) or False (public, validation)")
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = per_record(loss)(model(inputs), targets)
    rows = []
    for owner in range(owners):
        chosen = torch.as_tensor(np.asarray(owner_index) == owner)
        total = torch.where(chosen.to(losses.device), losses, torch.zeros_like(losses)).sum()
        found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten().to(torch.float64)
                    for p, g in zip(parameters, found, strict=True)
                ]
            )
        )
    return torch.stack(rows).cpu().numpy()


def condition_2(gradients: np.ndarray, plan: Plan) -> np.ndarray:
    """Return 1 + cos(angle) q_2 n_2 C_2 / (q_1 n_1 C_1) for every pair of owners [1, 2].

    The left side of condition (2) of INO-SGD (Theorem 3.1): where it is negative, a step may raise
    owner 1's loss while it lowers owner 2's.

    Args:
        gradients: summed gradient of every owner, [owners, parameters] (`owner_gradients`).
        plan: the plan, for the owners' pulls.
    """
    lengths = np.linalg.norm(gradients, axis=1)
    safe = np.where(lengths > 0, lengths, 1.0)
    cosines = (gradients @ gradients.T) / np.outer(safe, safe)
    pull = plan.sampling_rates * plan.records * plan.clip_norms
    return 1.0 + cosines * pull[None, :] / pull[:, None]


def objective_weights(plan: Plan, ino: INO, shares: np.ndarray) -> np.ndarray:
    """Return the weight that INO's objective gives to records, by how many rank above them.

    The w_k of Theorem 3.5: a record with the share `shares` of the expected clip norm above it has
    a Poisson number of records below it in the batch. Clip norms are taken at their average over
    the batch, so the result is exact for equal clip norms.
    """
    bound = ino.bind(plan)
    total = float(plan.sampling_rates @ (plan.records * plan.clip_norms))
    clip = total / plan.expected_batch_size
    below = (1.0 - np.asarray(shares, dtype=np.float64)) * plan.expected_batch_size
    from scipy.stats import poisson  # slow to import, and seldom needed

    most = int(poisson.ppf(1 - 1e-12, max(float(below.max()), 1e-9))) + 1
    ranks = np.arange(most, -1, -1.0)  # falling scores: rank i has i records below it
    weights = bound.weights(ranks, np.full(most + 1, clip))[::-1]  # by number below
    return poisson.pmf(np.arange(most + 1)[None, :], below[:, None]) @ weights


def cvar(losses: np.ndarray, worst_share: float) -> float:
    """Return the mean of the worst share of losses (conditional value at risk)."""
    if not 0 < worst_share <= 1:
        raise ValueError(f"worst_share must lie in (0, 1], got {worst_share}")
    ordered = np.sort(np.asarray(losses, dtype=np.float64))[::-1]
    weights = np.clip(worst_share * len(ordered) - np.arange(len(ordered)), 0.0, 1.0)
    return float(ordered @ weights / weights.sum())


def ordered_average(losses: np.ndarray, weights: np.ndarray) -> float:
    """Return the ordered weighted average: the largest loss meets the first weight."""
    ordered = np.sort(np.asarray(losses, dtype=np.float64))[::-1]
    return float(ordered @ np.asarray(weights) / np.sum(weights))


@dataclass(frozen=True)
class GroupRecalls:
    """Recall of every group and what it comes to."""

    recalls: dict[Any, float]
    overall: float

    @property
    def worst(self) -> float:
        """Recall of the worst group."""
        return min(self.recalls.values())

    @property
    def spread(self) -> float:
        """Standard deviation over groups."""
        return float(np.std(list(self.recalls.values())))

    @property
    def balanced(self) -> float:
        """Mean over groups."""
        return float(np.mean(list(self.recalls.values())))


def group_recalls(predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> GroupRecalls:
    """Return the share of right predictions within every group, and overall."""
    right = np.asarray(predicted) == np.asarray(actual)
    names = np.asarray(groups)
    recalls = {name.item(): float(right[names == name].mean()) for name in np.unique(names)}
    return GroupRecalls(recalls, float(right.mean()))
