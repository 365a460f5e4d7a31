"""The request for a plan: the arguments of `ownerwise.plan`, and all problems with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ownerwise.accounting import ACCOUNTANTS, NOISES, ClosingRelease, OpeningRelease, Schedule
from ownerwise.errors import known_names
from ownerwise.owners import UNITS, Owners
from ownerwise.planning import individual, units
from ownerwise.planning.adaptive_clip_norm import (
    CLIP_NORM_RANGE,
    MIN_CLIP_NORM,
    AdaptiveClipNorm,
    as_clip_norm,
    option_problems,
)
from ownerwise.planning.noise_schedules import NoiseSchedule, schedule_problems, segments
from ownerwise.planning.solver import MAX_STEPS, METHODS

NO_CONSTRAINTS = "constraints={!r}: wrap the constraints in RateConstraints(...)"
NO_CALIBRATION = "calibration={!r}: expected a release after training, such as Calibration()"
NO_STATISTICS = "statistics={!r}: expected a release before training, such as ColumnStatistics()"

RECORDS_PER_OWNER = 8
"""Default for the largest number of an owner's records in a step, if owners are sampled."""


@runtime_checkable
class PaidMechanism(Protocol):
    """A mechanism that makes a release at every step, which the plan must account for.

    Attributes:
        release_share: default fraction of a step's privacy cost that is spent on the release.
    """

    release_share: float


@runtime_checkable
class ClosingMechanism(Protocol):
    """A mechanism that makes releases after training, which the plan accounts for."""

    def closing(
        self, epsilon: np.ndarray, delta: np.ndarray, records: np.ndarray
    ) -> ClosingRelease:
        """Return the releases for these budgets and declared numbers of records, all public."""
        ...


@runtime_checkable
class OpeningMechanism(Protocol):
    """A mechanism that makes a release before training, which the plan accounts for."""

    def opening(self, epsilon: np.ndarray, delta: np.ndarray, unit: str) -> OpeningRelease:
        """Return the release for these budgets and this unit of privacy, all public."""
        ...


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `ownerwise.plan`; see there for their meaning.

    A schedule given as segments also determines `steps`, unless `steps` is given.
    """

    method: str = "sample"
    steps: int | None = None
    epochs: float | None = None
    batch_size: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float | str | Mapping[str, Any] | AdaptiveClipNorm = 1.0
    mixture: float | None = None
    noise_schedule: NoiseSchedule | None = None
    release_std: float | None = None
    release_share: float | None = None
    release_noise: str = "gaussian"
    constraints: PaidMechanism | None = None
    calibration: ClosingMechanism | None = None
    statistics: OpeningMechanism | None = None
    accountant: str = "pld"
    strict: bool = False
    hardened: bool = False
    unit: str = "record"
    sampling: str | None = None
    records_per_owner: int | str | None = RECORDS_PER_OWNER
    clipped_steps: float | None = None
    filter: str | None = None
    clip_to_remaining: bool = False

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", as_clip_norm(self.clip_norm))
        if self.sampling is None:
            object.__setattr__(self, "sampling", self.unit)
        if self.records_per_owner == "all":
            object.__setattr__(self, "records_per_owner", None)
        if self.noise_schedule is None or isinstance(self.noise_schedule, str | Mapping):
            return
        try:
            pieces = segments(self.noise_schedule, None)
            total = Schedule(pieces).steps
        except (TypeError, ValueError):
            return  # `problems` reports it
        object.__setattr__(self, "noise_schedule", pieces)
        if self.steps is None:
            object.__setattr__(self, "steps", total)

    def resolved(self, total: int) -> PlanRequest:
        """Return the request with the number of steps in place of the number of epochs.

        It follows from public numbers alone: the expected batch size and `total`, the declared
        number of elements. A request whose numbers cannot be used is returned unchanged.
        """
        if self.epochs is None or self.steps is not None or self._size_problems(total):
            return self
        assert self.batch_size is not None
        steps = max(1, round(self.epochs * total / self.batch_size))
        return replace(self, steps=steps, epochs=None)

    @property
    def adaptive_clip_norm(self) -> AdaptiveClipNorm | None:
        """How the clip norm adapts during the run, or None if it is fixed."""
        return self.clip_norm if isinstance(self.clip_norm, AdaptiveClipNorm) else None

    @property
    def initial_clip_norm(self) -> float:
        """The clip norm, or the one of the first step if it adapts."""
        adaptive = self.adaptive_clip_norm
        return float(self.clip_norm if adaptive is None else adaptive.initial)  # type: ignore

    @property
    def schedule(self) -> Schedule | None:
        """The steps and their noise, or None if the number of steps follows from the budgets."""
        if self.steps is None:
            return None
        if self.noise_schedule is None:
            return Schedule.constant(self.steps)
        return Schedule(segments(self.noise_schedule, self.steps))

    def elements(self, owners: Owners) -> np.ndarray:
        """Return how many things may be drawn of each owner: the records, or the owner."""
        return units.elements(str(self.sampling), owners.records)

    def elements_of_holders(self, owners: Owners) -> np.ndarray:
        """Return how many things may be drawn of each holder: an owner, or a set of owners."""
        shared = None if self.sampling == "owner" else owners.shared
        return units.elements_of_holders(str(self.sampling), owners.records, shared)

    def counted_together(self, owners: Owners) -> np.ndarray | None:
        """Return how many records of each owner share the owner's budget, or None if none do."""
        return units.counted_together(self.unit, str(self.sampling), owners.records)

    def problems(self, total: int | None = None) -> list[str]:
        """Return all problems; a problem with one argument starts with the argument's name.

        `total` is the number of elements of all owners, or None if unknown.
        """
        return [
            *self._name_problems(),
            *self._unit_problems(),
            *self._size_problems(total),
            *self._noise_problems(),
            *self._release_problems(),
            *individual.request_problems(self),
        ]

    def _name_problems(self) -> list[str]:
        names = {
            "method": METHODS,
            "accountant": tuple(ACCOUNTANTS),
            "release_noise": NOISES,
            "unit": tuple(UNITS),
            "sampling": tuple(UNITS),
        }
        if self.sampling == self.unit:  # by default; one problem is enough
            del names["sampling"]
        given = {name: getattr(self, name) for name in names}
        return [
            f"{name} is {value!r}; {known_names(value, names[name])}"
            for name, value in given.items()
            if value not in names[name]
        ]

    def _unit_problems(self) -> list[str]:
        problems, most = [], self.records_per_owner
        if self.sampling == "owner" and self.unit == "record":
            problems.append(
                "sampling 'owner' with unit 'record': expected unit='owner', because whole owners "
                "are drawn and protected"
            )
        if self.sampling == "record" and self.unit == "owner":
            problems += self._together_problems()
        if most is not None and not (_in(most, 1, math.inf) and most == int(most)):  # type: ignore
            problems.append(
                f"records_per_owner {most!r}: expected a whole number of at least 1, or None for "
                "all records"
            )
        elif most != RECORDS_PER_OWNER and self.sampling != "owner":
            problems.append(
                f"records_per_owner {most!r} with sampling 'record': expected unit='owner' with "
                "sampling='owner', the only one that limits an owner's records in a step"
            )
        if self.method == individual.METHOD and most not in (None, RECORDS_PER_OWNER):
            problems.append(
                f"records_per_owner {most!r} with method 'individual': expected None, because "
                "every step uses all declared records of every owner"
            )
        if self.hardened and self.sampling == "owner" and self.method != individual.METHOD:
            problems.append(
                "hardened with sampling 'owner': expected one of them, because owners have "
                "different numbers of records, and hardened plans need a public number of rows"
            )
        return problems

    def _together_problems(self) -> list[str]:
        """Return what cannot be accounted for if all records of an owner count together."""
        given = {
            "calibration": self.calibration is not None,
            "hardened": self.hardened,
            "release_noise 'laplace'": self.release_noise == "laplace",
        }
        return [
            f"{name} with unit 'owner' and sampling 'record': expected neither, because the plan "
            "cannot account for it for all records of an owner together; leave it out"
            + ("" if name == "hardened" else ", or use sampling='owner'")
            for name, is_given in given.items()
            if is_given
        ]

    def _size_problems(self, total: int | None) -> list[str]:
        problems = self._epoch_problems()
        length = self.steps if self.epochs is None else self.epochs
        given = sum(x is not None for x in (length, self.batch_size, self.noise_multiplier))
        if given != 2 and self.method != individual.METHOD:
            problems.append(
                f"{given} of steps, batch_size and noise_multiplier were given; expected two (the "
                "third follows from the budgets)"
            )
        if self.steps is not None and not (
            _in(self.steps, 1, MAX_STEPS) and self.steps == int(self.steps)
        ):
            problems.append(f"steps {self.steps!r}: expected a whole number from 1 to {MAX_STEPS}")
        most = math.inf if total is None else total
        if self.batch_size is not None and not (
            _in(self.batch_size, 0, most) and 0 < self.batch_size < math.inf
        ):
            drawn = "owners" if self.sampling == "owner" else "declared records"
            limit = "" if total is None else f" and at most the {most:g} {drawn}"
            size = self.batch_size
            shown = f"{size:g}" if _is_number(size) else repr(size)
            problems.append(f"batch_size {shown}: expected a number above 0{limit}")
        if (adaptive := self.adaptive_clip_norm) is not None:
            problems += [f"clip_norm: {problem}" for problem in adaptive.problems()]
        elif isinstance(self.clip_norm, Mapping):
            problems += [f"clip_norm: {problem}" for problem in option_problems(self.clip_norm)]
        elif not _in(self.clip_norm, MIN_CLIP_NORM, 1 / MIN_CLIP_NORM):
            problems.append(
                f"clip_norm {self.clip_norm!r}: expected {CLIP_NORM_RANGE}, so that its square "
                "fits in float32, or 'adaptive'"
            )
        if self.mixture is not None and self.method not in ("both", individual.METHOD):
            problems.append(
                f"mixture {self.mixture}: only method='both' and method='individual' use a mixture"
            )
        elif self.mixture is not None and not _in(self.mixture, 0, 1):
            problems.append(f"mixture {self.mixture}: expected 0 (sample) to 1 (scale)")
        return problems

    def _epoch_problems(self) -> list[str]:
        """Return the reasons why the number of epochs cannot determine the number of steps."""
        if self.epochs is None:
            return []
        problems = []
        if not (_is_number(self.epochs) and 0 < self.epochs < math.inf):
            problems.append(f"epochs {self.epochs!r}: expected a positive finite number")
        if self.steps is not None:
            problems.append(
                f"epochs {self.epochs!r} and {self.steps!r} steps were both given; expected one of "
                "them (an epoch is the number of declared records divided by batch_size, in steps)"
            )
        elif self.batch_size is None:
            problems.append(
                f"epochs {self.epochs!r} without batch_size: expected both, because the number of "
                "steps is epochs times the declared records divided by batch_size; or pass steps"
            )
        return problems

    def _noise_problems(self) -> list[str]:
        problems = [
            f"{name} {value}: expected a positive finite number"
            for name in ("noise_multiplier", "release_std")
            if (value := getattr(self, name)) is not None
            and not (_is_number(value) and 0 < value < math.inf)
        ]
        known = self.steps is None or (_is_number(self.steps) and math.isfinite(self.steps))
        if self.noise_schedule is not None and known and self.epochs is None:
            problems += schedule_problems(self.noise_schedule, self.steps)
        return problems

    def _release_problems(self) -> list[str]:
        problems, share = [], self.release_share
        if share is not None and not (_is_number(share) and 0 < share < 1):
            problems.append(f"release_share {share}: expected more than 0 and less than 1")
        if share is not None and self.release_std is not None:
            problems.append("release_share and release_std were both given; expected one of them")
        if self.release_noise == "laplace" and self.accountant != "pld":
            problems.append(
                f"release_noise 'laplace' with accountant {self.accountant!r}: expected 'pld', the "
                "only accountant that supports it"
            )
        if self.constraints is not None and not isinstance(self.constraints, PaidMechanism):
            problems.append(NO_CONSTRAINTS.format(self.constraints))
        if self.calibration is not None and not isinstance(self.calibration, ClosingMechanism):
            problems.append(NO_CALIBRATION.format(self.calibration))
        if self.adaptive_clip_norm is not None:
            problems += self._adaptive_problems()
        if self.statistics is not None and not isinstance(self.statistics, OpeningMechanism):
            problems.append(NO_STATISTICS.format(self.statistics))
        shares = [getattr(plug, "share", 0.0) for plug in (self.calibration, self.statistics)]
        if all(map(_is_number, shares)) and sum(shares) >= 1:
            problems.append(
                f"statistics and calibration have the shares {shares[1]:g} and {shares[0]:g} of "
                "the strictest owner's budget; expected less than 1 together, because the steps "
                "need the rest"
            )
        return problems

    def _adaptive_problems(self) -> list[str]:
        """Return the releases that cannot be combined with an adaptive clip norm."""
        problems = []
        if self.constraints is not None:
            problems.append(
                "constraints with an adaptive clip norm: expected one of them, because both "
                "release a sum at every step, and a plan accounts for one; use a fixed clip_norm"
            )
        if self.release_noise == "laplace":
            problems.append(
                "release_noise 'laplace' with an adaptive clip norm: expected 'gaussian', with "
                "which the release and the gradient are one Gaussian mechanism"
            )
        return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _in(value: Any, low: float, high: float) -> bool:
    return _is_number(value) and low <= value <= high
