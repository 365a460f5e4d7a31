"""What reports, cards and the console say about the owners of held-out records."""

from __future__ import annotations

from ownerwise.runs import Run
from ownerwise.wording import whole


def unprotected_owners(run: Run) -> list[str]:
    """Return sentences about the owners of validation and test records; none if unknown."""
    counts = run.config.get("held_out_owners", {})
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
