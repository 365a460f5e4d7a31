"""Reasons why a model cannot be trained with per-record gradients, and their remedies."""

from __future__ import annotations

from dataclasses import dataclass

from ownerwise.errors import OwnerwiseError

__all__ = [
    "BATCH_STATISTICS",
    "COMPILED",
    "DEPENDS_ON_BATCH",
    "RUNNING_STATISTICS",
    "Problem",
    "Refused",
]

# Descriptions, some with a remedy, shared by the rules and the check before the first step.
BATCH_STATISTICS = "batch statistics mix the records"
RUNNING_STATISTICS = (
    "running statistics of the batch are kept in buffers, without noise",
    "build it with track_running_stats=False",
)
DEPENDS_ON_BATCH = "makes a record's gradient depend on the other records in the batch"
COMPILED = "compiled code hides how parameters are used"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a model cannot be trained privately in its present form.

    Attributes:
        where: the name of the module, parameter or call in the model.
        what: what is wrong with it.
        remedy: how to fix it.
    """

    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Remedy: {self.remedy}"


class Refused(OwnerwiseError, RuntimeError):
    """Raised when a per-record gradient would be wrong or cannot be shown to be correct."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        self.problem = Problem(where, what, remedy)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str, str]]:
        return type(self), (self.problem.where, self.problem.what, self.problem.remedy)
