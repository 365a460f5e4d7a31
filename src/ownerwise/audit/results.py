"""The result of an audit: for each group, what an attack found beside what it could find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.audit.rates import Measured
from ownerwise.errors import OwnerwiseError
from ownerwise.files import (
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    fields,
    list_of,
    mapping_of,
    or_null,
    read_json,
    write_json,
)
from ownerwise.processes import Processes
from ownerwise.wording import down, up

FILE = "audit.json"
"""Name of the file with a run's audits, in its folder."""

PROVES_NOTHING = "An attack that fails proves nothing."
ABOVE_CHANCE = "Nothing above chance was found"
NOT_PRIVATE = (
    "NOT PRIVATE: records of people took part in the audited training, and no budget pays for what "
    "this audit tells about them."
)
_FORMAT = 2
_AGAIN = "delete the file, then audit the run again"
_INTERVAL = list_of(NUMBER, 3)
_GROUP = fields(
    {
        "name": TEXT, "promised": NUMBER, "delta": NUMBER, "members": WHOLE, "guesses": WHOLE,
        "right": WHOLE, "bounds": mapping_of(NUMBER), "estimate": or_null(_INTERVAL),
        "auc": _INTERVAL, "cap": NUMBER, "rates": mapping_of(_INTERVAL),
        "rate_caps": mapping_of(NUMBER), "rate_chances": mapping_of(NUMBER),
    }
)  # fmt: skip
_AUDIT = fields(
    {
        "attack": TEXT, "plan": TEXT, "steps": WHOLE, "failure": NUMBER, "groups": list_of(_GROUP),
        "alarms": list_of(TEXT), "compared": WHOLE,
        "of": TEXT, "private": FLAG,
    }
)  # fmt: skip
_FILE = fields({"format": WHOLE, "audits": list_of(_AUDIT)})


@dataclass(frozen=True)
class GroupAudit:
    """What an attack found for one group of canaries or records.

    Attributes:
        name: the group.
        promised: the epsilon that the plan promises, at `delta`.
        delta: the delta.
        members: number of canaries or targets in the group.
        guesses, right: number of guesses, and of correct ones.
        bounds: lower bounds on epsilon by method; empty if the attack gives none.
        estimate: epsilon by a Gaussian fit, with an interval: an estimate, not a bound.
        auc: area under the attack's curve, with an interval.
        cap: the largest area that any attack can reach, from the plan.
        rates: detections at given rates of false alarms and accuracies, each with its interval.
        rate_caps, rate_chances: the largest value of each that any attack can reach, and the value
            that guessing has.
    """

    name: str
    promised: float
    delta: float
    members: int
    auc: Measured
    cap: float
    guesses: int = 0
    right: int = 0
    bounds: Mapping[str, float] = field(default_factory=dict)
    estimate: Measured | None = None
    rates: Mapping[str, Measured] = field(default_factory=dict)
    rate_caps: Mapping[str, float] = field(default_factory=dict)
    rate_chances: Mapping[str, float] = field(default_factory=dict)

    @property
    def above_chance(self) -> list[str]:
        """The rates whose whole interval lies above that of guessing."""
        return [name for name, rate in self.rates.items() if rate.low > self.rate_chances[name]]

    @property
    def at_chance(self) -> bool:
        """Whether all intervals contain the values of guessing, and no bound is above 0."""
        guessing = self.auc.low <= 0.5 <= self.auc.high
        return guessing and not any(self.bounds.values()) and not self.above_chance

    @property
    def violated(self) -> bool:
        """Whether a lower bound exceeds the promised epsilon."""
        return any(bound > self.promised for bound in self.bounds.values())

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        if self.violated:
            return (
                f"A lower bound of {max(self.bounds.values()):.5g} EXCEEDS the promised epsilon "
                f"{self.promised:.5g}."
            )
        found = f"(AUC {interval(self.auc)}; cap {up(self.cap, 3)})."
        if self.at_chance:
            return f"{ABOVE_CHANCE} {found}"
        return f"The attack does better than chance {found}"


@dataclass(frozen=True)
class Audit:
    """The result of one attack on one run.

    Attributes:
        attack: the attack, such as "white-box, one run".
        plan: hash of the audited plan.
        steps: number of steps of the audited run.
        failure: probability, over all groups, that any figure of one kind is wrong: a lower bound
            of one method, or the interval of one rate.
        groups: the results for each group.
        alarms: comparisons with the plan that failed, as text.
        compared: number of comparisons with the plan.
        of: what was attacked: "canaries" or "records".
        private: whether no record of a person took part. Otherwise the result is NOT private.
    """

    attack: str
    plan: str
    steps: int
    failure: float
    groups: Sequence[GroupAudit]
    alarms: Sequence[str] = ()
    compared: int = 0
    of: str = "canaries"
    private: bool = False

    @property
    def passed(self) -> bool:
        """Whether no lower bound exceeds a promise, and no comparison with the plan failed."""
        return not self.alarms and not any(group.violated for group in self.groups)

    def describe(self) -> str:
        """Return the result as text."""
        lines = [f"{self.title}, {self.steps} steps, plan {self.plan[:12]}"]
        for group in self.groups:
            lines.append(f"- {group.name}: promised {up(group.promised)}. {group.finding}")
            found = [f"at least {down(bound, 3)} ({name})" for name, bound in group.bounds.items()]
            if group.estimate is not None:
                found.append(f"estimated {interval(group.estimate)}, which is not a bound")
            lines += [f"  epsilon {'; '.join(found)}"] if found else []
            lines += [
                f"  {name}: {interval(rate)}, cap {up(group.rate_caps[name], 3)}"
                for name, rate in group.rates.items()
            ]
        if self.compared:
            failed = f"{len(self.alarms)} FAILED" if self.alarms else "none failed"
            lines.append(f"{self.compared} comparisons with the plan: {failed}")
            lines += [f"- {alarm}" for alarm in self.alarms]
        return "\n".join([*lines, *self.warnings, PROVES_NOTHING])

    @property
    def warnings(self) -> list[str]:
        """What whoever passes the result on must know first."""
        return [] if self.private else [NOT_PRIVATE]

    @property
    def title(self) -> str:
        """The attack and its size: "white-box, on 1,000 canaries"."""
        members = sum(group.members for group in self.groups)
        return f"{self.attack}, on {members:,} {self.of}"

    def findings(self) -> list[str]:
        """Return the result as sentences, one for each group, for a report or a card."""
        found = [f"{group.name}: {group.finding}" for group in self.groups]
        failed = [f"A comparison with the plan FAILED: {alarm}" for alarm in self.alarms]
        return [*self.warnings, *found, *failed]

    def save(self, folder: str | PathLike) -> Path:
        """Add this audit to a run folder; it replaces an earlier one with the same attack.

        If several processes make the audit, the first one writes it.
        """
        path = Path(folder) / FILE
        if not Processes.here().first:
            return path
        others = [audit for audit in load_audits(folder) if audit.attack != self.attack]
        audits = [asdict(audit) for audit in (*others, self)]
        write_json(path, {"format": _FORMAT, "audits": audits})
        return path


def load_audits(folder: str | PathLike) -> list[Audit]:
    """Return the audits of a run folder; none if there are none."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    try:
        content = read_json(path, _FILE)
    except OwnerwiseError as error:
        raise OwnerwiseError([f"{problem}; {_AGAIN}" for problem in error.problems]) from error
    if content["format"] != _FORMAT:
        raise OwnerwiseError(f"{path} has format {content['format']}; expected {_FORMAT}; {_AGAIN}")
    return [_audit(entry) for entry in content["audits"]]


def _audit(entry: dict[str, Any]) -> Audit:
    known = {field.name: entry[field.name] for field in fields_of(Audit)}
    groups = [_group(values) for values in entry["groups"]]
    return Audit(**{**known, "groups": groups, "alarms": tuple(entry["alarms"])})


def _group(values: dict[str, Any]) -> GroupAudit:
    known = {field.name: values[field.name] for field in fields_of(GroupAudit)}
    estimate = values["estimate"]
    known |= {
        "auc": Measured(*values["auc"]),
        "estimate": None if estimate is None else Measured(*estimate),
        "rates": {name: Measured(*rate) for name, rate in values["rates"].items()},
    }
    return GroupAudit(**known)


def interval(measured: Measured) -> str:
    """Format a value and its interval, whose ends are rounded outwards."""
    return f"{measured.value:.3g} ({down(measured.low, 3)} to {up(measured.high, 3)})"
