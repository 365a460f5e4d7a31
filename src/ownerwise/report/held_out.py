"""What reports, cards and the console say about the owners of held-out records."""

from __future__ import annotations

from ownerwise.runs import Run
from ownerwise.wording import whole

UNCHECKED = (
    "UNCHECKED: the owners of the validation and test records were not given (validation_owners), "
    "so they may be in the plan too. An owner who is on both sides is not protected with all of "
    "their records."
)


def unprotected_owners(run: Run) -> list[str]:
    """Return sentences about the owners of validation and test records.

    If they are unknown, this matters only for a plan that protects owners with all of their
    records.
    """
    counts = run.config.get("held_out_owners", {})
    if not counts and run.plan.unit == "owner":
        measured = any(line.get(part) for line in run.history for part in ("validation", "test"))
        return [UNCHECKED] if measured else []
    sentences = []
    if outside := counts.get("unprotected", 0):
        sentences.append(
            f"UNPROTECTED: {_owners(outside)}, whose records are used for validation or testing "
            "only. They are not in the plan, and no epsilon holds for them."
        )
    if shared := counts.get("in_plan", 0):
        sentences.append(
            f"{_owners(shared)} of the plan also {'has' if shared == 1 else 'have'} validation or "
            "test records. No epsilon holds for those records, and the metrics say how well the "
            "model works for known owners, not for new ones."
        )
    return sentences


def _owners(count: int) -> str:
    return "1 owner" if count == 1 else f"{whole(count)} owners"
