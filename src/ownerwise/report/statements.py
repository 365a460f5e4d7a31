"""What is promised, assumed and not covered, in the words that report and card share."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.errors import name_some
from ownerwise.owners import (
    UNIT,
)
from ownerwise.runs import (
    Run,
)
from ownerwise.wording import span_up, whole

NOT_PRIVATE = "NOT PRIVATE"

ADJACENCY = (
    "Two data sets are neighbours if one of them has one record more. What is released may differ "
    "between neighbours by at most (ε, δ), the budget of that record's owner."
)


def unit(run: Run) -> str:
    """Return the unit of privacy, with what it means for an owner of many records."""
    largest = int(run.plan.records.max())
    words = f"The unit of privacy is {UNIT}."
    if largest > 1:
        words += (
            f" The largest owner declares {whole(largest)} records: each of them has the stated ε, "
            "all of them together do not."
        )
    return words


def large_delta(run: Run) -> str:
    """Return what a delta above one over the number of records means; nothing if it is below."""
    largest, total = float(run.plan.deltas.max()), int(run.plan.records.sum())
    if largest * total <= 1:
        return ""
    return (
        f"CAUTION: δ is up to {largest:g}, above 1/{total}, one over the number of records. That "
        "permits publishing a record in full."
    )


def why_not_private(runs: Sequence[Run]) -> str:
    """Return the reasons for which runs carry no guarantee."""
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    reasons = []
    if seeds:
        noun = "a fixed seed" if len(seeds) == 1 else "fixed seeds"
        reasons.append(
            f"batches and noise came from {noun} ({name_some(seeds, shown=10)}), and whoever knows "
            "a seed can subtract the noise"
        )
    reasons += sorted({reason for run in runs for reason in run.config.get("not_private", ())})
    return "; ".join(reasons)


def random_source(run: Run) -> str:
    """Return where batches and noise came from."""
    if run.seed is not None:
        return f"a fixed seed, for tests and comparisons only: {NOT_PRIVATE}"
    return (
        "AES-256 in counter mode under a fresh key from the operating system, for batches and "
        "noise; the key was never written"
    )


def released(run: Run) -> list[str]:
    """Return what of the training records has left the process."""
    found = [
        f"the model after {whole(run.updates)} updates, and every model on the way there (the "
        "accounting covers all of them)"
    ]
    if run.plan.release_std is not None:
        what = "one histogram of predictions" if run.config.get("constraints") else "one sum"
        kind = run.plan.release_noise.capitalize()
        found.append(
            f"in every step {what} of per-record vectors of length at most 1, with {kind} "
            f"noise of std {run.plan.release_std:g} (accounted together with the gradient)"
        )
    return found


def assumed_public(run: Run) -> list[str]:
    """Return everything that the guarantee takes as known to all."""
    found = [
        "the table of budgets: which owner asked for which ε and δ",
        "the declared number of records of each owner",
        "the architecture of the model, the loss, the optimizer and all settings",
        "the plan: sampling rates, clip norms, noise, expected batch, number of steps",
        "the lists of classes, features and groups, and any constants used to normalise the data: "
        "if they were read off private records, that is not accounted for",
    ]
    if run.config.get("weights"):
        found.append("the shape and the length of the importance tail")
    if run.config.get("constraints"):
        found.append(
            "the constraints, and the rule that sorts records into cells (not their cells)"
        )
    return found


def not_covered(runs: Sequence[Run]) -> list[str]:
    """Return what carries no guarantee, or is not part of the accounting."""
    found = [
        "Validation and test figures are exact. NO guarantee covers the records they were "
        "measured on: they are not private.",
        "Choices made by looking at such figures (settings, the method, when to stop) are not "
        "accounted for; neither is a search for hyper-parameters on the private records.",
        "Facts about people in general that a model may learn with or without any one record, "
        "and what an attacker already knows.",
        "How long training took, and other traces outside of the released model.",
        "Noise is made of floating-point numbers; attacks on their last bits are known and not "
        "part of the accounting.",
    ]
    if len(runs) > 1:
        found.insert(
            2,
            f"Each ε holds for one run on its own. This page shows {len(runs)} runs: if several of "
            "them saw the same records and all are released, what a record spends adds up over "
            "them.",
        )
    return found


def budget_words(run: Run) -> str:
    """Return the range of budgets: "ε 0.5 to 8 at δ 1e-05"."""
    plan = run.plan
    epsilon = span_up(float(plan.targets.min()), float(plan.targets.max()), 3)
    delta = span_up(float(plan.deltas.min()), float(plan.deltas.max()), 2)
    return f"ε {epsilon} at δ {delta.replace('e-0', 'e-')}"
