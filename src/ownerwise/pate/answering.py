"""Noised answers: GNMax and Confident-GNMax over weighted votes, as the plan says."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch

from ownerwise.errors import OwnerwiseError
from ownerwise.pate.plans import PatePlan
from ownerwise.processes import release_problems
from ownerwise.randomness import Noise, SecretStream
from ownerwise.step import OWN_FOLDER_ADVICE, Account, read_account

NO_ANSWER = -1

_released: set[tuple[str, str | None]] = set()
"""Plans whose answers this process has released with secret noise, with their owners."""
_charging = threading.Lock()  # of two threads with the same plan, the second one is refused


def weighted_counts(plan: PatePlan, votes: np.ndarray, classes: int) -> np.ndarray:
    """Return the weighted count of votes for each class, float64 [questions, classes]; NOT private.

    Weights are multiples of the plan's grid, so the sums are exact.

    Args:
        plan: the plan.
        votes: the class each teacher votes for, [teachers, questions].
        classes: number of classes.
    """
    counts = np.zeros((votes.shape[1], classes))
    weights = plan.teacher_weights
    if len(votes) != len(weights):
        raise OwnerwiseError(f"{len(votes)} teachers voted; the plan has {len(weights)}")
    if votes.size and not (votes.min() >= 0 and votes.max() < classes):
        raise OwnerwiseError(f"votes for other classes; expected classes from 0 to {classes - 1}")
    for vote, weight in zip(votes, weights, strict=True):
        counts[np.arange(votes.shape[1]), vote] += weight
    return counts


def answer(
    plan: PatePlan,
    counts: np.ndarray,
    stream: SecretStream | None = None,
    *,
    folder: str | PathLike | None = None,
) -> np.ndarray:
    """Return the released label of each question, int64; -1 if it is not answered.

    Guarantee: see `PatePlan`. Questions are taken in order until the plan's caps are reached. Votes
    and noise are multiples of one public grid and are added exactly (docs/proofs/arithmetic.md).

    A plan pays for one call, which spends every budget unless there are no questions. A second call
    with the same plan and owners is refused in this process, from any thread, unless the stream has
    a fixed seed, so the answers are NOT PRIVATE. With `folder`, the
    call is counted on disk before any noise is drawn, and every later call with this folder is
    refused, in any process. Of several processes that train together, only the first may call it.

    Args:
        plan: the plan; it is verified first.
        counts: weighted counts of votes, [questions, classes]; see `weighted_counts`.
        stream: the secret stream; by default a new private one.
        folder: folder for the account of this release. None stores nothing: a call in another
            process is not stopped, and spends every budget again.
    """
    plan.verify()
    if len(counts) > plan.questions:
        raise OwnerwiseError(
            f"{len(counts)} questions; the plan pays for at most {plan.questions}: ask fewer"
        )
    counts, grid = np.asarray(counts, dtype=np.float64), plan.grid
    if not (counts / grid == np.round(counts / grid)).all():
        raise OwnerwiseError(
            "the counts are not multiples of the plan's grid: pass weighted_counts"
        )
    if (counts < 0).any() or (counts.sum(axis=1) != plan.teacher_weights.sum()).any():
        raise OwnerwiseError(
            "the counts do not add up to the weights of the plan's teachers: pass weighted_counts "
            "of this plan, with a vote of every teacher on each question"
        )
    root = SecretStream() if stream is None else stream
    if root.private and (problems := release_problems("the answers of a PATE plan")):
        raise OwnerwiseError(problems)
    noise = Noise(root, purpose="answer")  # an error of the stream comes before the charge
    test_noise = None if plan.test_std is None else Noise(root, purpose="test")
    if len(counts):
        with _charging:
            _charge(plan, root.private, None if folder is None else Path(folder))
    passed = np.ones(len(counts), dtype=bool)
    if plan.test_std is not None and test_noise is not None:
        top = torch.from_numpy(counts.max(axis=1))
        (noised,) = test_noise.gaussian(0, [top], plan.test_std, grid)
        passed = noised.numpy() >= plan.threshold
    asked = np.flatnonzero(passed)[: plan.answers]
    labels = np.full(len(counts), NO_ANSWER, dtype=np.int64)
    sums = torch.from_numpy(np.ascontiguousarray(counts[asked]))
    (noised,) = noise.gaussian(0, [sums], plan.answer_std, grid)
    labels[asked] = noised.numpy().argmax(axis=1)
    return labels


@dataclass(frozen=True)
class _OneRelease:
    """What is counted on disk: all answers of a plan, as a single step."""

    hash: str
    steps: int = 1
    closing_count: int = 0


def _charge(plan: PatePlan, private: bool, folder: Path | None) -> None:
    """Count the release; raise an error if it was already made."""
    paid = plan.hash, None if plan.owners is None else plan.owners.fingerprint
    if private and paid in _released:
        raise OwnerwiseError(
            "this process has already released the answers of this plan to the same owners' "
            "teachers: a second release spends every budget again, and the epsilons would add up. "
            "Ask all questions in one call, or plan for half of each budget"
        )
    if folder is not None:
        balance = read_account(folder)
        if balance is not None and balance.spent:
            raise OwnerwiseError(
                f"the account in {folder} is spent: a second release spends every budget again, "
                f"and the epsilons would add up. For a release of other owners, "
                f"{OWN_FOLDER_ADVICE}"
            )
        Account.open(folder, _OneRelease(plan.hash), private=private, spent=1).close()
    if private:
        _released.add(paid)
