"""The first section: what was trained, is it private, what came out, what was not gained."""

from __future__ import annotations

from typing import NamedTuple

from ownerwise.errors import name_some
from ownerwise.report import markup
from ownerwise.report.figures import study_data
from ownerwise.report.groups import nouns_of
from ownerwise.report.markup import Cell, escape
from ownerwise.report.statements import NOT_PRIVATE, budget_words, large_delta, why_not_private
from ownerwise.report.study import METRICS, Difference, Method, Metric, Study, differences
from ownerwise.runs import (
    Run,
)
from ownerwise.wording import amount, epsilon, percent, percent_up, signed_points, span_up, whole

_ACCURACY, _, _WORST, _STRICTEST, _SPREAD = METRICS


def default_title(study: Study) -> str:
    """Return a title from the methods that are shown."""
    labels = [method.label for method in study.methods]
    if len(labels) == 1:
        return f"{labels[0]}: privacy and utility"
    return " against ".join(labels) if len(labels) == 2 else f"{len(labels)} methods compared"


def overview(study: Study) -> str:
    """Return the section."""
    content = [_trained(study), _status(study), _tiles(study)]
    if study.source is None:
        content.append(
            markup.paragraph(
                "No validation data were given, so nothing is known here about how well the model "
                "works, or for whom."
            )
        )
    else:
        content += [_methods_table(study), _findings(study), _measured_on(study)]
    return markup.section("overview", "At a glance", *content)


def _trained(study: Study) -> str:
    run = study.runs[0]
    plan = run.plan
    count = len(study.runs)
    what = " on ".join(str(run.config[k]) for k in ("model", "data") if _is_text(run, k))
    runs = "One run" if count == 1 else f"{count} runs of {_count(len(study.methods), 'method')}"
    words = f"{runs}, {_count(len(plan.targets), 'owner')} with "
    words += f"{_count(int(plan.records.sum()), 'declared record')}."
    return markup.paragraph(f"{what}. {words}" if what else words, "lead")


def _is_text(run: Run, key: str) -> bool:
    return isinstance(run.config.get(key), str) and bool(run.config[key])


def _count(number: int, noun: str) -> str:
    return f"{whole(number)} {noun}{'' if number == 1 else 's'}"


def _status(study: Study) -> str:
    """Return the banner that says whether the guarantee holds."""
    open_runs = [run for run in study.runs if not run.private]
    if open_runs:
        which = f"{len(open_runs)} of {len(study.runs)} runs carry"
        if len(open_runs) == len(study.runs):
            which = "This run carries" if len(open_runs) == 1 else "These runs carry"
        return (
            f'<div class="banner bad" role="note"><strong>{NOT_PRIVATE}</strong><p>'
            f"{escape(which)} no guarantee: {escape(why_not_private(open_runs))}. Use the figures "
            "for tests and comparisons; do not release these models as private. The ε below are "
            "what the same runs with secret randomness would promise.</p></div>"
        )
    several = ""
    if len(study.runs) > 1:
        several = (
            f" Each ε holds for one run on its own: released together, these {len(study.runs)} "
            "runs spend more where they saw the same records."
        )
    cautions = sorted({words for run in study.runs if (words := large_delta(run))})
    several += "".join(f"</p><p>{escape(words)}" for words in cautions)
    budgets = sorted({budget_words(run) for run in study.runs})
    return (
        '<div class="banner good" role="note"><strong>Private</strong><p>Each single record is '
        f"protected with the budget that its owner set: {escape(name_some(budgets))}. "
        f"{escape(_spent_words(study))}{several}</p></div>"
    )


def _spent_words(study: Study) -> str:
    share = max(
        float((use.plan.epsilon(steps=use.steps_spent) / use.plan.targets).max())
        for use in study.plans
    )
    return f"No record has spent more than {percent_up(share, 2)} of its ε."


class _Tile(NamedTuple):
    value: str
    name: str
    note: str


def _tiles(study: Study) -> str:
    plan = study.runs[0].plan
    spent = max(run.steps_spent for run in study.runs)
    lead = study.methods[-1] if len(study.methods) == 2 else _best(study)
    tiles = [
        _Tile(
            span_up(float(plan.targets.min()), float(plan.targets.max()), 3),
            "ε that owners set",
            f"strictest to laxest, {_count(len(plan.targets), 'owner')}",
        ),
        _Tile(f"{whole(spent)} of {whole(plan.steps)}", "steps spent", f"plan “{plan.method}”"),
    ]
    for metric in (_ACCURACY, _WORST, _STRICTEST):
        found = study.amounts(lead, metric)
        if found is not None:
            tiles.append(
                _Tile(percent(found.mean), metric.title.lower(), _against(study, lead, metric))
            )
    items = "".join(
        f'<div class="tile"><dt>{escape(tile.name)}</dt><dd>{escape(tile.value)}'
        f"<small>{escape(tile.note)}</small></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _best(study: Study) -> Method:
    """Return the method with the best worst group, or the first without groups."""
    known = [(found.mean, m) for m in study.methods if (found := study.amounts(m, _WORST))]
    return max(known, key=lambda pair: pair[0])[1] if known else study.baseline


def _against(study: Study, lead: Method, metric: Metric) -> str:
    other = next(iter(_plainer(study)), study.baseline)
    mine, theirs = study.amounts(lead, metric), study.amounts(other, metric)
    if lead is other or mine is None or theirs is None:
        return lead.label
    return f"{lead.label}, {signed_points(mine.mean - theirs.mean)} to {other.label}"


def _methods_table(study: Study) -> str:
    metrics = [m for m in METRICS if any(study.amounts(method, m) for method in study.methods)]
    rows = []
    for method in study.methods:
        cells = [Cell(method.label), Cell(str(len(method.runs)))]
        for metric in metrics:
            found = study.amounts(method, metric)
            cells.append(Cell(amount(found), best=_is_best(study, method, metric)))
        rows.append(cells)
    caption = f"At the end of training, on {study_data(study)} data (not private)"
    if any(len(method.runs) > 1 for method in study.methods):
        caption += ": mean ± standard deviation over runs"
    if study.others:
        caption += "; ★ best mean, which may be chance: the lines below say so"
    titles = [
        f"{m.title} ({'%' if m.higher_is_better else 'points, less is better'})" for m in metrics
    ]
    return markup.table(caption, ["Method", "Runs", *titles], rows)


def _is_best(study: Study, method: Method, metric: Metric) -> bool:
    """Return whether no other method is better, to the digits that are shown."""
    if len(study.methods) == 1:
        return False
    found = {
        m.label: round(100 * value.mean, 1)
        for m in study.methods
        if (value := study.amounts(m, metric)) is not None
    }
    if method.label not in found or len(set(found.values())) == 1:
        return False
    choose = max if metric.higher_is_better else min
    return found[method.label] == choose(found.values())


def _findings(study: Study) -> str:
    """Return what every method gained against the plainer one, and what it did not."""
    if not study.others:
        return ""
    items = []
    plainer = _plainer(study)
    pairs = [(study.baseline, other) for other in plainer]
    pairs += [(method, study.baseline) for method in study.others if method not in plainer]
    for method, other in pairs:
        found = differences(study, method, other)
        gained = [d for d in found if d.better and d.clear is not False]
        lost = [d for d in found if not d.better and d.clear is not False and d.by]
        unclear = [d for d in found if d.clear is False or not d.by]
        parts = [f"<strong>{escape(f'{method.label} against {other.label}')}.</strong>"]
        sure = all(d.clear is not None for d in found)
        better, worse = ("Gained", "Lost") if sure else ("Better here", "Worse here")
        parts.append(_list_of(better, gained) or "Nothing was gained beyond chance.")
        parts.append(_list_of(worse, lost))
        parts.append(_list_of("Neither gained nor lost beyond chance", unclear))
        parts.append(escape(_group_words(study, method, other)))
        items.append("<li>" + " ".join(part for part in parts if part) + "</li>")
    rule = (
        "Beyond chance means more than two standard errors: a rule of thumb, not a test."
        if all(len(m.runs) > 1 for m in study.methods)
        else "Where a method has one run only, how much of a difference is chance is not known."
    )
    return f'<ul class="findings">{"".join(items)}</ul>{markup.paragraph(rule, "note")}'


def _plainer(study: Study) -> list[Method]:
    """Return the methods that give all owners the strictest budget, if the baseline does not."""
    if study.baseline.runs[0].plan.method == "uniform":
        return []
    return [m for m in study.others if m.runs[0].plan.method == "uniform" and not m.weights]


def _list_of(word: str, found: list[Difference]) -> str:
    if not found:
        return ""
    parts = [f"{d.metric.title.lower()} {signed_points(d.by)}" for d in found]
    return escape(f"{word}: {', '.join(parts)}.")


def _group_words(study: Study, method: Method, other: Method) -> str:
    """Return how many groups gained and lost, and who lost most."""
    if len(study.groups) < 2:
        return ""
    gains = {
        group: study.group_recall(method, group).mean - study.group_recall(other, group).mean
        for group in study.groups
    }
    up = sum(round(100 * gain, 1) > 0 for gain in gains.values())
    down = sum(round(100 * gain, 1) < 0 for gain in gains.values())
    noun = study.group_noun.lower()
    ranges = any(len(group.members) > 1 for group in gains)
    several = "ranges of budgets" if ranges else nouns_of(study.runs)[1]
    words = f"Of {len(gains)} {several} {up} gained and {down} lost recall"
    if down:
        worst = min(gains, key=lambda group: gains[group])
        budget = "" if worst.epsilon is None else f" (ε {epsilon(worst.epsilon)})"
        name = worst.name if len(worst.members) > 1 else f"{noun} {worst.name}{budget}"
        words += f", most of all {name}: {signed_points(gains[worst])}"
    return words + "."


def _measured_on(study: Study) -> str:
    words = (
        f"Not private: these figures were measured on {study_data(study)} records, which no "
        "guarantee covers. Balanced accuracy is the mean recall of classes; spread is the standard "
        "deviation of recall over groups."
    )
    ends = {run.steps_spent for run in study.runs}
    if len(ends) > 1:
        words += f" The runs stopped at different steps ({whole(min(ends))} to {whole(max(ends))})."
    return markup.paragraph(words, "note")
