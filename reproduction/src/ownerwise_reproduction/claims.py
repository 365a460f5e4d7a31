"""The papers' claims compared with our results.

`claims.toml` contains the claims as data. A claim names a setting, a method and a metric; with
`minus`, the metric is the difference from another method over shared seeds. The same rules
(`_verdict`) determine the verdict on every finding.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from scipy.stats import t as students

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.wording import Amount
from ownerwise_reproduction import methods, provenance, settings, summary
from ownerwise_reproduction.amounts import amount
from ownerwise_reproduction.methods import Method
from ownerwise_reproduction.summary import FEWEST_SEEDS, METRICS, Result, Study

SEEDS = 5
"""Number of seeds in the suggested command for a claim that was not tested."""


MODELS = ("same model", "fixed features", "pretrained")
"""The paper's model; a head on features without pretraining; a head on pretrained features."""


@dataclass(frozen=True)
class Claim:
    """A claim made in a paper, and how it is tested here.

    Attributes:
        paper: name of the paper.
        where: the table, figure or section of the paper.
        claim: the statement, in our words.
        theirs: the paper's number in the metric's unit, or a description if the paper gives no
            number.
        deviation: standard deviation over the paper's trials, if given.
        setting: name of our setting.
        method: our method, with its argument.
        metric: one of `METRICS`, `MEASURES`, `COMPARISONS`, or "group:NAME" for a group's recall.
        minus: the method to compare with.
        minus_setting: the setting of that method, if it is another one.
        minus_changes: the changes to that other setting.
        expect: the direction that the paper claims for a difference or correlation, one of
            `EXPECTATIONS`.
        changes: changes that the runs make to the setting, in the form "section.key=value".
        note: the likely reason why our result differs from the paper's.
        model: one of `MODELS`: whether our runs train the paper's model.
    """

    paper: str
    where: str
    claim: str
    theirs: float | str
    setting: str
    method: str
    metric: str
    deviation: float | None = None
    minus: str | None = None
    minus_setting: str | None = None
    minus_changes: tuple[str, ...] = ()
    expect: str | None = None
    changes: tuple[str, ...] = ()
    note: str = ""
    model: str = "same model"

    @property
    def run(self) -> Method:
        """The method of our result."""
        return methods.parse(self.method)[0]

    @property
    def rival(self) -> Method | None:
        """The method to compare with, if any."""
        return None if self.minus is None else methods.parse(self.minus)[0]

    def command(self, seeds: Sequence[int], profile: str = "paper") -> str:
        """Return the command that makes all runs for the claim; two if they have two settings."""
        specs = [method.spec for method in (self.rival, self.run) if method is not None]
        asked = [(self.setting, specs, self.changes)]
        if self.minus_setting is not None:
            asked = [
                (self.minus_setting, specs[:1], self.minus_changes),
                (self.setting, specs[1:], self.changes),
            ]
        return " && ".join(
            provenance.command("run", setting, methods, seeds, profile, changes)
            for setting, methods, changes in asked
        )


@dataclass(frozen=True)
class Finding:
    """A claim and our result, formatted for tables.

    Attributes:
        claim: the paper's claim.
        theirs: the paper's number, formatted.
        ours: our mean and standard deviation, or a difference and its interval, as text; "not run"
            if there are no results.
        distance: our result minus the paper's, if both are numbers.
        verdict: one of `VERDICTS`, or "" if there is nothing to decide.
        seeds: number of seeds.
        study: name of the study that our result comes from; None if it was not run.
        heading: heading of that study.
        command: the command that reproduces the runs.
    """

    claim: Claim
    theirs: str
    ours: str
    distance: float | None
    verdict: str
    seeds: int
    study: str | None
    heading: str
    command: str


def read() -> list[Claim]:
    """Return all claims."""
    return make_claims(_file()["claim"])


def left_out() -> list[str]:
    """Return the results in the papers that these claims do not cover."""
    return _file()["left_out"]


def not_run() -> list[str]:
    """Return the reasons why claims were not tested."""
    return _file()["not_run"]


def _file() -> dict[str, Any]:
    text = (files("ownerwise_reproduction") / "claims.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def make_claims(entries: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return claims from the tables of a TOML file, or raise an error that lists all problems."""
    problems = [
        f"claim {number}: {problem}"
        for number, entry in enumerate(entries, 1)
        for problem in _problems(entry)
    ]
    if problems:
        raise OwnerwiseError(problems)
    return [stored(entry) for entry in entries]


def stored(entry: Mapping[str, Any]) -> Claim:
    """Return a claim from a table of a TOML or JSON file, where changes are lists."""
    lists = {name: tuple(entry.get(name, ())) for name in ("changes", "minus_changes")}
    return Claim(**{**entry, **lists})


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    known = Claim.__dataclass_fields__
    unknown = [key for key in entry if key not in known]
    if unknown:
        yield f"{name_some(unknown)}: expected {', '.join(known)}"
    needed = ("paper", "where", "claim", "theirs", "setting", "method", "metric")
    missing = [key for key in needed if key not in entry]
    if missing:
        yield f"{name_some(missing)} is missing"
        return
    try:
        settings.setting(entry["setting"]).configure(0, changes=entry.get("changes", ()))
        other = settings.setting(entry.get("minus_setting", entry["setting"]))
        other.configure(0, changes=entry.get("minus_changes", ()))
        methods.parse(",".join([entry["method"], entry.get("minus", "")]))
    except OwnerwiseError as error:
        yield from error.problems
    if entry.get("model", MODELS[0]) not in MODELS:
        yield f"model {entry['model']!r}: expected one of {', '.join(MODELS)}"
    metric = entry["metric"]
    if metric not in (*METRICS, *MEASURES, *COMPARISONS) and not metric.startswith("group:"):
        expected = ", ".join((*METRICS, *MEASURES, *COMPARISONS, "group:NAME"))
        yield f"metric {metric!r}: expected one of {expected}"
    if metric in COMPARISONS and "minus" not in entry:
        yield f"metric {metric} compares two methods: minus is missing"
    if metric in MEASURES and "minus" in entry:
        yield f"metric {metric} is measured for one method: remove minus"
    expect = entry.get("expect")
    if expect is not None and expect not in EXPECTATIONS:
        yield f"expect {expect!r}: expected one of {', '.join(EXPECTATIONS)}"
    if expect is not None and "minus" not in entry:
        yield "expect applies only to comparisons: minus is missing"
    if "minus_setting" in entry and "minus" not in entry:
        yield "minus_setting is the setting of another method: minus is missing"


def find(claims: Sequence[Claim], studies: Sequence[Study]) -> list[Finding]:
    """Return the findings for all claims: one for each profile that was run."""
    return [finding for claim in claims for finding in _findings(claim, studies)]


def _findings(claim: Claim, studies: Sequence[Study]) -> list[Finding]:
    found = []
    for study in studies:
        if _is_of(study, claim.setting, claim.changes):
            rival = _rival(claim, study, studies)
            finding = None if rival is None else _finding(claim, study, rival)
            if finding is not None:
                found.append(finding)
    if found:
        return found
    command = claim.command(range(SEEDS))
    return [Finding(claim, _theirs(claim), "not run", None, "", 0, None, claim.setting, command)]


def _is_of(study: Study, setting: str, changes: Sequence[str]) -> bool:
    run = study.first
    return run["setting"] == setting and sorted(run["changes"]) == sorted(changes)


def _rival(claim: Claim, study: Study, studies: Sequence[Study]) -> Study | None:
    """Return the study with the method to compare with: the same one, or that of its setting."""
    if claim.minus_setting is None:
        return study
    for other in studies:
        same_profile = other.first["profile"] == study.first["profile"]
        if same_profile and _is_of(other, claim.minus_setting, claim.minus_changes):
            return other
    return None


def _finding(claim: Claim, study: Study, rival: Study) -> Finding | None:
    """Return a study's result for a claim; None if runs are missing or share no seed."""
    runs = study.methods.get(claim.run.slug, [])
    other: list[list[Result]] = []
    if claim.rival is not None:
        pairs = summary.pairs_by_seed(rival.methods.get(claim.rival.slug, []), runs)
        other, runs = [[old for old, _ in pairs]], [new for _, new in pairs]
    if not runs:
        return None
    distance = None
    if claim.metric in COMPARISONS:
        ours, interval = COMPARISONS[claim.metric](other[0], runs)
        verdict = _verdict(claim.expect, interval)
    else:
        value = _measured(claim, runs, other)
        factor, unit = _unit(claim)
        interval = _interval(value, factor)
        shown = f"{factor * value.mean:+.2f} {_span(interval)}" if other else amount(value, factor)
        ours = f"{shown} {unit}"
        verdict = _verdict(claim.expect, interval)
        if not isinstance(claim.theirs, str):
            distance = factor * value.mean - claim.theirs
            verdict = _reached(claim, distance)
    command = claim.command([run["seed"] for run in runs], study.first["profile"])
    return Finding(
        claim,
        _theirs(claim),
        ours,
        distance,
        verdict,
        len(runs),
        study.name,
        study.heading,
        command,
    )


def restated(finding: Finding, claim: Claim) -> Finding | None:
    """Return the finding on another number for the same measurement; None if it is another one."""
    measured = ("setting", "method", "metric", "minus", "changes", "minus_setting", "minus_changes")
    same = all(getattr(finding.claim, name) == getattr(claim, name) for name in measured)
    if not same or finding.distance is None or isinstance(claim.theirs, str):
        return None
    assert not isinstance(finding.claim.theirs, str)
    distance = finding.distance + finding.claim.theirs - claim.theirs
    return replace(
        finding,
        claim=claim,
        theirs=_theirs(claim),
        distance=distance,
        verdict=_reached(claim, distance),
    )


def _reached(claim: Claim, distance: float) -> str:
    """Return the verdict on a number, given our result minus the paper's."""
    reached = distance <= 0 if claim.metric in LOWER_IS_BETTER else distance >= 0
    return "reached" if reached else "not reached"


def _interval(value: Amount, factor: float) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a mean (Student's t), or None for one or two seeds."""
    if value.deviation is None or value.count < FEWEST_SEEDS:
        return None
    wide = float(students.ppf(0.975, value.count - 1)) * value.deviation / value.count**0.5
    return factor * (value.mean - wide), factor * (value.mean + wide)


def _span(interval: tuple[float, float] | None) -> str:
    return "[too few seeds]" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _verdict(expect: str | None, interval: tuple[float, float] | None) -> str:
    """Return the verdict on a paper's expectation, based on the 95% confidence interval."""
    if expect is None:
        return ""
    if interval is None:
        return "undecided"
    low, high = interval if expect != "below" else (-interval[1], -interval[0])
    bound = -KEPT if expect == "kept" else 0.0
    if high < bound:
        return "disagrees"
    return "agrees" if low > bound else "undecided"


def _measured(claim: Claim, runs: Sequence[Result], other: Sequence[Sequence[Result]]) -> Amount:
    if claim.metric in MEASURES:
        return MEASURES[claim.metric](runs)
    values = [_value(claim.metric, run) for run in runs]
    if other:
        before = [_value(claim.metric, run) for run in other[0]]
        values = [value - old for value, old in zip(values, before, strict=True)]
    return Amount.of(values)


def _value(metric: str, run: Result) -> float:
    if metric.startswith("group:"):
        return run["final"]["groups"][metric.removeprefix("group:")]["recall"]
    return summary.measure(run)[metric]


def _drop_end(runs: Sequence[Result]) -> Amount:
    """Return the fraction of steps until the strictest group's drop ends; 0 if there is no drop."""
    strictest = min(runs[0]["budgets"], key=runs[0]["budgets"].__getitem__)
    drops = [summary.drops([run]).get(strictest) for run in runs]
    ends = [
        drop.last / run["history"][-1]["step"] if drop is not None else 0.0
        for drop, run in zip(drops, runs, strict=True)
    ]
    return Amount.of(ends)


def _gap(runs: Sequence[Result]) -> Amount:
    """Return the difference between the best and the worst group's mean recall."""
    recalls = [recall.mean for recall in summary.group_recalls(runs).values()]
    return Amount(max(recalls) - min(recalls), None, len(runs))


Compared = tuple[str, tuple[float, float] | None]
"""The result of a comparison as text, and the interval that determines its verdict."""


def _correlation(before: Sequence[Result], runs: Sequence[Result]) -> Compared:
    found = summary.gain(before, runs)
    if found is None or found.correlation is None or found.interval is None:
        return "no correlation can be computed", None
    words = f"r = {found.correlation:.2f} {_span(found.interval)}, p = {found.p:.2g}"
    return words, found.interval if found.seeds >= FEWEST_SEEDS else None


def _reach(before: Sequence[Result], runs: Sequence[Result]) -> Compared:
    """Return the fraction of steps until strict owners reach the other method's final recall.

    A recall that fluctuates may reach its own final value before the end, so the same fraction is
    computed for the other method and shown next to it. The interval is the confidence interval of
    the difference between the two fractions over seeds.
    """
    pairs = list(zip(before, runs, strict=True))
    shares = [_share_to_reach(old, new) for old, new in pairs]
    own = [_share_to_reach(old, old) for old in before]
    differences = [share - other for share, other in zip(shares, own, strict=True)]
    words = f"after {100 * np.mean(shares):.0f} % of the steps, IDP-SGD itself after "
    return f"{words}{100 * np.mean(own):.0f} %", _interval(Amount.of(differences), 100)


def _share_to_reach(old: Result, new: Result) -> float:
    """Return the fraction of the steps that `new` needs to reach `old`'s final recall.

    The fraction is 1 if `new` never reaches it.
    """
    wanted = summary.measure(old, "validation")["strict"]
    for line in new["history"]:
        if summary.measure_line(line, new["budgets"])["strict"] >= wanted:
            return line["step"] / new["history"][-1]["step"]
    return 1.0


MEASURES: Mapping[str, Callable[[Sequence[Result]], Amount]] = {
    "drop_end": _drop_end,
    "gap": _gap,
}
"""Measures of a method in addition to `METRICS`: the fraction of the steps after which the
strictest group's initial drop ends, and the difference between the best and the worst recall.
"""

LOWER_IS_BETTER = ("gap",)

COMPARISONS: Mapping[str, Callable[[Sequence[Result], Sequence[Result]], Compared]] = {
    "correlation": _correlation,
    "reach": _reach,
}
"""Ways to compare two methods other than by a difference."""

EXPECTATIONS = ("above", "below", "kept")
"""Expected result of a comparison: above 0, below 0, or a loss of less than `KEPT` points."""

KEPT = 1.0
"""Accuracy still counts as kept if it drops by less than this many percentage points."""

VERDICTS = {
    "reached": "our mean is at least the paper's number (or at most, for gaps)",
    "not reached": "our mean falls short of the paper's number",
    "agrees": "the 95% interval is on the side that the paper claims (above -1 point if the paper "
    "claims that accuracy is kept)",
    "undecided": "the interval covers both sides, or there are fewer than three seeds",
    "disagrees": "the interval is on the opposite side",
}
"""The possible verdicts and their rules."""


def _unit(claim: Claim) -> tuple[float, str]:
    """Return the factor that scales values for display, and the unit of the scaled values."""
    points = claim.minus is not None or claim.metric == "gap"
    return 100.0, "points" if points else "%"


def _theirs(claim: Claim) -> str:
    if isinstance(claim.theirs, str):
        return claim.theirs
    return f"{amount(Amount(claim.theirs, claim.deviation, 1))} {_unit(claim)[1]}"
