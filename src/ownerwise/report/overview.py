"""The first section: the runs, whether they are private, and which results improved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ownerwise.report import markup
from ownerwise.report.comparison import (
    METRICS,
    Comparison,
    Difference,
    MethodRuns,
    Metric,
    differences,
)
from ownerwise.report.groups import nouns_of
from ownerwise.report.markup import Cell, escape
from ownerwise.report.statements import (
    HYPOTHETICAL_EPSILON,
    NO_VALIDATION,
    NOT_PRIVATE,
    large_delta,
    no_guarantee,
    protected,
)
from ownerwise.runs import Run
from ownerwise.wording import amount, epsilon, percent, percent_up, signed_points, span_up, whole

_ACCURACY, _, _WORST, _STRICTEST, _SPREAD = METRICS


def default_title(comparison: Comparison) -> str:
    """Return a title that names the methods."""
    labels = [method.label for method in comparison.methods]
    if len(labels) == 1:
        return f"{labels[0]}: privacy and utility"
    return " vs ".join(labels) if len(labels) == 2 else f"{len(labels)} methods compared"


def overview(comparison: Comparison) -> str:
    """Return the overview section."""
    content = [_trained(comparison), _status(comparison), _tiles(comparison)]
    if comparison.source is None:
        content.append(markup.paragraph(NO_VALIDATION))
    else:
        content += [_methods_table(comparison), _findings(comparison), _measured_on(comparison)]
    return markup.section("overview", "At a glance", *content)


def _trained(comparison: Comparison) -> str:
    run = comparison.runs[0]
    plan = run.plan
    count = len(comparison.runs)
    what = [f"{k.capitalize()}: {run.config[k]}." for k in ("model", "data") if _is_text(run, k)]
    methods = _count(len(comparison.methods), "method")
    runs = "One run" if count == 1 else f"{count} runs of {methods}"
    words = f"{runs}; {_count(len(plan.targets), 'owner')} with "
    words += f"{_count(int(plan.records.sum()), 'declared record')}."
    return markup.paragraph(" ".join([*what, words]), "lead")


def _is_text(run: Run, key: str) -> bool:
    return isinstance(run.config.get(key), str) and bool(run.config[key])


def _count(number: int, noun: str) -> str:
    return f"{whole(number)} {noun}{'' if number == 1 else 's'}"


def _status(comparison: Comparison) -> str:
    """Return the banner that states whether the guarantee holds."""
    runs = comparison.runs
    unprotected = [run for run in runs if not run.private]
    if unprotected:
        words = (
            f"{no_guarantee(unprotected, len(runs))} Use the results for tests and comparisons "
            f"only. {HYPOTHETICAL_EPSILON}"
        )
        return (
            f'<div class="banner bad" role="note"><strong>{NOT_PRIVATE}</strong>'
            f"{markup.paragraph(words)}</div>"
        )
    words = (
        f"{protected(runs)} No record has spent more than {percent_up(_largest_share(comparison))} "
        "of its ε."
    )
    if len(runs) > 1:
        words += (
            f" Each ε holds for a single run: if these {len(runs)} runs are all released, records "
            "used in several of them spend more than the ε shown."
        )
    cautions = sorted({caution for run in runs if (caution := large_delta(run))})
    paragraphs = "".join(map(markup.paragraph, [words, *cautions]))
    return f'<div class="banner good" role="note"><strong>Private</strong>{paragraphs}</div>'


def _largest_share(comparison: Comparison) -> float:
    """Return the largest share of a budget that any record has spent."""
    return max(
        float((use.plan.epsilon(steps=use.steps_spent) / use.plan.targets).max())
        for use in comparison.plans
    )


class _Tile(NamedTuple):
    value: str
    name: str
    note: str


def _tiles(comparison: Comparison) -> str:
    plan = comparison.runs[0].plan
    steps = max(run.steps_spent for run in comparison.runs)
    spent = np.concatenate([use.plan.epsilon(steps=use.steps_spent) for use in comparison.plans])
    lead = comparison.methods[-1] if len(comparison.methods) == 2 else _best(comparison)
    tiles = [
        _Tile(
            span_up(float(plan.targets.min()), float(plan.targets.max()), 3),
            "ε set by owners",
            f"strictest to laxest, {_count(len(plan.targets), 'owner')}",
        ),
        _Tile(
            span_up(float(spent.min()), float(spent.max())),
            "ε spent per record",
            f"at most {percent_up(_largest_share(comparison))} of a budget",
        ),
        _Tile(f"{whole(steps)} of {whole(plan.steps)}", "steps spent", f"plan “{plan.method}”"),
    ]
    for metric in (_ACCURACY, _WORST, _STRICTEST):
        value = comparison.amounts(lead, metric)
        if value is not None:
            note = _against(comparison, lead, metric)
            tiles.append(_Tile(percent(value.mean), metric.title.lower(), note))
    items = "".join(
        f'<div class="tile"><dt>{escape(tile.name)}</dt><dd>{escape(tile.value)}'
        f"<small>{escape(tile.note)}</small></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _best(comparison: Comparison) -> MethodRuns:
    """Return the method with the best worst-group recall; the baseline if there are no groups."""
    known = [
        (worst.mean, m) for m in comparison.methods if (worst := comparison.amounts(m, _WORST))
    ]
    return max(known, key=lambda pair: pair[0])[1] if known else comparison.baseline


def _against(comparison: Comparison, lead: MethodRuns, metric: Metric) -> str:
    other = next(iter(_plainer(comparison)), comparison.baseline)
    mine, theirs = comparison.amounts(lead, metric), comparison.amounts(other, metric)
    if lead is other or mine is None or theirs is None:
        return lead.label
    return f"{lead.label}; {signed_points(mine.mean - theirs.mean)} vs {other.label}"


def _methods_table(comparison: Comparison) -> str:
    metrics = [
        m for m in METRICS if any(comparison.amounts(method, m) for method in comparison.methods)
    ]
    rows = []
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
        caption += ". ★ marks the best mean, which may be due to chance: see below"
    titles = [
        f"{m.title} ({'%' if m.higher_is_better else 'points, lower is better'})" for m in metrics
    ]
    return markup.table(caption, ["Method", "Runs", *titles], rows)


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


def _findings(comparison: Comparison) -> str:
    """Return the gains and losses of each method compared with a simpler one."""
    if not comparison.others:
        return ""
    items = []
    plainer = _plainer(comparison)
    pairs = [(comparison.baseline, other) for other in plainer]
    pairs += [
        (method, comparison.baseline) for method in comparison.others if method not in plainer
    ]
    for method, other in pairs:
        changes = differences(comparison, method, other)
        gained = [d for d in changes if d.better and d.clear is not False]
        lost = [d for d in changes if not d.better and d.clear is not False and d.by]
        unclear = [d for d in changes if d.clear is False or not d.by]
        parts = [f"<strong>{escape(f'{method.label} vs {other.label}')}.</strong>"]
        tested = all(d.clear is not None for d in changes)
        better, worse = ("Gained", "Lost") if tested else ("Better here", "Worse here")
        parts.append(_list_of(better, gained) or "Nothing gained beyond chance.")
        parts.append(_list_of(worse, lost))
        parts.append(_list_of("Unchanged or within chance", unclear))
        parts.append(escape(_group_words(comparison, method, other)))
        items.append("<li>" + " ".join(part for part in parts if part) + "</li>")
    rule = (
        "“Beyond chance” means more than two standard errors, which is a rule of thumb, not a test."
        if all(len(m.runs) > 1 for m in comparison.methods)
        else "A single run of a method cannot show how much of a difference is due to chance."
    )
    return f'<ul class="findings">{"".join(items)}</ul>{markup.paragraph(rule, "note")}'


def _plainer(comparison: Comparison) -> list[MethodRuns]:
    """Return the methods that train everyone at the strictest budget; none if the baseline does."""
    if comparison.baseline.runs[0].plan.method == "uniform":
        return []
    return [m for m in comparison.others if m.runs[0].plan.method == "uniform" and not m.weights]


def _list_of(word: str, changes: list[Difference]) -> str:
    if not changes:
        return ""
    parts = [f"{d.metric.title.lower()} {signed_points(d.by)}" for d in changes]
    return escape(f"{word}: {', '.join(parts)}.")


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
    words = f"Of {len(gains)} {several}, {up} gained and {down} lost recall"
    if down:
        worst = min(gains, key=lambda group: gains[group])
        budget = "" if worst.epsilon is None else f" (ε {epsilon(worst.epsilon)})"
        name = worst.name if len(worst.members) > 1 else f"{noun} {worst.name}{budget}"
        words += f"; the largest loss was {signed_points(gains[worst])} for {name}"
    return words + "."


def _measured_on(comparison: Comparison) -> str:
    words = (
        f"Not private: these results were measured on {comparison.data_split} records, which are "
        "not covered by any guarantee. Balanced accuracy is the mean recall over classes; spread "
        "is the standard deviation of recall over groups."
    )
    ends = {run.steps_spent for run in comparison.runs}
    if len(ends) > 1:
        words += f" The runs stopped at different steps: {whole(min(ends))} to {whole(max(ends))}."
    return markup.paragraph(words, "note")
