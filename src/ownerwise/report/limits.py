"""What the guarantee of a run rests on, and what it does not cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ownerwise.report.facts import NOT_PRIVATE
from ownerwise.report.held_out import unprotected_owners
from ownerwise.report.mechanism_sections import notes_of
from ownerwise.report.tuning_line import TIME_OF_SEARCH, decisions
from ownerwise.runs import Run
from ownerwise.wording import whole


@dataclass(frozen=True)
class Limits:
    """The limits of the guarantee for all runs on a page.

    Attributes:
        randomness: the sources of randomness for batches and noise.
        released: everything that was computed from training records and released.
        assumed_public: everything that the guarantee assumes to be public.
        not_covered: everything that is not covered by a guarantee or not accounted for.
    """

    randomness: Sequence[str]
    released: Sequence[str]
    assumed_public: Sequence[str]
    not_covered: Sequence[str]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Limits:
        """Return the limits of one or more runs."""
        return cls(
            randomness=sorted({_random_source(run) for run in runs}),
            released=list(dict.fromkeys(item for run in runs for item in _released(run))),
            assumed_public=list(dict.fromkeys(i for run in runs for i in _assumed_public(run))),
            not_covered=_not_covered(runs),
        )


def _random_source(run: Run) -> str:
    if run.seed is not None:
        return f"a fixed seed, for tests and comparisons only: {NOT_PRIVATE}"
    return (
        "AES-256 in counter mode for batches and noise, with a fresh key from the operating "
        "system; the key was never stored"
    )


def _released(run: Run) -> list[str]:
    items = [
        f"the model after {whole(run.updates)} updates, and every earlier version of it (the "
        "accounting covers all of them)"
    ]
    if run.plan.tuning is not None:
        items.append(
            "which of the candidates was the best of the search (accounted for); nothing else "
            "about the other runs of the search"
        )
    if run.plan.release_std is not None:
        what = " and ".join(note.released for note in notes_of(run) if note.released) or "one sum"
        if run.plan.adaptive_clip_norm is not None:
            what = "one number that shows how many gradients are within the clip norm"
        kind = run.plan.release_noise.capitalize()
        items.append(
            f"at every step, {what} over per-record vectors of norm at most 1, with {kind} noise "
            f"of std {run.plan.release_std:g} (accounted for together with the gradient)"
        )
    if run.plan.closing_std is not None:
        items.append(
            f"after training, {run.plan.closing_count} sums over all records of vectors of norm at "
            f"most 1, with Gaussian noise of std {run.plan.closing_std:g} (accounted for together "
            "with the steps), which were used to correct the model"
        )
    if run.plan.opening_std is not None:
        items.append(
            "before training, one sum over all records of vectors of norm at most 1, with Gaussian "
            f"noise of std {run.plan.opening_std:g} (accounted for together with the steps): the "
            "statistics by which the inputs are scaled and missing values filled in"
        )
    return items


def _assumed_public(run: Run) -> list[str]:
    pretraining = run.config.get("pretraining")
    return [
        "the table of budgets: which owner set which ε and δ",
        "the declared number of records for each owner"
        + ("" if run.plan.shared is None else ", and which owners share how many records"),
        "the model architecture, the loss, the optimizer and all settings",
        "the plan: sampling rates, clip norms, noise, expected batch size, number of steps",
        "the lists of classes, features and groups, and any constants used to normalise the data; "
        "if any of these were derived from private records, the accounting does not cover that",
        *(
            [
                f"the weights of features or layers {pretraining}; no guarantee covers the records "
                "they were trained on"
            ]
            if pretraining
            else []
        ),
        *(
            []
            if run.plan.tuning is None
            else [
                "the candidates of the search, fixed in advance, and the law and the mean of the "
                "number of its runs; if the candidates were chosen by looking at the records, the "
                "accounting does not cover that"
            ]
        ),
        *(item for note in notes_of(run) for item in note.assumed_public),
    ]


def _not_covered(runs: Sequence[Run]) -> list[str]:
    items = [
        "Validation and test metrics are computed without noise. The records they were measured "
        "on are NOT covered by any guarantee: the metrics are not private.",
        *dict.fromkeys(text for run in runs for text in unprotected_owners(run)),
        *dict.fromkeys(map(decisions, runs)),
    ]
    if len(runs) > 1:
        items.append(
            f"Each ε holds for a single run. This page shows {len(runs)} runs: if several of them "
            "used the same records and all are released, the privacy costs to each record add up."
        )
    earlier = max(run.config.get("earlier_trainings", 0) for run in runs)
    if earlier:
        items.append(
            "The process that trained this model had already trained on owners with the same ids "
            f"and counts ({earlier} {'time' if earlier == 1 else 'times'}): if the records were "
            "the same and those models are released too, the privacy costs to each record add up."
        )
    items += [
        "General facts about people that a model can learn with or without any single record, and "
        "anything an attacker already knows.",
        "The training time and any other side channel.",
    ]
    if any(run.plan.tuning is not None and run.plan.tuning.most is None for run in runs):
        items.append(TIME_OF_SEARCH)
    if any(run.plan.filter is not None for run in runs):
        items.append(
            "What single records have spent under individual accounting, and which of them still "
            "take part: it follows from their gradients and is kept in a file of its own, which is "
            "not private."
        )
    if any(run.plan.hardened_rows is None for run in runs):
        items.append(
            "Records crafted to change how others are rounded, because the plan is not hardened."
        )
    return items
