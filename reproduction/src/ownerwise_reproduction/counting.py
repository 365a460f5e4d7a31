"""The work done in a run: how many gradients it evaluates, and how many of them it sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ownerwise.mechanisms import ClippingRule, ImportanceSampling
from ownerwise.randomness import StepStream
from ownerwise.step.plug_separation import Replay


@dataclass
class Counts:
    """Gradient counts of a run: how many norms it evaluated, and how many gradients it summed."""

    evaluated: int = 0
    summed: int = 0


@dataclass(frozen=True)
class CountedSampling(ImportanceSampling):
    """Importance sampling that counts gradients; NOT PRIVATE, only for runs with a fixed seed."""

    counts: Counts = field(default_factory=Counts, repr=False, compare=False)

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return the rule's factors and count the records."""
        found = super().factors(norms, clip_norms, stream)
        if isinstance(stream, StepStream | Replay):  # not in the step's separation check
            self.counts.evaluated += len(found)
            self.counts.summed += int(found.count_nonzero())
        return found

    def state(self) -> dict[str, Any]:
        """Return the counts, so that a resumed run can continue from them."""
        return asdict(self.counts)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from stored counts."""
        self.counts.evaluated, self.counts.summed = state["evaluated"], state["summed"]


def counted(rule: ClippingRule) -> ClippingRule:
    """Return the rule, or a counting version of it if it is importance sampling."""
    if not isinstance(rule, ImportanceSampling):
        return rule
    return CountedSampling(rule.accepted_batch, rule.acceptance, rule.gain)


def gradients(rule: ClippingRule, plans: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of gradients evaluated and summed (expected values if all are summed).

    `plans` contains the plan options for each phase.
    """
    if isinstance(rule, CountedSampling):
        return asdict(rule.counts)
    expected = round(sum(plan["steps"] * plan["batch_size"] for plan in plans))
    return asdict(Counts(expected, expected))
