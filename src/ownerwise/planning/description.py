"""What a plan prescribes, in words and by budget class."""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerwise.owners import UNITS
from ownerwise.planning.budget_classes import BudgetClass, class_members
from ownerwise.planning.table import format_rows, owner_statement


def rows_of(plan: Any, owners: bool) -> list[BudgetClass]:
    """Return the plan's values for each budget class, or for each owner if `owners` is true."""
    drawn = _drawn_of_owners(plan)
    total, spent, multipliers = drawn.sum(), plan.epsilon(), plan.noise_multipliers
    of_owner = plan.owner_epsilon()
    of_record = None
    if plan.sampling == "record":
        of_record = spent if plan.unit == "record" else plan.record_epsilon()

    def row(members: np.ndarray, owner: str | None = None) -> BudgetClass:
        def span(values: np.ndarray) -> tuple[float, float]:
            return float(values[members].min()), float(values[members].max())

        strictest_first = np.lexsort((plan.deltas[members], plan.targets[members]))
        return BudgetClass(
            unit=plan.unit,
            members=members[strictest_first],
            records=int(plan.records[members].sum()),
            epsilon=span(plan.targets),
            delta=span(plan.deltas),
            sampling_rate=span(plan.sampling_rates),
            clip_norm=span(plan.clip_norms),
            noise_multiplier=span(multipliers),
            batch_share=float(drawn[members].sum() / total),
            epsilon_spent=span(spent),
            most_records=int(plan.records[members].max()),
            owner_epsilon=span(of_owner),
            record_epsilon=None if of_record is None else span(of_record),
            owner=owner,
        )

    if not owners:
        return [row(members) for members in class_members(plan.targets, plan.deltas)]
    ids = range(len(plan.targets)) if plan.owners is None else plan.owners.ids
    return [row(np.array([at]), str(owner)) for at, owner in enumerate(ids)]


def _drawn_of_owners(plan: Any) -> np.ndarray:
    """Return how many elements of each owner are drawn on average; sets divide theirs."""
    holders, count = plan.holders, len(plan.targets)
    drawn = holders.sampling_rates * holders.elements
    result = drawn[:count].copy()
    if plan.shared is not None:
        each = np.repeat(drawn[count:] / plan.shared.sizes, plan.shared.sizes)
        np.add.at(result, plan.shared.members, each)
    return result


def description(plan: Any, owners: bool) -> str:
    """Return the plan as a table by budget class, or by owner if `owners` is true."""
    table = format_rows(
        rows_of(plan, owners), by_owner=owners, unit=plan.unit, other_unit=plan.other_unit
    )
    return "\n".join([*_heading(plan), "", *table, "", *_notes(plan)])


def _heading(plan: Any) -> list[str]:
    mixture = f" (mixture {plan.mixture:g})" if plan.mixture is not None else ""
    noise = f"noise std {plan.noise_std:.6g}"
    factors = [factor for _, factor in plan.schedule.segments]
    if len(factors) > 1:
        noise += f" x {factors[0]:g} ... {factors[-1]:g} by schedule"
    if plan.release_std is not None:
        kind = "" if plan.release_noise == "gaussian" else f"{plan.release_noise}, "
        least = "" if plan.release_shares is None else f"{plan.release_shares.min():.3g} to "
        noise += f" (and {kind}{plan.release_std:.6g} on a release of sensitivity {least}1)"
    clip_norm = f"clip norm {plan.clip_norm:g}"
    if (adaptive := plan.adaptive_clip_norm) is not None:
        clip_norm += f" at first, then the {adaptive.quantile:g} quantile of the norms"
    if plan.closing_std is not None:
        least = "" if plan.closing_shares is None else f"{plan.closing_shares.min():.3g} to "
        noise += (
            f" (and {plan.closing_std:.6g} on {plan.closing_count} sums over all records after "
            f"training, of sensitivity {least}1)"
        )
    if plan.opening_std is not None:
        noise += (
            f" (and {plan.opening_std:.6g} on column statistics of all records before "
            "training, of sensitivity 1)"
        )
    if (clipped := plan.clipped_steps) is not None:
        low, high = int(clipped.min()), int(clipped.max())
        noise += (
            f" (individual accounting by a {plan.filter.upper()} filter: {low:,}"
            + (f" to {high:,}" if high > low else "")
            + " steps if every gradient is clipped, more if not)"
        )
    return [
        f"Plan {plan.hash[:12]}: method {plan.method}{mixture}, accountant {plan.accountant}",
        f"{plan.steps} steps, expected batch {plan.expected_batch_size:g} of "
        f"{_drawn(plan)}, {noise} on the sum, {clip_norm}",
    ]


def _drawn(plan: Any) -> str:
    if plan.sampling != "owner":
        return f"{plan.total_records} records"
    most = plan.records_per_owner
    each = "all records" if most is None else f"at most {most} record{'s'[: most != 1]}"
    return f"{_owners(len(plan.targets))} with {each} each"


def _notes(plan: Any) -> list[str]:
    largest = int(plan.records.max())
    notes = [f"UNIT OF PRIVACY: {UNITS[plan.unit]}."]
    if largest > 1 and plan.unit == "record":
        notes[0] += (
            f" The largest owner declares {largest} records: the stated epsilon holds for each "
            f"of them, not for all of them together. {owner_statement(plan.owner_epsilon())}"
        )
    if plan.counted_together is not None:
        notes[0] += (
            " The stated epsilon holds for owners with at most as many records as declared (up "
            f"to {largest})."
        )
    public = "Assumed public: the budgets and the declared numbers of records."
    if plan.shared is not None:
        several = int(plan.shared.records.sum())
        public = (
            f"{several} record{'s'[: several != 1]} with several owners: drawn at the smallest "
            "sampling rate and clipped to the smallest clip norm of the owners, and counted "
            f"for each of them. {public[:-1]}, and which owners share how many records."
        )
    notes.append(public)
    unspent = int(plan.unspent.sum())
    if unspent:
        notes.append(
            f"{_owners(unspent)} cannot use up the whole budget (sampling rates are at most 1, "
            "and there is a minimum amount of noise); strict=True refuses such plans."
        )
    if plan.tuning is not None:
        notes.append(
            f"Every epsilon is that of a whole search: {plan.tuning.words()}. It is spent as "
            "soon as the search begins."
        )
    return [*notes, *(f"OF NO USE: {concern}." for concern in plan.concerns)]


def _owners(count: int) -> str:
    return "1 owner" if count == 1 else f"{count} owners"
