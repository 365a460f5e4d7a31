"""The Plan: a frozen object that defines how private data may be used in training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from ownerwise import accounting
from ownerwise.accounting import ClosingRelease, OpeningRelease, PaidRelease, RunCost, Schedule
from ownerwise.errors import PlanError
from ownerwise.owners import Owners, Shared, frozen, of_holders, records_of_holders
from ownerwise.planning import storage, units, verification
from ownerwise.planning.adaptive_clip_norm import AdaptiveClipNorm
from ownerwise.planning.batch_bounds import delta_reserve, overflow_probability, overflow_with
from ownerwise.planning.budget_classes import BudgetClass
from ownerwise.planning.description import description, rows_of
from ownerwise.planning.tuning import Rival, Tuning
from ownerwise.planning.usefulness import concerns_about
from ownerwise.planning.verification import Verification

_MOST_SEARCHES = 200  # of which the cost for all records of an owner is computed

_NUMBERS = (
    "clip_norm", "noise_std", "expected_batch_size", "mixture", "release_std",
    "closing_std", "closing_count", "opening_std",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Plan:
    """Sampling rates, clip norms, noise, divisor and number of steps, fixed before training.

    Formal guarantee: consider a run of at most `steps` steps. At each step, it draws each record of
    owner o independently with probability `sampling_rates[o]`, bounds its contribution to the
    step's sum by `clip_norms[o]`, and adds Gaussian noise of std `noise_std_at(step)` to that sum.
    If `release_std` is set, it also releases one sum of per-record vectors of length at most 1 (at
    most `release_shares[o]`, if set), with noise of std `release_std_at(step)`. If `closing_std` is
    set, it releases `closing_count` more sums after training, over all records, of vectors of
    length at most 1 (at most `closing_shares[o]`, if set; in the first of them at most
    `closing_pulls[o]`, if set), each with noise of std `closing_std`. If `opening_std` is set, it
    releases one sum before training, over all records, of vectors of length at most 1, with noise
    of std `opening_std`; with unit "owner", this bound holds for all records of an owner together.
    If `adaptive_clip_norm` is set, the bounds `clip_norms` and the noise on the step's sum are both
    multiplied by a factor that depends only on what earlier steps have released. It releases
    nothing else. Such a run is (targets[o], deltas[o])-differentially private for each individual
    record of owner o (add or remove one record). For all records of an owner together, it is
    (owner_epsilon()[o], deltas[o])-differentially private.

    If `sampling` is "owner", read "owner" for "record": each owner is drawn with probability
    `sampling_rates[o]`, and all records of the owner together are bounded by `clip_norms[o]` in a
    step's sum and by 1 in each released sum. The run is then (targets[o], deltas[o])-differentially
    private for owner o with all of their records.

    If `tuning` is set, such runs may be made as often as its law says, each with any of its rivals'
    plans, and the best of them released. All epsilons are then those of the whole search, however
    many runs were made and whatever steps they took (see `planning.tuning.Tuning`).

    If `filter` is set, every record (or owner) is charged for its own contribution, and takes part
    in a step only if the sum of the squares of what it changes in each step, over the variance of
    the noise, stays within `filter_limits[o]` (docs/proofs/individual.md).

    Everything in the plan is public; the records, the noise and the random choice of records are
    private. The guarantee rests on the sampled Gaussian mechanism composed by PLD or RDP accounting
    (Mironov, Talwar, Zhang 2019; Koskela, Jalko, Honkela 2020), and for individual budgets on
    Boenisch et al. (2023), "Have it your way: Individualized Privacy Assignment for DP-SGD",
    Theorems 3.1 and 3.2.

    All per-owner arrays follow `owners.ids`. Plans are created by `ownerwise.plan`. A plan created
    in any other way (a copy with other values, an unpickled plan) is verified before it is used.
    """

    method: str
    accountant: str
    clip_norm: float
    noise_std: float
    schedule: Schedule
    expected_batch_size: float
    sampling_rates: np.ndarray = field(repr=False)
    clip_norms: np.ndarray = field(repr=False)
    targets: np.ndarray = field(repr=False)
    deltas: np.ndarray = field(repr=False)
    records: np.ndarray = field(repr=False)
    owners_fingerprint: str = field(repr=False)
    mixture: float | None = None
    release_std: float | None = None
    release_noise: str = "gaussian"
    release_shares: np.ndarray | None = field(default=None, repr=False)
    closing_std: float | None = None
    closing_count: int = 0
    closing_shares: np.ndarray | None = field(default=None, repr=False)
    closing_pulls: np.ndarray | None = field(default=None, repr=False)
    opening_std: float | None = None
    hardened_rows: int | None = None
    unit: str = "record"
    sampling: str = "record"
    records_per_owner: int | None = None
    adaptive_clip_norm: AdaptiveClipNorm | None = field(default=None, repr=False)
    filter: str | None = None
    filter_limits: np.ndarray | None = field(default=None, repr=False)
    clip_to_remaining: bool = False
    shared: Shared | None = field(default=None, repr=False)
    tuning: Tuning | None = field(default=None, repr=False)
    owners: Owners | None = field(default=None, repr=False)

    def __post_init__(self):
        for name in storage.columns(self):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, for copies and pickles; cached values are recomputed."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()  # because unpickled and deep-copied arrays are writeable

    @property
    def steps(self) -> int:
        """Number of planned steps; a run may take fewer, but never more."""
        return self.schedule.steps

    @property
    def elements(self) -> np.ndarray:
        """How many things may be drawn of each owner: the declared records, or 1 for the owner."""
        return units.elements(self.sampling, self.records)

    @property
    def holders(self) -> units.Holders:
        """The values for single owners and, if records have several owners, for sets of owners.

        `owners.record_owner_index` and a batch's `owner_index` are positions in these arrays.
        """
        shares, limits = self.release_shares, self.filter_limits
        return units.Holders(
            units.elements_of_holders(self.sampling, self.records, self.shared),
            of_holders(self.sampling_rates, self.shared),
            of_holders(self.clip_norms, self.shared),
            None if shares is None else of_holders(shares, self.shared),
            None if limits is None else of_holders(limits, self.shared),
        )

    @property
    def total_records(self) -> int:
        """Declared number of records of all owners; a record with several owners counts once."""
        return int(records_of_holders(self.records, self.shared).sum())

    @property
    def counted_together(self) -> np.ndarray | None:
        """How many records of each owner share the owner's budget; None if it is one element."""
        return units.counted_together(self.unit, self.sampling, self.records)

    @property
    def other_unit(self) -> str | None:
        """The unit other than `unit` for which epsilon is stated; None if there is no figure."""
        if self.unit == "record":
            return "owner"
        return "record" if self.sampling == "record" else None

    @property
    def noise_multipliers(self) -> np.ndarray:
        """Noise std divided by the clip norm, per owner."""
        return self.noise_std / self.clip_norms

    @property
    def release(self) -> PaidRelease | None:
        """The additional release that the plan accounts for, or None."""
        if self.release_std is None:
            return None
        return PaidRelease(self.release_std, self.release_noise)

    @property
    def closing(self) -> ClosingRelease | None:
        """The release after training that the plan accounts for, or None."""
        if self.closing_std is None:
            return None
        return ClosingRelease(self.closing_std, self.closing_count)

    @property
    def opening(self) -> OpeningRelease | None:
        """The release before training that the plan accounts for, or None."""
        if self.opening_std is None:
            return None
        return OpeningRelease(self.opening_std, together=self.unit == "owner")

    @property
    def run_cost(self) -> RunCost:
        """The cost of the whole run, as a function of an owner's exposure.

        With a filter, the whole run costs at most as much as one Gaussian mechanism.
        """
        schedule, accountant = self.schedule, self.accountant
        if self.filter is not None:
            schedule = Schedule.constant(1)
        return RunCost(schedule, accountant, self.release, self.closing, self.opening)

    @property
    def exposures(self) -> tuple[np.ndarray, ...]:
        """The parts of every owner's `Exposure`, as one array per part."""
        return self.exposures_after(self.steps)

    def exposures_after(self, steps: int) -> tuple[np.ndarray, ...]:
        """Return the exposures that determine what `steps` steps cost at most (see `run_cost`)."""
        multipliers = self.noise_multipliers
        if self.filter_limits is not None and steps:
            multipliers = np.minimum(steps / multipliers**2, self.filter_limits) ** -0.5
        release, closing = self.release_sensitivities, self.closing_sensitivities
        return self.sampling_rates, multipliers, release, closing

    @property
    def clipped_steps(self) -> np.ndarray | None:
        """How many steps each owner's records can take if every gradient is clipped.

        None without a filter: then every record takes part in all steps for which it is drawn.
        """
        if self.filter is None or self.filter_limits is None:
            return None
        return np.floor(self.filter_limits * self.noise_multipliers**2)

    @property
    def rival(self) -> Rival:
        """What one run of this plan costs each owner, for the cost of a search."""
        return Rival(self.run_cost, self.exposures)

    @property
    def closing_sensitivities(self) -> np.ndarray:
        """The length of a record's vectors in the closing sums that determines their cost."""
        if self.closing_pulls is None:
            return self.closing_lengths(0)
        lengths = self.closing_lengths(1), self.closing_lengths(0)
        return accounting.joint_length(*lengths, self.closing_count)

    def closing_lengths(self, number: int) -> np.ndarray:
        """Return the maximum length of a record's vector in closing sum `number`, per owner."""
        lengths = self.closing_shares
        if number == 0 and self.closing_pulls is not None:
            lengths = self.closing_pulls
        return np.ones(len(self.targets)) if lengths is None else lengths

    @property
    def accounted_multipliers(self) -> np.ndarray:
        """Noise multipliers that include the cost of a release with Gaussian noise."""
        if self.release_std is None:
            return self.noise_multipliers
        if self.release_noise != "gaussian":
            raise PlanError(
                f"with {self.release_noise} noise on the release, a step is not a Gaussian "
                "mechanism and has no single multiplier; use epsilon() or verify()"
            )
        release_multipliers = self.release_std / self.release_sensitivities
        return accounting.joint_multiplier(self.noise_multipliers, release_multipliers)

    @property
    def release_sensitivities(self) -> np.ndarray:
        """Maximum length of the vector that a record adds to the release, per owner."""
        ones = np.ones(len(self.targets))
        return ones if self.release_shares is None else self.release_shares

    @property
    def accounted_deltas(self) -> np.ndarray:
        """The deltas at which epsilon is computed; the rest is reserved for oversized batches.

        A step assumes that a batch does not exceed public bounds on its number of records (hardened
        plans) and its total clip norm (INO). The probability that any batch of the run exceeds its
        bounds is at most the reserved part of delta.
        """
        return self.deltas * (1 - delta_reserve(self.hardened_rows is not None))

    @property
    def overflow_probability(self) -> float:
        """Largest permitted probability, per step and bound, that a batch exceeds the bound."""
        one = overflow_probability(self.deltas, self.steps, self.hardened_rows is not None)
        if self.tuning is None:
            return one
        # K runs may overflow, with neighbouring data as well as with these
        largest = float(np.exp(np.minimum(self.targets.max(), 50.0)))
        return one / (self.tuning.law.mean * (1.0 + largest))

    def noise_std_at(self, step: int) -> float:
        """Return the std of the noise added to the sum at step `step` (counted from 0)."""
        return self.noise_std * self.schedule.factor_at(step)

    def release_std_at(self, step: int) -> float:
        """Return the std of the noise added to the release at step `step`."""
        if self.release_std is None:
            raise PlanError(
                "this plan does not account for a release; make a plan with release_std="
            )
        return self.release_std * self.schedule.factor_at(step)

    def epsilon(self, steps: int | None = None, *, closed: bool | None = None) -> np.ndarray:
        """Return the epsilon spent by each owner's records after `steps` steps (default: all).

        It holds for the plan's unit: a single record of the owner, or the owner. The result comes
        from the plan's own accountant, rounded up. There are no side effects. A release before
        training, if the plan has one, always counts, even before the first step.

        Args:
            steps: number of steps taken.
            closed: whether the closing release, if the plan has one, has been made; by default, it
                counts as soon as all steps are taken.
        """
        if (steps is None or steps == self.steps) and closed is not False:
            return self._epsilon_at_end
        return self._epsilon_of_unit(steps, closed)

    def epsilon_of(
        self, owners: Sequence[int], steps: int, *, closed: bool | None = None
    ) -> np.ndarray:
        """Return the epsilon spent after `steps` steps by the owners at these positions."""
        return self._epsilon_of_unit(steps, closed, np.asarray(owners))

    def owner_epsilon(self, steps: int | None = None, *, closed: bool | None = None) -> np.ndarray:
        """Return the epsilon of each owner after `steps` steps: all of their records together.

        While `epsilon` protects each record by itself, this is the guarantee for the person: it
        bounds what the release reveals about whether ANY of their records were used (add or remove
        all records of the owner, at the owner's delta). It holds for an owner with at most as many
        records as declared. With one record, both figures are the same.

        The result is infinite if it is above 100, and NaN if no bound can be computed. It is
        rounded up; with more than 300 distinct combinations of parameters and numbers of records,
        typically by 10 to 40%.

        Args:
            steps: number of steps taken.
            closed: as for `epsilon`.
        """
        if (steps is None or steps == self.steps) and closed is not False:
            return self._owner_epsilon_at_end
        return self._owner_epsilon_after(steps, closed)

    def _owner_epsilon_after(self, steps: int | None, closed: bool | None) -> np.ndarray:
        if self.unit == "owner":
            return self.epsilon(steps, closed=closed)
        if self.tuning is not None:
            return self._owner_epsilon_of_search()
        run = self._run_after(steps, closed)
        overflow = None
        if self.hardened_rows is not None and self.filter is None:  # else they cannot run out
            holders = self.holders
            fewer = overflow_with(holders.sampling_rates, holders.elements, self.hardened_rows)
            overflow = lambda k: run.schedule.steps * fewer(k)  # noqa: E731
        per_record = self.epsilon(steps, closed=closed)
        exposures = self.exposures_after(self.steps if steps is None else steps)
        return accounting.owner_epsilon(
            run, exposures, self.records, self.accounted_deltas, per_record, overflow
        )

    def record_epsilon(self, steps: int | None = None, *, closed: bool | None = None) -> np.ndarray:
        """Return the epsilon of a single record of each owner after `steps` steps.

        Plans that sample owners have no such figure, because removing a record while its owner
        stays may change the owner's vector by more than removing the owner.

        Args:
            steps: number of steps taken.
            closed: as for `epsilon`.
        """
        if self.sampling == "owner":
            raise PlanError("the plan samples owners, so it has no epsilon per record")
        return self._epsilon_after(steps, closed, together=None)

    @cached_property
    def _owner_epsilon_at_end(self) -> np.ndarray:
        result = self._owner_epsilon_after(None, True).copy()
        result.flags.writeable = False
        return result

    def _run_after(self, steps: int | None, closed: bool | None) -> RunCost:
        steps = self.steps if steps is None else steps
        closed = steps == self.steps if closed is None else closed
        schedule = self.schedule.first(steps)
        if self.filter is not None:
            schedule = Schedule.constant(min(steps, 1))
        return replace(
            self.run_cost,
            schedule=schedule,
            closing=self.closing if closed else None,
        )

    def _epsilon_of_unit(self, steps: int | None, closed: bool | None, at: Any = ...) -> np.ndarray:
        return self._epsilon_after(steps, closed, self.counted_together, at)

    def _epsilon_after(
        self, steps: int | None, closed: bool | None, together: np.ndarray | None, at: Any = ...
    ) -> np.ndarray:
        if self.tuning is not None:
            return self._epsilon_of_search(together)[at]
        run = self._run_after(steps, closed)
        exposures = self.exposures_after(self.steps if steps is None else steps)
        rates, multipliers, release, closing = (part[at] for part in exposures)
        deltas, records = self.accounted_deltas[at], None if together is None else together[at]
        return accounting.epsilon(rates, multipliers, run, deltas, release, closing, records)

    def _epsilon_of_search(self, together: np.ndarray | None) -> np.ndarray:
        assert self.tuning is not None
        by_owner = self.unit == "owner"
        return self.tuning.epsilon(self.accounted_deltas, together, by_owner=by_owner)

    def _owner_epsilon_of_search(self) -> np.ndarray:
        levels = accounting.record_levels(self.records)
        if len(np.unique(np.stack([self.targets, self.deltas, levels]), axis=1).T) > _MOST_SEARCHES:
            levels = np.full(len(levels), levels.max())
        found = np.maximum(self._epsilon_of_search(levels), self.epsilon())
        if self.hardened_rows is not None:  # more records make batches overflow more often
            found[self.records > 1] = np.nan
        return np.where(found > accounting.LARGEST_OWNER_EPSILON, np.inf, found)

    @cached_property
    def _epsilon_at_end(self) -> np.ndarray:
        result = self._epsilon_of_unit(None, True)
        result.flags.writeable = False
        return result

    @property
    def unspent(self) -> np.ndarray:
        """Mask of owners who cannot use up their budgets because of a limit on rates or noise."""
        return self.epsilon() < 0.99 * self.targets

    def verify(self, points: int = verification.POINTS) -> Verification:
        """Recompute epsilon and raise PlanError if it exceeds a target.

        The plan's accountant checks all owners. dp-accounting checks `points` budgets from the
        strictest to the least strict. The values, the owners, the divisor and the number of rows of
        a hardened plan are checked too.
        """
        # may predate a change that bypassed the freeze
        for name in ("hash", "_epsilon_at_end", "_owner_epsilon_at_end"):
            vars(self).pop(name, None)
        return verification.verify(self, points)

    def verified(self) -> Plan:
        """Return a verified copy for training that no other code can change, or raise PlanError.

        The copy is a plain Plan with a plain Schedule, even if this plan uses subclasses. Its
        content is hashed again. Content that this process has already verified is not verified
        again; this includes every plan made by `ownerwise.plan`.
        """
        values = {field.name: getattr(self, field.name) for field in fields(Plan)}
        try:
            values |= {name: _plain(values[name]) for name in _NUMBERS}
            values["schedule"] = Schedule(self.schedule.segments)
            if self.shared is not None:
                values["shared"] = Shared(**self.shared.arrays())
            if self.tuning is not None:
                values["tuning"] = Tuning.of(Tuning.header(self.tuning), Tuning.arrays(self.tuning))
            if self.adaptive_clip_norm is not None:
                values["adaptive_clip_norm"] = AdaptiveClipNorm(
                    **AdaptiveClipNorm.as_dict(self.adaptive_clip_norm)
                )
        except (TypeError, ValueError, OverflowError, AttributeError):
            raise PlanError(
                "the plan contains a value that is not a number; make a new plan"
            ) from None
        own = Plan(**{**values, "owners": copy.copy(self.owners)})
        if problems := verification.owner_problems(own):
            raise PlanError(problems)
        if not verification.is_verified(own):
            own.verify()
        return own

    def rows(self, owners: bool = False) -> list[BudgetClass]:
        """Return the plan's values for each budget class, or for each owner if `owners` is true.

        If there are more than 12 distinct budgets, a class is a range of epsilon.
        """
        return rows_of(self, owners)

    def describe(self, owners: bool = False) -> str:
        """Return the plan as a table by budget class, or by owner if `owners` is true."""
        return description(self, owners)

    @cached_property
    def concerns(self) -> list[str]:
        """The reasons why the plan cannot be of use, each with what would help; none if it can."""
        return concerns_about(self)

    def header(self) -> dict:
        """Return everything but the per-owner arrays, as JSON types."""
        header = {
            "format": storage.FORMAT,
            "method": self.method,
            "accountant": self.accountant,
            "clip_norm": self.clip_norm,
            "noise_std": self.noise_std,
            "schedule": [list(segment) for segment in self.schedule.segments],
            "expected_batch_size": self.expected_batch_size,
            "mixture": self.mixture,
            "release_std": self.release_std,
            "owners": len(self.targets),
            "owners_fingerprint": self.owners_fingerprint,
        }
        if self.hardened_rows is not None:
            header["hardened_rows"] = self.hardened_rows
        if self.release_noise != "gaussian":
            header["release_noise"] = self.release_noise
        if self.closing_std is not None:
            header |= {"closing_std": self.closing_std, "closing_count": self.closing_count}
        if self.opening_std is not None:
            header["opening_std"] = self.opening_std
        if self.unit != "record":
            header |= {"unit": self.unit, "sampling": self.sampling}
        if self.sampling == "owner":
            header["records_per_owner"] = self.records_per_owner
        if self.adaptive_clip_norm is not None:
            header["adaptive_clip_norm"] = self.adaptive_clip_norm.as_dict()
        if self.tuning is not None:
            header["tuning"] = self.tuning.header()
        if self.filter is not None:
            header |= {"filter": self.filter, "clip_to_remaining": self.clip_to_remaining}
        return header

    @cached_property
    def hash(self) -> str:
        """Hash of everything that the plan specifies."""
        arrays = {name: getattr(self, name) for name in storage.columns(self)}
        arrays |= storage.other_arrays(self)
        return storage.content_hash(self.header(), arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def save(self, path: str | PathLike) -> None:
        """Write `path` (JSON) and the per-owner arrays next to it, with one hash over both."""
        storage.save(self.header(), self, path, self.hash)

    @classmethod
    def load(cls, path: str | PathLike, owners: Owners | None = None) -> Plan:
        """Return a stored plan after checking its hash, its budgets and its owners.

        Without `owners`, the plan can be described and verified and its epsilon computed, but it
        cannot be used for training.
        """
        header, arrays = storage.load(path)
        if owners is not None and owners.fingerprint != header["owners_fingerprint"]:
            raise PlanError(
                f"{path} was made for different owners: ids or declared numbers of records differ "
                f"({header['owners']} owners in the plan, {len(owners)} given); make a new plan, "
                "or pass the originally declared counts to Owners(..., records=)"
            )
        plan = cls(
            method=header["method"],
            accountant=header["accountant"],
            clip_norm=header["clip_norm"],
            noise_std=header["noise_std"],
            schedule=Schedule(tuple(map(tuple, header["schedule"]))),
            expected_batch_size=header["expected_batch_size"],
            mixture=header["mixture"],
            release_std=header["release_std"],
            release_noise=header.get("release_noise", "gaussian"),
            closing_std=header.get("closing_std"),
            closing_count=header.get("closing_count", 0),
            opening_std=header.get("opening_std"),
            hardened_rows=header.get("hardened_rows"),
            unit=header.get("unit", "record"),
            sampling=header.get("sampling", "record"),
            records_per_owner=header.get("records_per_owner"),
            adaptive_clip_norm=storage.adaptive_clip_norm_of(header),
            filter=header.get("filter"),
            clip_to_remaining=header.get("clip_to_remaining", False),
            owners_fingerprint=header["owners_fingerprint"],
            shared=storage.shared_of(arrays),
            tuning=storage.tuning_of(header, arrays),
            owners=owners,
            **{name: arrays[name] for name in (*storage.ARRAYS, *storage.SHARES) if name in arrays},
        )
        if owners is not None and not (
            np.array_equal(owners.epsilon, plan.targets)
            and np.array_equal(owners.delta, plan.deltas)
        ):
            raise PlanError(
                f"{path} was made for these owners with different budgets; make a new plan"
            )
        plan.verify()
        return plan


def _plain(value: Any) -> int | float | None:
    """Return a number as a plain int or float; a subclass might redefine arithmetic."""
    if value is None:
        return None
    return float(value) if not isinstance(value, int) else int(value)
