"""The first section: the runs, whether they are private, and which results improved."""

from __future__ import annotations

import math

import numpy as np

from ownerwise.planning import epsilon_words
from ownerwise.report.blocks import Banner, Block, Cell, Findings, Table, Text, Tile, Tiles
from ownerwise.report.comparison import (
    METRICS,
    Comparison,
    Difference,
    MethodRuns,
    Metric,
    difference,
    differences,
)
from ownerwise.report.facts import (
    HYPOTHETICAL_EPSILON,
    NO_VALIDATION,
    NOT_PRIVATE,
    data_words,
)
from ownerwise.report.groups import nouns_of
from ownerwise.report.predictions import auc_tile, majority_note, no_better, unrecognised
from ownerwise.report.regression import regression_results
from ownerwise.report.verdicts import (
    WITHIN_CHANCE,
    against,
    chance,
    changed,
    pairs,
    plainer,
    together,
)
from ownerwise.runs import Run
from ownerwise.wording import amount, epsilon, percent, percent_up, signed_points, span_up, whole

_ACCURACY, _PER_OWNER, _, _WORST, _STRICTEST, _STRICT_HALF, _ = METRICS


def default_title(comparison: Comparison) -> str:
    """Return a title that names the methods."""
    labels = [method.label for method in comparison.methods]
    if len(labels) == 1:
        return f"{labels[0]}: privacy and utility"
    return " vs ".join(labels) if len(labels) == 2 else f"{len(labels)} methods compared"


def overview(comparison: Comparison) -> list[Block]:
    """Return the content of the overview."""
    content = [_trained(comparison), _status(comparison), _tiles(comparison)]
    if comparison.source is None:
        return [*content, Text(NO_VALIDATION)]
    if comparison.regression:
        return [*content, *regression_results(comparison)]
    return [*content, *_findings(comparison), _methods_table(comparison), _measured_on(comparison)]


def _trained(comparison: Comparison) -> Text:
    run = comparison.runs[0]
    plan = run.plan
    count = len(comparison.runs)
    what = [f"Model: {run.config['model']}."] if _is_text(run, "model") else []
    what += [f"Data: {data_words(run)}."] if _is_text(run, "data") else []
    if _is_text(run, "pretraining"):
        what.append(f"{run.config['pretraining'][0].upper()}{run.config['pretraining'][1:]}.")
    methods = _count(len(comparison.methods), "method")
    runs = "One run" if count == 1 else f"{count} runs of {methods}"
    words = f"{runs}; {_count(len(plan.targets), 'owner')} with "
    words += f"{_count(plan.total_records, 'declared record')}."
    return Text(" ".join([*what, words]), "lead")


def _is_text(run: Run, key: str) -> bool:
    return isinstance(run.config.get(key), str) and bool(run.config[key])


def _count(number: int, noun: str) -> str:
    return f"{whole(number)} {noun}{'' if number == 1 else 's'}"


def _status(comparison: Comparison) -> Banner:
    """Return the banner that states whether the guarantee holds."""
    facts = comparison.facts
    if not facts.private:
        words = (
            f"{facts.status} Use the results for tests and comparisons only. {HYPOTHETICAL_EPSILON}"
        )
        return Banner(NOT_PRIVATE, [words, *facts.held_out], "bad")
    words = (
        f"{facts.status} No {facts.unit_noun} has spent more than "
        f"{percent_up(facts.largest_share)} of the ε."
    )
    count = len(comparison.runs)
    if count > 1:
        words += (
            f" Each ε holds for a single run: if these {count} runs are all released, records "
            "used in several of them spend more than the ε shown."
        )
    kind = "caution" if facts.headline != "Private" or facts.cautions else "good"
    paragraphs = [*filter(None, [facts.per_owner]), words, *facts.cautions, *facts.held_out]
    return Banner(facts.headline, paragraphs, kind)


def _tiles(comparison: Comparison) -> Tiles:
    plan, facts = comparison.runs[0].plan, comparison.facts
    steps = max(run.steps_spent for run in comparison.runs)
    lead = comparison.methods[-1] if len(comparison.methods) == 2 else _lead(comparison)
    tiles = [
        Tile(
            span_up(float(plan.targets.min()), float(plan.targets.max()), 3),
            f"ε set by owners, per {facts.units}",
            f"strictest to laxest, {_count(len(plan.targets), 'owner')}",
        ),
        Tile(
            span_up(*facts.spent),
            f"ε spent per {facts.units}",
            f"at most {percent_up(facts.largest_share)} of a budget, after {whole(steps)} of "
            f"{whole(plan.steps)} steps",
        ),
        *_owner_tile(comparison),
    ]
    per_owner = [_PER_OWNER] if comparison.facts.most_records > 1 else []
    for metric in (_ACCURACY, *per_owner, _STRICT_HALF, _WORST):
        value = comparison.amounts(lead, metric)
        if value is not None:
            notes = [lead.label, against(comparison, lead, metric)]
            notes += [majority_note(comparison, lead)] if metric is _ACCURACY else []
            note = "; ".join(filter(None, notes))
            tiles.append(Tile(percent(value.mean), metric.title.lower(), note))
    return Tiles([*tiles, *auc_tile(comparison, lead)])


def _owner_tile(comparison: Comparison) -> list[Tile]:
    facts = comparison.facts
    if not facts.per_owner:
        return []
    of_owner = facts.owner_epsilon
    known = of_owner[~np.isnan(of_owner)]
    values = (float(known.min()), float(known.max())) if len(known) else (math.nan, math.nan)
    name = f"ε per owner (up to {whole(facts.most_records)} records)"
    return [Tile(epsilon_words(values), name, "all records of an owner together")]


def _lead(comparison: Comparison) -> MethodRuns:
    """Return the method that helps the stricter half most, at no clear loss of overall accuracy.

    It is the baseline if no other method gains anything beyond chance.
    """
    best, most = comparison.baseline, 0.0
    for method in comparison.others:
        if method in plainer(comparison, comparison.baseline):
            continue
        half = difference(comparison, method, comparison.baseline, _STRICT_HALF)
        overall = difference(comparison, method, comparison.baseline, _ACCURACY)
        loses = overall is not None and overall.outcome == "lost"
        if half is not None and half.clear and half.by > most and not loses:
            best, most = method, half.by
    return best


def _methods_table(comparison: Comparison) -> Table:
    metrics, rows = _shown(comparison), []
    for method in comparison.methods:
        cells = [Cell(method.label), Cell(str(len(method.runs)))]
        for metric in metrics:
            value = comparison.amounts(method, metric)
            cells.append(Cell(amount(value), best=_is_best(comparison, method, metric)))
        rows.append(cells)
    caption = f"Results at the end of training on {comparison.data_split} data (not private)"
    if any(len(method.runs) > 1 for method in comparison.methods):
        caption += ", mean ± standard deviation over runs"
    if comparison.others:
        caption += ". ★ marks the best mean, which may be due to chance: see above"
    titles = [
        f"{m.title} ({'%' if m.higher_is_better else 'points, lower is better'})" for m in metrics
    ]
    return Table(caption, ["Method", "Runs", *titles], rows)


def _shown(comparison: Comparison) -> list[Metric]:
    """Return the metrics that at least one method has."""
    return [
        m for m in METRICS if any(comparison.amounts(method, m) for method in comparison.methods)
    ]


def _is_best(comparison: Comparison, method: MethodRuns, metric: Metric) -> bool:
    """Return whether no other method has a better value at the displayed precision."""
    if len(comparison.methods) == 1:
        return False
    means = {
        m.label: round(100 * value.mean, 1)
        for m in comparison.methods
        if (value := comparison.amounts(m, metric)) is not None
    }
    if method.label not in means or len(set(means.values())) == 1:
        return False
    choose = max if metric.higher_is_better else min
    return means[method.label] == choose(means.values())


def _findings(comparison: Comparison) -> list[Block]:
    found = [
        ("Caution", words)
        for method in comparison.methods
        for words in (no_better(comparison, method), unrecognised(comparison, method))
        if words
    ]
    if not comparison.others:
        return [Findings(found)] if found else []
    found = [*findings(comparison).items(), *found]
    return [Findings(found), Text(chance(comparison), "note")]


def findings(comparison: Comparison) -> dict[str, str]:
    """Return the gains and losses of each method compared with those that it builds on."""
    found = {}
    for method, other in pairs(comparison):
        changes = differences(comparison, method, other)
        tested = all(d.clear is not None for d in changes)
        better, worse = ("Gained", "Lost") if tested else ("Better here", "Worse here")
        cause = together(comparison, method, other)
        parts = [
            f"This is {cause}." if cause else "",
            _list_of(better, changes, "gained") or "Nothing gained beyond chance.",
            _list_of(worse, changes, "lost"),
            _list_of(f"Unchanged or {WITHIN_CHANCE}", changes, "even"),
            _group_words(comparison, method, other),
        ]
        found[f"{method.label} vs {other.label}"] = " ".join(filter(None, parts))
    return found


def _list_of(word: str, changes: list[Difference], outcome: str) -> str:
    parts = [f"{d.metric.title.lower()} {changed(d)}" for d in changes if d.outcome == outcome]
    return f"{word}: {', '.join(parts)}." if parts else ""


def _group_words(comparison: Comparison, method: MethodRuns, other: MethodRuns) -> str:
    """Return a sentence on how many groups gained and lost, and on which one lost the most."""
    if len(comparison.groups) < 2:
        return ""
    gains = {
        group: comparison.group_recall(method, group).mean
        - comparison.group_recall(other, group).mean
        for group in comparison.groups
    }
    up = sum(round(100 * gain, 1) > 0 for gain in gains.values())
    down = sum(round(100 * gain, 1) < 0 for gain in gains.values())
    noun = comparison.group_noun.lower()
    ranges = any(len(group.members) > 1 for group in gains)
    several = "ranges of budgets" if ranges else nouns_of(comparison.runs)[1]
    words = f"Of {len(gains)} {several}, {up} had a higher and {down} a lower mean recall"
    if down:
        worst = min(gains, key=lambda group: gains[group])
        budget = (
            ""
            if worst.epsilon is None
            else f" (ε {epsilon(worst.epsilon)} per {comparison.facts.units})"
        )
        name = worst.name if worst.pooled else f"{noun} {worst.name}{budget}"
        words += f"; the largest fall was {signed_points(gains[worst])} for {name}"
    return f"{words}. Each single difference may be due to chance."


_MEANINGS = {
    "owner_accuracy": "Accuracy per owner is the mean over owners of each one's accuracy, so every "
    "owner counts equally.",
    "balanced_accuracy": "Balanced accuracy is the mean recall over classes.",
    "strict_half": "The stricter half is the mean recall of the half of the groups with the "
    "smallest budgets.",
    "spread": "Spread is the standard deviation of recall over groups.",
}


def _measured_on(comparison: Comparison) -> Text:
    shown = [m.key for m in _shown(comparison) if m.key in _MEANINGS]
    words = (
        f"Not private: these results were measured on {comparison.data_split} records, which are "
        f"not covered by any guarantee. {' '.join(_MEANINGS[key] for key in shown)}"
    )
    ends = {run.steps_spent for run in comparison.runs}
    if len(ends) > 1:
        words += f" The runs stopped at different steps: {whole(min(ends))} to {whole(max(ends))}."
    return Text(words, "note")
