"""What private tuning costs: the part of a plan that makes its epsilon that of the whole search.

Formal guarantee: suppose K runs are made, where K follows `law` and stays secret. Each run draws
its settings, independently and with replacement, from candidates that were fixed in advance, takes
the steps of that candidate's plan, and then releases a score: a function of public data, or one sum
over private validation records with Gaussian noise of std `score_std`, to which each record (with
unit "owner": each owner) adds at most 1. Only the run with the best score is released, with its
settings. The release then has the epsilon that `Tuning.epsilon` states, by Papernot and Steinke
(see `accounting.run_laws`): one run costs, at every order, at most the largest Renyi divergence of
any candidate, plus that of its score.

The cost is one lump: it is the same however many runs were made, and nothing is refunded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ownerwise.accounting import (
    ClosingRelease,
    Exposure,
    OpeningRelease,
    PaidRelease,
    RunCost,
    RunLaw,
    Schedule,
    score_segment,
)
from ownerwise.owners import frozen

TAIL_SHARE = 0.01
"""Fraction of delta for K above the number of runs that are always made."""

_TAIL_SHARES = (TAIL_SHARE, 0.1, 0.5)  # tried in turn: large epsilons need more

_PARTS = Exposure._fields


@dataclass(frozen=True)
class Rival:
    """What a candidate's plan costs each owner.

    Attributes:
        run: the candidate's run, as a function of an owner's exposure.
        exposures: the parts of every owner's `Exposure`, one array per part.
    """

    run: RunCost
    exposures: tuple[np.ndarray, ...] = field(repr=False)

    def __post_init__(self):
        object.__setattr__(self, "exposures", tuple(map(frozen, self.exposures)))

    def same_as(self, other: Rival) -> bool:
        """Return whether both cost every owner the same."""
        pairs = zip(self.exposures, other.exposures, strict=True)
        return self.run == other.run and all(np.array_equal(one, two) for one, two in pairs)


@dataclass(frozen=True)
class Tuning:
    """A search for the best candidate, paid for by every owner.

    Attributes:
        law: the law of the number of runs.
        rivals: the distinct costs of all candidates, including the plan's own.
        most: how many runs are always made, so that time tells nothing about K; None if as many
            runs are made as K says.
        score_std: std of the noise on the score; None if the score comes from public data.
        score_records: the largest number of an owner's validation records.
    """

    law: RunLaw
    rivals: tuple[Rival, ...]
    most: int | None = None
    score_std: float | None = None
    score_records: int = 1

    def deltas(self, deltas: np.ndarray) -> np.ndarray:
        """Return the deltas at which epsilon is computed."""
        return deltas if self.most is None else deltas * (1 - TAIL_SHARE)

    def tail_is_paid(self, epsilon: float, delta: float, share: float) -> bool:
        """Return whether a share of delta pays for K above the number of runs always made."""
        if self.most is None:
            return True
        permitted = share * delta / (1 + math.exp(min(epsilon, 500.0)))
        return self.most >= self.law.most(permitted)

    def epsilon(
        self, deltas: np.ndarray, records: np.ndarray | None = None, *, by_owner: bool = False
    ) -> np.ndarray:
        """Return every owner's epsilon for the whole search; infinite if there is no bound.

        Args:
            deltas: one value per owner; part of it pays for `most`.
            records: the number of records of each owner that are added or removed together; by
                default one.
            by_owner: whether an owner adds at most 1 to the score, with all of their records;
                otherwise, `records` are added or removed with all validation records.
        """
        count = np.ones(len(deltas)) if records is None else np.maximum(records, 1)
        columns = [part for rival in self.rivals for part in rival.exposures]
        table = np.column_stack([*columns, deltas, count]).astype(np.float64)
        classes, index = np.unique(table, axis=0, return_inverse=True)
        validated = 1 if by_owner or records is None else self.score_records
        values = [self._one(row, validated) for row in classes.tolist()]
        return np.array(values)[index.reshape(-1)]

    def _one(self, row: Sequence[float], validated: int) -> float:
        *values, delta, count = row
        size, records = len(_PARTS), int(count)
        runs = []
        for at, rival in enumerate(self.rivals):
            parts = rival.run.segments(Exposure(*values[at * size : (at + 1) * size]), records)
            if self.score_std is not None:
                parts.append(score_segment(self.score_std / validated))
            runs.append(parts)
        for share in _TAIL_SHARES if self.most is not None else (0.0,):
            epsilon = self.law.epsilon_of(runs, delta * (1 - share))
            if self.tail_is_paid(epsilon, delta, share):
                return epsilon
        return math.inf

    def score_epsilon(self, delta: float, records: int = 1) -> float:
        """Return epsilon of an owner whose records are all validation records."""
        assert self.score_std is not None
        parts = [score_segment(self.score_std / records)]
        return self.law.epsilon_of([parts], float(self.deltas(np.array(delta))))

    def problems(self, targets: np.ndarray, deltas: np.ndarray) -> list[str]:
        """Return the problems with values that do not fit together."""
        problems = []
        if not self.rivals or any(
            len(rival.exposures) != len(_PARTS)
            or any(part.shape != targets.shape for part in rival.exposures)
            for rival in self.rivals
        ):
            problems.append("tuning: expected the exposures of every owner for every candidate")
        if self.score_std is not None and not 0 < self.score_std < math.inf:
            problems.append(f"tuning: score_std {self.score_std!r}; expected a number above 0")
        if self.most is not None and self.most < self.law.most(tail_probability(targets, deltas)):
            problems.append(
                f"tuning: {self.most} runs are always made, fewer than delta allows to leave out"
            )
        return problems

    def header(self) -> dict[str, Any]:
        """Return everything but the per-owner arrays, as JSON types."""
        header: dict[str, Any] = {"law": self.law.name, "runs": self.law.mean}
        if self.most is not None:
            header["most"] = self.most
        if self.score_std is not None:
            header |= {"score_std": self.score_std, "score_records": self.score_records}
        return {**header, "rivals": [_stored(rival.run) for rival in self.rivals]}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the per-owner arrays, by the names under which they are stored."""
        values = [part for rival in self.rivals for part in rival.exposures]
        return dict(zip(rival_names(len(self.rivals)), values, strict=True))

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Tuning:
        """Return the tuning of a stored plan."""
        rivals = tuple(
            Rival(_run(stored), tuple(arrays[f"rival_{number}_{name}"] for name in _PARTS))
            for number, stored in enumerate(header["rivals"])
        )
        return cls(
            RunLaw(header["law"], header["runs"]),
            rivals,
            header.get("most"),
            header.get("score_std"),
            header.get("score_records", 1),
        )

    def words(self) -> str:
        """Return what was paid for, in words."""
        score = "a score on public data"
        if self.score_std is not None:
            score = f"a score with Gaussian noise of std {self.score_std:.4g}"
        return (
            f"the best of a secret random number of runs ({self.law.name} law, {self.law.mean:g} "
            f"expected), chosen by {score}"
        )


def rival_names(count: int) -> list[str]:
    """Return the names under which the arrays of so many rivals are stored."""
    return [f"rival_{number}_{name}" for number in range(count) for name in _PARTS]


def tail_probability(targets: np.ndarray, deltas: np.ndarray) -> float:
    """Return the largest permitted probability that K exceeds the number of runs always made."""
    return float((TAIL_SHARE * deltas / (1 + np.exp(np.minimum(targets, 500.0)))).min())


def _stored(run: RunCost) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "schedule": [list(segment) for segment in run.schedule.segments],
        "accountant": run.accountant,
    }
    if run.release is not None:
        stored["release_std"] = run.release.std
    if run.closing is not None:
        stored |= {"closing_std": run.closing.std, "closing_count": run.closing.count}
    if run.opening is not None:
        stored |= {"opening_std": run.opening.std, "opening_together": run.opening.together}
    return stored


def _run(stored: Mapping[str, Any]) -> RunCost:
    release, closing, opening = (
        stored.get(f"{name}_std") for name in ("release", "closing", "opening")
    )
    return RunCost(
        Schedule(tuple((int(count), float(factor)) for count, factor in stored["schedule"])),
        stored["accountant"],
        None if release is None else PaidRelease(release),
        None if closing is None else ClosingRelease(closing, stored["closing_count"]),
        None if opening is None else OpeningRelease(opening, stored["opening_together"]),
    )
