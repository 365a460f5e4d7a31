"""Detect, as far as possible, what training discloses or spends beyond its plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ownerwise.errors import PrivacyWarning
from ownerwise.marks import marks_of, share_records
from ownerwise.planning import Plan
from ownerwise.training.settings import TrainerSettings

TRAINED_BEFORE = "this process has already trained on owners with the same ids and counts"
"""The beginning of the warning about repeated training."""

_trainings: Counter[str] = Counter()
"""Training runs with secret randomness in this process, by the fingerprint of their owners."""


def not_private_reasons(
    settings: TrainerSettings, data: Any, evaluated: Mapping[str, Any]
) -> list[str]:
    """Return the reasons, other than a fixed seed, why a run is NOT PRIVATE.

    The reasons come from the Trainer's notes, from marks on the model or the data, and from
    training records in the validation or test data. Such records also trigger a warning.
    `evaluated` maps names to the validation and test data, or None.
    """
    noted = (settings.notes or {}).get("not_private", ())
    reasons = [noted] if isinstance(noted, str) else list(noted)
    reasons += marks_of(settings.model, data, *evaluated.values())
    for name, records in evaluated.items():
        if share_records(data, records):
            reasons.append(f"{name} metrics were computed on training records, without noise")
            if settings.seed is None:
                warnings.warn(
                    f"the {name} data contain training records, so metrics on them are released "
                    f"without noise: this run is NOT private. Use {name} records that are not "
                    "in the training data",
                    PrivacyWarning,
                    stacklevel=3,
                )
    if settings.seed is None and not getattr(settings.weights, "private", True):
        reasons.append("the order of the records was drawn with a fixed seed")
    return list(dict.fromkeys(filter(None, reasons)))


def note_training(plan: Plan) -> int:
    """Count a training run with secret randomness; return the number of earlier runs.

    A warning is issued if there were earlier runs. Owners are recognised by their ids and declared
    counts, and only within this process.
    """
    earlier = _trainings[plan.owners_fingerprint]
    _trainings[plan.owners_fingerprint] += 1
    if earlier:
        times = "once" if earlier == 1 else f"{earlier} times"
        warnings.warn(
            f"{TRAINED_BEFORE} ({times}). Each run spends their budgets again: if the records are "
            "the same and several models are released, the epsilons add up",
            PrivacyWarning,
            stacklevel=4,
        )
    return earlier
