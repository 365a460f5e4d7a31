"""Why a model cannot be trained with per-record gradients, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from ownerwise.errors import OwnerwiseError

__all__ = [
    "BATCH_STATISTICS",
    "COMPILED",
    "DEPENDS_ON_BATCH",
    "PROJECTED_LSTM",
    "RUNNING_STATISTICS",
    "Problem",
    "Refused",
]

# What is wrong, and for some the remedy, where a rule and the check of a model say the same.
BATCH_STATISTICS = "batch statistics mix the records"
RUNNING_STATISTICS = (
    "running statistics of the batch are kept in buffers without noise",
    "build it with track_running_stats=False",
)
DEPENDS_ON_BATCH = "makes a record's gradient depend on the other records of the batch"
PROJECTED_LSTM = ("proj_size is not supported", "use a Linear layer after the LSTM")
COMPILED = "compiled code hides the use of parameters"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a model cannot be trained privately as it is.

    Attributes:
        where: the module, parameter or call, by its name in the model.
        what: what is wrong with it.
        remedy: how to fix it.
    """

    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Remedy: {self.remedy}"


class Refused(OwnerwiseError, RuntimeError):
    """Raised where a per-record gradient would be wrong or cannot be shown to be right."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        self.problem = Problem(where, what, remedy)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str, str]]:
        return type(self), (self.problem.where, self.problem.what, self.problem.remedy)
