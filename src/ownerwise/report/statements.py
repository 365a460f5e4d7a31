"""Statements about the guarantee, shared by the report and the card."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.errors import name_some
from ownerwise.owners import UNIT
from ownerwise.planning import Plan
from ownerwise.runs import Run
from ownerwise.wording import delta, delta_span, span, span_up, whole

NOT_PRIVATE = "NOT PRIVATE"

ADJACENCY = (
    "Two data sets are neighbours if adding one record to one of them yields the other. What is "
    "released from two neighbours is (ε, δ)-indistinguishable, where (ε, δ) is the budget of that "
    "record's owner."
)

ATTACKER = (
    "Suppose an attacker knows everything about a record except whether it was used in training. "
    "Without the model, their guess is right 50 times in 100. With the model, their guess is right "
    "on average no more often than stated here, whatever their method and computing power."
)

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


def unit(run: Run) -> str:
    """Return the unit of privacy, and what it means for an owner with many records."""
    largest = int(run.plan.records.max())
    words = f"The unit of privacy is {UNIT}."
    if largest > 1:
        words += (
            f" The largest owner declares {whole(largest)} records: the stated ε holds for each of "
            "them, not for all of them together."
        )
    return words


def protected(runs: Sequence[Run]) -> str:
    """Return the sentence that states what private runs guarantee."""
    budgets = sorted({_budgets(run.plan) for run in runs})
    return f"Each record is protected individually with its owner's budget: {name_some(budgets)}."


def _budgets(plan: Plan) -> str:
    epsilon = span_up(float(plan.targets.min()), float(plan.targets.max()), 3)
    deltas = delta_span(float(plan.deltas.min()), float(plan.deltas.max()))
    return f"ε {epsilon} at δ {deltas}"


def large_delta(run: Run) -> str:
    """Return a caution if a delta exceeds one over the number of records, else ""."""
    largest, total = float(run.plan.deltas.max()), int(run.plan.records.sum())
    if largest * total <= 1:
        return ""
    return (
        f"CAUTION: δ is up to {delta(largest)}, more than 1/{total}, one over the number of "
        "records. A guarantee with such a δ even permits publishing an entire record."
    )


def no_guarantee(runs: Sequence[Run], shown: int = 1) -> str:
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


def random_source(run: Run) -> str:
    """Return the source of randomness for batches and noise."""
    if run.seed is not None:
        return f"a fixed seed, for tests and comparisons only: {NOT_PRIVATE}"
    return (
        "AES-256 in counter mode for batches and noise, with a fresh key from the operating "
        "system; the key was never stored"
    )


def mechanism(plan: Plan) -> dict[str, str]:
    """Return the properties of the private step that the plan determines, keyed by name."""
    rates = span(float(plan.sampling_rates.min()), float(plan.sampling_rates.max()), 4)
    factors = [factor for _, factor in plan.schedule.segments]
    noise = f"Gaussian, std {plan.noise_std:.6g} on the sum of clipped gradients, once per step"
    if len(factors) > 1:
        noise += f", times a scheduled factor from {factors[0]:g} to {factors[-1]:g}"
    mixture = "" if plan.mixture is None else f", mixture {plan.mixture:g}"
    return {
        "Plan": f"{plan.method}{mixture}",
        "Sampling": f"Poisson: each record is drawn independently at its owner's rate ({rates})",
        "Clip norm": span(float(plan.clip_norms.min()), float(plan.clip_norms.max()), 4),
        "Noise": noise,
        "Divisor": f"{plan.expected_batch_size:.6g}, the expected batch size, fixed in advance",
        "Steps planned": whole(plan.steps),
        "Arithmetic": arithmetic(plan),
    }


def arithmetic(plan: Plan) -> str:
    """Return which attacks on rounding the plan's arithmetic resists."""
    if plan.hardened_rows is not None:
        return (
            "noise on a public grid; the records of every batch are placed in secret rows out of "
            f"{whole(plan.hardened_rows)}, so no record changes the rounding of another record's "
            "gradient"
        )
    return (
        "noise on a public grid; not hardened, so the guarantee does not cover records crafted to "
        "change the rounding of other records (hardened=True covers them)"
    )


def accounting(plan: Plan) -> dict[str, str]:
    """Return the accountant that computed a plan's spending, and the check that verified it."""
    return {"Accountant": _ACCOUNTANTS[plan.accountant], "Verified by": str(plan.verify())}


def released(run: Run) -> list[str]:
    """Return everything computed from training records that left the process."""
    items = [
        f"the model after {whole(run.updates)} updates, and every earlier version of it (the "
        "accounting covers all of them)"
    ]
    if run.plan.release_std is not None:
        what = "one histogram of predictions" if run.config.get("constraints") else "one sum"
        kind = run.plan.release_noise.capitalize()
        items.append(
            f"at every step, {what} over per-record vectors of norm at most 1, with {kind} noise "
            f"of std {run.plan.release_std:g} (accounted for together with the gradient)"
        )
    return items


def assumed_public(run: Run) -> list[str]:
    """Return everything that the guarantee assumes to be public."""
    items = [
        "the table of budgets: which owner set which ε and δ",
        "the declared number of records for each owner",
        "the model architecture, the loss, the optimizer and all settings",
        "the plan: sampling rates, clip norms, noise, expected batch size, number of steps",
        "the lists of classes, features and groups, and any constants used to normalise the data; "
        "if any of these were derived from private records, the accounting does not cover that",
    ]
    if run.config.get("weights"):
        items.append("the shape and length of the importance tail")
    if run.config.get("constraints"):
        items.append(
            "the constraints and the rule that assigns records to cells (but not the cells "
            "themselves)"
        )
    return items


def not_covered(runs: Sequence[Run]) -> list[str]:
    """Return everything that is not covered by a guarantee or not accounted for."""
    items = [
        "Validation and test metrics are computed without noise. The records they were measured "
        "on are NOT covered by any guarantee: the metrics are not private.",
        "Decisions based on these metrics (settings, method, when to stop) are not accounted for; "
        "neither is a hyper-parameter search on the private records.",
        "General facts about people that a model can learn with or without any single record, and "
        "anything an attacker already knows.",
        "The training time and any other side channel.",
        *(
            ["Records crafted to change how others are rounded, because the plan is not hardened."]
            if any(run.plan.hardened_rows is None for run in runs)
            else []
        ),
    ]
    earlier = max((run.config.get("earlier_trainings", 0) for run in runs), default=0)
    if earlier:
        items.insert(
            2,
            "The process that trained this model had already trained on owners with the same ids "
            f"and counts ({earlier} {'time' if earlier == 1 else 'times'}): if the records were "
            "the same and those models are released too, the privacy costs to each record add up.",
        )
    if len(runs) > 1:
        items.insert(
            2,
            f"Each ε holds for a single run. This page shows {len(runs)} runs: if several of them "
            "used the same records and all are released, the privacy costs to each record add up.",
        )
    return items
