"""The facts about runs, computed once; the report and the privacy card are rendered from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ownerwise.errors import name_some
from ownerwise.owners import UNITS
from ownerwise.planning import BudgetClass, Plan, epsilon_words, owner_statement
from ownerwise.report.guarantees import Spent, attacker_bound, classes_of, spent
from ownerwise.report.held_out import UNCHECKED, unprotected_owners
from ownerwise.runs import Run
from ownerwise.wording import delta, delta_span, span, span_up, whole

NOT_PRIVATE = "NOT PRIVATE"

ADJACENCY = {
    "record": "Two data sets are neighbours if adding one record to one of them yields the other. "
    "The releases from two neighbours are (ε, δ)-indistinguishable, where (ε, δ) is the budget of "
    "that record's owner.",
    "owner": "Two data sets are neighbours if adding all records of one owner to one of them "
    "yields the other. The releases from two neighbours are (ε, δ)-indistinguishable, where (ε, δ) "
    "is the budget of that owner.",
}

_ATTACKER = (
    "Suppose an attacker knows everything about {} in training. Without the model, their guess is "
    "right 50 times in 100. With the model, their guess is right on average no more often than "
    "stated here, whatever their method and computing power."
)
ATTACKER = {
    "record": _ATTACKER.format("a record except whether it was used"),
    "owner": _ATTACKER.format("an owner's records except whether they were used"),
}

NO_VALIDATION = (
    "No validation data were passed, so it is unknown how well the model works, and for whom."
)

HYPOTHETICAL_EPSILON = (
    "Each ε below is what the same training would guarantee with secret randomness and without "
    "the parts that are not private."
)

_ACCOUNTANTS = {
    "pld": "privacy loss distributions (pld)",
    "rdp": "Rényi divergences (rdp)",
}


_ARRAYS = re.compile(r"\((?:\w+ \[(?P<inputs>[\d, ]*)\]), (?:\w+ \[(?P<targets>[\d, ]*)\])\)")


def data_words(run: Run) -> str:
    """Return a description of the training data; a pair of arrays is described by its shapes."""
    stated = str(run.config.get("data") or "")
    arrays = _ARRAYS.fullmatch(stated)
    if arrays is None:
        return stated
    inputs, targets = (_per_record(arrays[name]) for name in ("inputs", "targets"))
    return f"arrays with {inputs} and {targets.replace('1 number', 'one target')} per record"


def _per_record(shape: str) -> str:
    sizes = shape.replace(",", " ×")
    return f"{sizes} {'number' if sizes == '1' else 'numbers'}" if shape else "1 number"


class BudgetFacts(NamedTuple):
    """A budget class, what its owners have spent, and the bound on an attacker (see `ATTACKER`).

    `other_epsilon` is the epsilon for the plan's `other_unit` in words; "" if there is none.
    """

    budget: BudgetClass
    spent: Spent
    other_epsilon: str
    attacker_bound: float


@dataclass(frozen=True)
class PlanFacts:
    """A plan and the runs that were trained under it.

    Attributes:
        labels: the methods' labels, separated by commas.
        steps_spent: the largest number of steps spent by any of the runs.
        names_owners: whether results are shown under the names of the plan's owners.
    """

    plan: Plan
    labels: str
    steps_spent: int
    names_owners: bool

    @cached_property
    def budgets(self) -> list[BudgetFacts]:
        """The facts about each budget class, strictest first."""
        classes, other = classes_of(self.plan), self._other_epsilon
        return [
            BudgetFacts(
                row,
                spending,
                "" if other is None else _range_words(other[row.members]),
                attacker_bound(row.epsilon[1], row.delta[1]),
            )
            for row, spending in zip(
                classes, spent(self.plan, classes, self.steps_spent), strict=True
            )
        ]

    @cached_property
    def owner_epsilon(self) -> np.ndarray:
        """The epsilon that all records of each owner together have spent."""
        return self.plan.owner_epsilon(steps=self.steps_spent)

    @property
    def _other_epsilon(self) -> np.ndarray | None:
        if self.plan.other_unit == "owner":
            return self.owner_epsilon
        if self.plan.other_unit == "record":
            return self.plan.record_epsilon(steps=self.steps_spent)
        return None

    @cached_property
    def mechanism(self) -> dict[str, str]:
        """The properties of the private step that the plan determines, keyed by name."""
        plan = self.plan
        rates = span(float(plan.sampling_rates.min()), float(plan.sampling_rates.max()), 4)
        factors = [factor for _, factor in plan.schedule.segments]
        noise = f"Gaussian, std {plan.noise_std:.6g} on the sum of clipped gradients, once per step"
        if len(factors) > 1:
            noise += f", times a scheduled factor from {factors[0]:g} to {factors[-1]:g}"
        mixture = "" if plan.mixture is None else f", mixture {plan.mixture:g}"
        clip_norm = span(float(plan.clip_norms.min()), float(plan.clip_norms.max()), 4)
        if (adaptive := plan.adaptive_clip_norm) is not None:
            clip_norm += (
                f" in the first step; then scaled, together with the noise, to follow the "
                f"{adaptive.quantile:g} quantile of the gradient norms"
            )
        return {
            "Plan": f"{plan.method}{mixture}",
            "Sampling": _drawn(plan)
            if plan.filter is not None
            else f"Poisson: {_drawn(plan)} ({rates})",
            **_individual(plan),
            "Clip norm": clip_norm,
            "Noise": noise,
            "Divisor": f"{plan.expected_batch_size:.6g}, the expected batch size, fixed in advance",
            "Steps planned": whole(plan.steps),
            "Arithmetic": _arithmetic(plan),
        }

    @cached_property
    def accounting(self) -> dict[str, str]:
        """The accountant that computed the spending, and the check that verified it."""
        return {
            "Accountant": _ACCOUNTANTS[self.plan.accountant],
            "Verified by": str(self.plan.verify()),
        }


@dataclass(frozen=True)
class Facts:
    """What is true of all runs on a page.

    Attributes:
        plans: the distinct plans.
        private: whether the guarantee holds for every run.
        status: what private runs guarantee; otherwise why there is no guarantee.
        cautions: deltas that are too large to protect a record.
        held_out: statements about the owners of held-out records, who are not protected.
    """

    plans: tuple[PlanFacts, ...]
    private: bool
    status: str
    cautions: tuple[str, ...]
    held_out: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Facts:
        """Compute the facts about one or more runs."""
        unprotected = [run for run in runs if not run.private]
        return cls(
            plans=_plans(runs),
            private=not unprotected,
            status=_no_guarantee(unprotected, len(runs)) if unprotected else _protected(runs),
            cautions=tuple(sorted({caution for run in runs if (caution := _large_delta(run))})),
            held_out=tuple(dict.fromkeys(text for run in runs for text in unprotected_owners(run))),
        )

    @cached_property
    def most_records(self) -> int:
        """The largest number of records that an owner declares."""
        return max(int(use.plan.records.max()) for use in self.plans)

    @cached_property
    def owner_epsilon(self) -> np.ndarray:
        """The epsilon for all records of an owner together, for each owner of each plan."""
        return np.concatenate([use.owner_epsilon for use in self.plans])

    @cached_property
    def by_owner(self) -> bool:
        """Whether every plan protects each owner with all of their records."""
        return all(use.plan.unit == "owner" for use in self.plans)

    @cached_property
    def unit_noun(self) -> str:
        """What the stated epsilon holds for: "owner" or "record"."""
        return "owner" if self.by_owner else "record"

    @cached_property
    def units(self) -> str:
        """What the ε of any of the plans holds for: "owner", "record" or "record or owner"."""
        return " or ".join(sorted({use.plan.unit for use in self.plans}, reverse=True))

    @cached_property
    def headline(self) -> str:
        """What private runs protect: everyone, or only single records."""
        if self.by_owner or self.most_records <= 1:
            if any(text.startswith("UNPROTECTED") for text in self.held_out):
                return "Private, except for held-out owners"
            if UNCHECKED in self.held_out:
                return "Private, if no held-out owner is in the plan"
            return "Private"
        return f"Private per RECORD, not per person: up to {whole(self.most_records)} records each"

    @cached_property
    def per_owner(self) -> str:
        """The epsilon for all records of an owner together, in words; "" if all have one record."""
        if self.by_owner or self.most_records <= 1:
            return ""
        return (
            f"{owner_statement(self.owner_epsilon, 'ε')} This holds for owners with at most as "
            "many records as they declared."
        )

    @cached_property
    def unit(self) -> str:
        """The unit of privacy, and what it means for an owner with many records."""
        words = f"The unit of privacy is {UNITS[self.unit_noun]}."
        if " or " in self.units:
            owners = ", ".join(use.labels for use in self.plans if use.plan.unit == "owner")
            words = f"{words} Plan of {owners}: {UNITS['owner']}."
        if self.per_owner:
            words += (
                f" The largest owner declares {whole(self.most_records)} records: the stated ε "
                f"holds for each of them, not for all of them together. {self.per_owner}"
            )
        return words

    @cached_property
    def spent(self) -> tuple[float, float]:
        """The smallest and the largest epsilon that any record has spent."""
        each = [budget.spent for plan in self.plans for budget in plan.budgets]
        return min(one.low for one in each), max(one.high for one in each)

    @cached_property
    def largest_share(self) -> float:
        """The largest share of a budget that any record has spent."""
        return max(budget.spent.share for plan in self.plans for budget in plan.budgets)


def _range_words(values: np.ndarray) -> str:
    return epsilon_words((float(values.min()), float(values.max())))


def _plans(runs: Sequence[Run]) -> tuple[PlanFacts, ...]:
    by_hash: dict[str, list[Run]] = {}
    for run in runs:
        by_hash.setdefault(run.plan.hash, []).append(run)
    return tuple(
        PlanFacts(
            of_plan[0].plan,
            ", ".join(dict.fromkeys(run.label for run in of_plan)),
            max(run.steps_spent for run in of_plan),
            any(_names_owners(run) for run in of_plan),
        )
        for of_plan in by_hash.values()
    )


def _names_owners(run: Run) -> bool:
    owners = run.plan.owners
    return owners is not None and not run.group_budgets.keys().isdisjoint(
        map(str, owners.ids.tolist())
    )


def _drawn(plan: Plan) -> str:
    """Return what is drawn at each step, in words."""
    if plan.filter is not None:
        who = "records" if plan.sampling == "record" else "owners, with all of their records,"
        return f"none: all {who} that have budget left take part in every step"
    if plan.sampling != "owner":
        return "each record is drawn independently at its owner's rate"
    most = plan.records_per_owner
    part = "all of their records" if most is None else f"at most {whole(most)} of their records"
    return f"each owner is drawn independently, with {part}, at their own rate"


def _individual(plan: Plan) -> dict[str, str]:
    """Return what individual accounting does, if the plan has it."""
    if plan.filter is None or plan.clipped_steps is None:
        return {}
    steps = span(float(plan.clipped_steps.min()), float(plan.clipped_steps.max()), 4)
    last = ", after a last one clipped to what remains" if plan.clip_to_remaining else ""
    return {
        "Individual accounting": (
            f"a {plan.filter.upper()} filter charges each {plan.sampling} for its own clipped "
            f"gradient. Its budget pays for {steps} steps if every gradient is clipped, and for "
            f"more if not; then it retires{last}. What each {plan.sampling} has spent, and which "
            "ones still take part, is private and not shown: every figure here assumes that "
            "gradients are clipped"
        )
    }


def _arithmetic(plan: Plan) -> str:
    """Return a description of the rounding attacks that the plan's arithmetic resists."""
    if plan.hardened_rows is not None:
        return (
            "noise on a public grid; the records of every batch are placed in secret rows out of "
            f"{whole(plan.hardened_rows)}, so no record changes the rounding of another record's "
            "gradient"
        )
    covered = "" if plan.unit == "owner" else " (a hardened plan covers them)"
    return (
        "noise on a public grid; not hardened, so the guarantee does not cover records crafted to "
        f"change the rounding of other records{covered}"
    )


def _protected(runs: Sequence[Run]) -> str:
    budgets = sorted({_budgets(run.plan) for run in runs})
    whom = "Each training record is protected individually with its owner's budget"
    if all(run.plan.unit == "owner" for run in runs):
        whom = (
            "Each owner in the plan is protected, with all of their records together, with their "
            "own budget"
        )
    return f"{whom}: {name_some(budgets)}."


def _budgets(plan: Plan) -> str:
    epsilon = span_up(float(plan.targets.min()), float(plan.targets.max()), 3)
    deltas = delta_span(float(plan.deltas.min()), float(plan.deltas.max()))
    return f"ε {epsilon} per {plan.unit} at δ {deltas}"


def _no_guarantee(runs: Sequence[Run], shown: int) -> str:
    """Return a warning that `runs`, out of `shown` runs, have no guarantee, with the reasons."""
    single = len(runs) == 1
    subject = "This run" if single else "These runs"
    if len(runs) < shown:
        subject = f"{len(runs)} of {shown} runs"
    verb, models = ("carries", "its model") if single else ("carry", "their models")
    return f"{subject} {verb} no guarantee: {_reasons(runs)}. Do not release {models} as private."


def _reasons(runs: Sequence[Run]) -> str:
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    reasons = []
    if seeds:
        noun = "a fixed seed" if len(seeds) == 1 else "fixed seeds"
        reasons.append(
            f"batches and noise came from {noun} ({name_some(seeds, shown=10)}), and anyone who "
            "knows a seed can subtract the noise"
        )
    reasons += sorted({reason for run in runs for reason in run.config.get("not_private", ())})
    return "; ".join(reasons)


def _large_delta(run: Run) -> str:
    """Return a caution if a delta exceeds one over the number of records, else ""."""
    plan = run.plan
    by_owner = plan.unit == "owner"
    largest, total = (
        float(plan.deltas.max()),
        len(plan.deltas) if by_owner else plan.total_records,
    )
    if largest * total <= 1:
        return ""
    what = "all records of an owner" if by_owner else "an entire record"
    return (
        f"CAUTION: δ is up to {delta(largest)}, more than 1/{total}, one over the number of "
        f"{plan.unit}s. A guarantee with such a δ even permits publishing {what}."
    )
