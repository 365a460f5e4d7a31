"""Canaries: made-up records whose part in a run is known, so that it can be measured.

Every canary belongs to a made-up owner of its own, who has the budget, sampling rate and clip norm
of a real owner. A fair coin from the secret stream decides whether its rows are in the data. Its
loss is linear in one extra parameter, so its gradient is a fixed direction that no other record
shares, and longer than the clip norm. The real sampler draws canaries, and the real step clips,
weights, sums and noises them as it does all records: nothing in the step knows about them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from ownerwise.batches import ownerless_problems
from ownerwise.errors import OwnerwiseError, PrivacyWarning
from ownerwise.owners import Owners
from ownerwise.planning import Plan
from ownerwise.planning.batch_bounds import rows_needed
from ownerwise.planning.budget_classes import class_members
from ownerwise.planning.storage import columns
from ownerwise.randomness import SecretStream
from ownerwise.wording import span

STRENGTH = 100.0
"""The norm of a canary's gradient, in units of its clip norm."""

MOST_BUDGETS = 4
"""Largest number of budgets that have canaries: with more, each would have too few."""

_LEVELS = (0.2, 1e5)
"""Smallest and largest loss of a canary: INO orders records by losses in this range."""


@dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries of one audit. `Canaries.of` makes them.

    Attributes:
        plan: the audited plan with the canaries' owners, who come last. All rates, clip norms and
            the noise are those of the audited plan; the divisor counts the canaries as well.
        groups: the name of each group, such as "ε = 1".
        group: group of each canary.
        owner: position of each canary's owner in the plan.
        level: the value of each canary's loss.
        included: whether each canary's rows are in the data.
        records: inputs and targets of each canary, if they are ordinary records; by default, a
            canary has a gradient of its own.
    """

    plan: Plan = field(repr=False)
    groups: list[str]
    group: np.ndarray = field(repr=False)
    owner: np.ndarray = field(repr=False)
    level: np.ndarray = field(repr=False)
    included: np.ndarray = field(repr=False)
    records: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, plan: Plan, count: int, stream: SecretStream, *, alone: bool, ordered: bool = False
    ) -> Canaries:
        """Return `count` canaries, spread evenly over budget groups of a plan.

        If the plan has more than `MOST_BUDGETS` budget classes, canaries have the strictest budget,
        the laxest, and some in between.

        Args:
            plan: the plan to audit, with owners.
            count: number of canaries.
            stream: the coins come from its child "canaries".
            alone: whether the canaries' owners are the only ones in the new plan.
            ordered: whether the step weights records by their losses. Then each group is split in
                two: canaries with the largest losses, which keep weight 1, and the others.
        """
        classes = class_members(plan.targets, plan.deltas)
        if len(classes) > MOST_BUDGETS:
            chosen = np.linspace(0, len(classes) - 1, MOST_BUDGETS).round().astype(int)
            classes = [classes[number] for number in chosen]
        halves = 2 if ordered else 1
        if count < 2 * halves * len(classes):
            raise OwnerwiseError(
                f"{count} canaries for {halves * len(classes)} groups: expected at least 2 each"
            )
        group = np.sort(np.arange(count) % (halves * len(classes)))
        templates = np.array([members[0] for members in classes])[group // halves]
        names = [f"ε = {span(*_ends(plan.targets[members]), 3)}" for members in classes]
        if ordered:
            parts = ("large losses", "small losses")
            names = [f"{name}, {part}" for name in names for part in parts]
        large = (group % halves == 0) if ordered else np.ones(count, dtype=bool)
        extended = with_owners(plan, templates, alone=alone)
        canaries = cls(
            plan=extended,
            groups=names,
            group=group,
            owner=len(extended.targets) - count + np.arange(count),
            level=_levels(large, group),
            included=np.zeros(count, dtype=bool),
        )
        return canaries.flipped(stream)

    def flipped(self, stream: SecretStream) -> Canaries:
        """Return the same canaries with new coins, for another run."""
        coins = stream.child("canaries").at_step(0).coins(len(self.group))
        included = coins.astype(bool)
        assert self.plan.owners is not None
        first = int(self.owner[0])
        kept = self.plan.owners.record_owner_index
        assert kept is not None
        rows = np.concatenate([kept[kept < first], np.repeat(self.owner, self.rows * included)])
        owners = self.plan.owners.with_records(rows)
        return replace(self, included=included, plan=replace(self.plan, owners=owners))

    def with_records(self, records: tuple[Tensor, Tensor]) -> Canaries:
        """Return the canaries as ordinary records: (inputs, targets), one per canary."""
        if {len(part) for part in records} != {len(self)}:
            raise OwnerwiseError(
                f"canary_records have {' and '.join(str(len(part)) for part in records)} rows; "
                f"expected one per canary, {len(self)}"
            )
        return replace(self, records=records)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def rows(self) -> np.ndarray:
        """Number of rows of each canary, if it is included."""
        return self.plan.records[self.owner]

    @property
    def row_canary(self) -> np.ndarray:
        """The canary of each row that belongs to one, in the order of the data."""
        return np.repeat(np.arange(len(self)), self.rows * self.included)

    @property
    def clip_norm(self) -> np.ndarray:
        """Clip norm of each canary."""
        return self.plan.clip_norms[self.owner]

    @property
    def slope(self) -> np.ndarray:
        """Norm of the gradient of each canary's rows in its own direction."""
        return (STRENGTH if self.records is None else 0.0) * self.clip_norm

    @property
    def paid(self) -> np.ndarray:
        """The part of its clip norm that a canary's budget pays for, [steps, canaries].

        It is 1, except with individual accounting: canaries are always clipped, so they retire
        after `plan.clipped_steps`.
        """
        plan, steps = self.plan, np.arange(self.plan.steps)[:, None]
        if plan.clipped_steps is None or plan.filter_limits is None:
            return np.ones((plan.steps, len(self)))
        whole = plan.clipped_steps[self.owner]
        last = np.zeros(len(self))
        if plan.clip_to_remaining:
            budget = plan.filter_limits * plan.noise_multipliers**2
            last = np.sqrt(budget[self.owner] - whole)
        return (steps < whole) + (steps == whole) * last

    def members(self, group: int) -> np.ndarray:
        """Return the canaries of a group."""
        return np.flatnonzero(self.group == group)


def with_owners(plan: Plan, templates: np.ndarray, *, alone: bool) -> Plan:
    """Return the plan with one more owner, with rows, for each template; they come last.

    A new owner has the budget, the sampling rate, the clip norm and the shares of the template's
    owner. With unit "record", it declares one record; otherwise as many as the template's owner.
    """
    if not alone:
        problems = ownerless_problems(plan)
        if plan.shared is not None:
            problems.append(
                "the plan has records with several owners: audit it without a model, so that the "
                "canaries train alone"
            )
        if plan.opening_std is not None:
            problems.append(
                "the plan accounts for column statistics, which an audit does not release: audit "
                "it without a model, so that only its steps are audited"
            )
        if problems:
            raise OwnerwiseError(problems)
    count = len(plan.targets)
    at = np.append(np.arange(0 if alone else count), templates)
    values: dict[str, Any] = {name: getattr(plan, name)[at] for name in columns(plan)}
    values["records"] = values["records"].copy()
    if plan.unit == "record":
        values["records"][len(at) - len(templates) :] = 1
    elif plan.sampling == "owner" and plan.records_per_owner is not None:
        own = values["records"][len(at) - len(templates) :]
        np.clip(own, 1, plan.records_per_owner, out=own)
    ids = np.arange(len(at))
    rows = np.repeat(ids, values["records"])
    if not alone:
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        rows = np.append(plan.owners.record_owner_index, rows[plan.records.sum() :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # canaries are not people
        owners = Owners(
            rows,
            dict(enumerate(values["targets"].tolist())),
            dict(enumerate(values["deltas"].tolist())),
            records=dict(enumerate(values["records"].tolist())),
        )
    extended = replace(
        plan,
        **values,
        shared=None,
        opening_std=None,
        owners=owners,
        owners_fingerprint=owners.fingerprint,
    )
    holders = extended.holders
    divisor = float(holders.sampling_rates @ holders.elements)
    extended = replace(extended, expected_batch_size=divisor)
    if plan.hardened_rows is not None:
        probability = extended.overflow_probability
        needed = rows_needed(holders.sampling_rates, holders.elements, probability)
        extended = replace(extended, hardened_rows=needed)
    return extended


def _levels(large: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return distinct losses on a logarithmic scale: the large ones first, groups taking turns."""
    turn = np.arange(len(group)) - np.searchsorted(group, group)  # groups are sorted
    levels = np.empty(len(group))
    levels[np.lexsort((turn, ~large))] = np.geomspace(_LEVELS[1], _LEVELS[0], len(group))
    return levels


def _ends(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())
