"""Conformance: does a run do what its plan says? Most bugs are found here, not by attacks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ownerwise.audit.alike import begin_alike
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.checks import Check, checks
from ownerwise.audit.neighbours import sensitivity
from ownerwise.audit.observation import Observations, Training, observe
from ownerwise.mechanisms import ClippingRule, Weights
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream

FALSE_ALARMS = 1e-3
"""Probability that `Conformance.passed` is false although the run follows its plan."""


@dataclass(frozen=True)
class Conformance:
    """The comparisons of a run with its plan.

    Attributes:
        checks: all comparisons.
        false_alarms: probability that any of them fails although the run follows the plan.
    """

    checks: list[Check] = field(repr=False)
    false_alarms: float = FALSE_ALARMS

    @property
    def failures(self) -> list[Check]:
        """The comparisons that the run fails, worst first."""
        threshold = self.false_alarms / max(1, len(self.checks))
        return sorted((c for c in self.checks if not c.p > threshold), key=lambda c: c.p)

    @property
    def passed(self) -> bool:
        """Whether the run passes all comparisons."""
        return not self.failures

    @property
    def alarms(self) -> list[str]:
        """The failures as text."""
        return [
            f"{check.name}{f' ({check.group})' if check.group else ''}: {check.observed:.4g}, "
            f"expected {check.expected:.4g} (p = {check.p:.2g})"
            for check in self.failures
        ]

    def describe(self) -> str:
        """Return the result as text."""
        failed = "none failed" if self.passed else f"{len(self.failures)} FAILED"
        heading = (
            f"{len(self.checks)} comparisons with the plan, false alarms {self.false_alarms:g}: "
            f"{failed}"
        )
        return "\n".join([heading, *(f"- {alarm}" for alarm in self.alarms)])


def conformance(
    plan: Plan,
    *,
    weights: Weights | None = None,
    clipping: ClippingRule | None = None,
    canaries: int = 1000,
    false_alarms: float = FALSE_ALARMS,
    stream: SecretStream | None = None,
) -> Conformance:
    """Train canaries alone under a plan, and compare what happens with what the plan says.

    The canaries go through the real sampler, step and optimizer. Compared are, for each budget
    group: how often canaries are drawn; what a drawn canary adds; the mean, variance, shape and
    independence of the noise; the scores of an attacker; and, on neighbouring batches, how much one
    canary changes what leaves the step. No record of any owner takes part.

    Several processes (torch.distributed) compare one run with its plan together, and all of them
    return the same result: call it in each, with the same arguments.

    Args:
        plan: the plan, with owners.
        weights, clipping: as for `PrivateStep`.
        canaries: number of canaries.
        false_alarms: accepted probability of a failure although everything is as planned.
        stream: the source of randomness; by default a new private stream.

    Example:
        >>> import ownerwise as ow
        >>> owners = ow.Owners(None, [1.0] * 100 + [3.0] * 100)
        >>> ow.audit.conformance(ow.plan(owners, steps=20, batch_size=20), canaries=100).passed
        True
    """
    stream = SecretStream() if stream is None else stream
    training = Training(weights=weights, clipping=clipping)
    settings = {"canaries": canaries, "false_alarms": false_alarms}
    begin_alike(Processes.here(), plan, stream, settings)
    made = Canaries.of(plan, canaries, stream, alone=True, ordered=weights is not None)
    seen = observe(made, training, stream)
    return judged(seen, training, false_alarms)


def judged(
    seen: Observations, training: Training, false_alarms: float = FALSE_ALARMS
) -> Conformance:
    """Return the comparisons for a run; on neighbouring batches only if canaries came alone."""
    found = checks(seen)
    if training.alone:
        found += sensitivity(seen.canaries, training, seed=len(seen.canaries))
    return Conformance(found, false_alarms)
