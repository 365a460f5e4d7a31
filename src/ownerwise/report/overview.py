"""The first section: the runs, whether they are private, and which results improved."""

from __future__ import annotations

from ownerwise.report.blocks import Banner, Block, Cell, Findings, Table, Text, Tile, Tiles
from ownerwise.report.comparison import (
    METRICS,
    Comparison,
    Difference,
    MethodRuns,
    Metric,
    differences,
)
from ownerwise.report.facts import HYPOTHETICAL_EPSILON, NO_VALIDATION, NOT_PRIVATE
from ownerwise.report.groups import nouns_of
from ownerwise.runs import Run
from ownerwise.wording import amount, epsilon, percent, percent_up, signed_points, span_up, whole

_ACCURACY, _, _WORST, _STRICTEST, _SPREAD = METRICS


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
    return [*content, _methods_table(comparison), *_findings(comparison), _measured_on(comparison)]


def _trained(comparison: Comparison) -> Text:
    run = comparison.runs[0]
    plan = run.plan
    count = len(comparison.runs)
    what = [f"{k.capitalize()}: {run.config[k]}." for k in ("model", "data") if _is_text(run, k)]
    if _is_text(run, "pretraining"):
        what.append(f"{run.config['pretraining'][0].upper()}{run.config['pretraining'][1:]}.")
    methods = _count(len(comparison.methods), "method")
    runs = "One run" if count == 1 else f"{count} runs of {methods}"
    words = f"{runs}; {_count(len(plan.targets), 'owner')} with "
    words += f"{_count(int(plan.records.sum()), 'declared record')}."
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
        return Banner(NOT_PRIVATE, [words], good=False)
    words = (
        f"{facts.status} No record has spent more than {percent_up(facts.largest_share)} of its ε."
    )
    count = len(comparison.runs)
    if count > 1:
        words += (
            f" Each ε holds for a single run: if these {count} runs are all released, records "
            "used in several of them spend more than the ε shown."
        )
    return Banner("Private", [words, *facts.cautions], good=True)


def _tiles(comparison: Comparison) -> Tiles:
    plan, facts = comparison.runs[0].plan, comparison.facts
    steps = max(run.steps_spent for run in comparison.runs)
    lead = comparison.methods[-1] if len(comparison.methods) == 2 else _best(comparison)
    tiles = [
        Tile(
            span_up(float(plan.targets.min()), float(plan.targets.max()), 3),
            "ε set by owners",
            f"strictest to laxest, {_count(len(plan.targets), 'owner')}",
        ),
        Tile(
            span_up(*facts.spent),
            "ε spent per record",
            f"at most {percent_up(facts.largest_share)} of a budget",
        ),
        Tile(f"{whole(steps)} of {whole(plan.steps)}", "steps spent", f"plan “{plan.method}”"),
    ]
    for metric in (_ACCURACY, _WORST, _STRICTEST):
        value = comparison.amounts(lead, metric)
        if value is not None:
            note = _against(comparison, lead, metric)
            tiles.append(Tile(percent(value.mean), metric.title.lower(), note))
    return Tiles(tiles)


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


def _methods_table(comparison: Comparison) -> Table:
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
    return Table(caption, ["Method", "Runs", *titles], rows)


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
    """Return the gains and losses of each method compared with a simpler one."""
    if not comparison.others:
        return []
    plainer = _plainer(comparison)
    pairs = [(comparison.baseline, other) for other in plainer]
    pairs += [
        (method, comparison.baseline) for method in comparison.others if method not in plainer
    ]
    items = []
    for method, other in pairs:
        changes = differences(comparison, method, other)
        tested = all(d.clear is not None for d in changes)
        better, worse = ("Gained", "Lost") if tested else ("Better here", "Worse here")
        parts = [
            _list_of(better, changes, "gained") or "Nothing gained beyond chance.",
            _list_of(worse, changes, "lost"),
            _list_of("Unchanged or within chance", changes, "even"),
            _group_words(comparison, method, other),
        ]
        items.append((f"{method.label} vs {other.label}", " ".join(filter(None, parts))))
    rule = (
        "“Beyond chance” means more than two standard errors, which is a rule of thumb, not a test."
        if all(len(m.runs) > 1 for m in comparison.methods)
        else "A single run of a method cannot show how much of a difference is due to chance."
    )
    return [Findings(items), Text(rule, "note")]


def _plainer(comparison: Comparison) -> list[MethodRuns]:
    """Return the methods that train everyone at the strictest budget; none if the baseline does."""
    if comparison.baseline.runs[0].plan.method == "uniform":
        return []
    return [m for m in comparison.others if m.runs[0].plan.method == "uniform" and not m.weights]


def _list_of(word: str, changes: list[Difference], outcome: str) -> str:
    parts = [
        f"{d.metric.title.lower()} {signed_points(d.by)}" for d in changes if d.outcome == outcome
    ]
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
    words = f"Of {len(gains)} {several}, {up} gained and {down} lost recall"
    if down:
        worst = min(gains, key=lambda group: gains[group])
        budget = "" if worst.epsilon is None else f" (ε {epsilon(worst.epsilon)})"
        name = worst.name if len(worst.members) > 1 else f"{noun} {worst.name}{budget}"
        words += f"; the largest loss was {signed_points(gains[worst])} for {name}"
    return words + "."


def _measured_on(comparison: Comparison) -> Text:
    words = (
        f"Not private: these results were measured on {comparison.data_split} records, which are "
        "not covered by any guarantee. Balanced accuracy is the mean recall over classes; spread "
        "is the standard deviation of recall over groups."
    )
    ends = {run.steps_spent for run in comparison.runs}
    if len(ends) > 1:
        words += f" The runs stopped at different steps: {whole(min(ends))} to {whole(max(ends))}."
    return Text(words, "note")
