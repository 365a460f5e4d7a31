"""The sections after the overview, in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.errors import name_some
from ownerwise.planning import BudgetClass
from ownerwise.report import markup
from ownerwise.report.comparison import Comparison, PlanUse
from ownerwise.report.groups import MOST_NAMED
from ownerwise.report.guarantees import Spent, attacker_words, class_attacker_bound, spent
from ownerwise.report.markup import Cell, escape
from ownerwise.report.statements import (
    ADJACENCY,
    ATTACKER,
    accounting,
    assumed_public,
    mechanism,
    not_covered,
    random_source,
    released,
    unit,
)
from ownerwise.runs import Run
from ownerwise.wording import (
    amount,
    delta_span,
    duration,
    epsilon,
    percent,
    percent_up,
    span,
    span_up,
    whole,
)

_WEAK_PROMISE = 95.0


def group_table(comparison: Comparison) -> str:
    """Return a collapsed table with each group's final recall under each method."""
    if not comparison.groups or comparison.source is None:
        return ""
    rows = []
    for group in comparison.groups[:MOST_NAMED]:
        recalls = [comparison.group_recall(method, group) for method in comparison.methods]
        rounded = [round(100 * recall.mean, 1) for recall in recalls]
        tied = len(set(rounded)) == 1
        cells = [
            Cell(f"{amount(recall)}%", best=mean == max(rounded) and not tied)
            for recall, mean in zip(recalls, rounded, strict=True)
        ]
        budget = "–" if group.epsilon is None else epsilon(group.epsilon)
        rows.append([group.name, budget, *cells])
    caption = f"Final recall by group on {comparison.data_split} data (not private)"
    headings = ["Group", "ε", *(method.label for method in comparison.methods)]
    return markup.details("All groups as a table", markup.table(caption, headings, rows))


def budget_tables(comparison: Comparison) -> list[str]:
    """Return tables of promised and spent epsilon; plans with the same budget classes share one."""
    together: dict[tuple, list[PlanUse]] = {}
    for use in comparison.plans:
        key = tuple((row.epsilon, row.delta, row.owners) for row in use.classes)
        together.setdefault(key, []).append(use)
    titled = len(comparison.plans) > 1
    return [_budget_table(uses, titled=titled) for uses in together.values()]


def _budget_table(uses: list[PlanUse], *, titled: bool) -> str:
    columns = [spent(use.plan, use.classes, use.steps_spent) for use in uses]
    rows = [
        [
            budget_class.name,
            *(_spent(column[at]) for column in columns),
            whole(budget_class.owners),
            whole(budget_class.records),
            delta_span(*budget_class.delta),
        ]
        for at, budget_class in enumerate(uses[0].classes)
    ]
    titles = [f"ε spent: {use.labels}" if titled else "ε spent" for use in uses]
    steps = dict.fromkeys(
        f"{whole(use.steps_spent)} of {whole(use.plan.steps)} steps" for use in uses
    )
    caption = (
        f"The budget and the ε spent per record after {' and '.join(steps)}; the largest spent "
        "share of any budget is in parentheses"
    )
    return markup.table(caption, ["Budget", *titles, "Owners", "Records", "δ"], rows)


def _spent(spending: Spent) -> str:
    return f"{span_up(spending.low, spending.high)} ({percent_up(spending.share)})"


def meaning(comparison: Comparison) -> str:
    """Return the section that explains in plain language what each epsilon means."""
    distinct: dict[tuple, list[BudgetClass]] = {}
    for use in comparison.plans:
        key = tuple((row.epsilon, row.delta) for row in use.classes)
        distinct.setdefault(key, use.classes)
    parts = [markup.paragraph(ATTACKER)]
    parts += [_attacker_table(classes) for classes in distinct.values()]
    bounds = [class_attacker_bound(row) for classes in distinct.values() for row in classes]
    if max(bounds) > _WEAK_PROMISE:
        parts.append(
            markup.paragraph(
                "A bound close to 100 rules out little on its own. It still limits every attack, "
                "and known attacks usually do much worse than the bound; but only a stricter "
                "budget makes the guarantee itself stronger.",
                "note",
            )
        )
    parts.append(
        markup.paragraph(
            f"{unit(comparison.runs[0])} {ADJACENCY} The bound is 100 (exp ε + δ) / (1 + exp ε)."
        )
    )
    return markup.section("meaning", "What ε means for a person", *parts)


def _attacker_table(classes: list[BudgetClass]) -> str:
    rows = []
    for budget_class in classes:
        bound = class_attacker_bound(budget_class)
        bar = (
            f'<span class="odds" aria-hidden="true"><span style="width:{2 * (bound - 50):.1f}%">'
            "</span></span>"
        )
        words = f'<span class="unbroken">{escape(attacker_words(bound))}</span>'
        owners = whole(budget_class.owners)
        rows.append([budget_class.name, Cell(markup=words), Cell(markup=bar), owners])
    headings = ["Budget", "Right at most", "From 50 (coin toss) to 100 (certainty)", "Owners"]
    return markup.table("The best any attacker can do", headings, rows, words=3)


def plan_section(comparison: Comparison) -> str:
    """Return the section on the plans: settings fixed before training, and their verification."""
    intro = (
        "Everything in a plan is fixed before training and assumed to be public. Each private step "
        "samples each record at its owner's rate, clips its gradient to the clip norm and adds "
        "noise to the sum."
    )
    parts = [markup.paragraph(intro)]
    parts += [_plan(use, titled=len(comparison.plans) > 1) for use in comparison.plans]
    return markup.section("plan", "The plan", *parts)


def _plan(use: PlanUse, *, titled: bool) -> str:
    plan = use.plan
    facts = {**mechanism(plan), **accounting(plan), "Plan hash": plan.hash[:16]}
    title = f"<h3>{escape(f'Plan of {use.labels}')}</h3>" if titled else ""
    parts = [title, _definitions(facts), _plan_table(use, owners=False)]
    if plan.owners is not None and len(plan.targets) <= MOST_NAMED:
        parts.append(markup.details("By owner", _plan_table(use, owners=True)))
    unspent = int(plan.unspent.sum())
    if unspent:
        reason = "sampling rates cannot exceed 1, and the noise cannot fall below a minimum."
        if plan.method == "uniform":
            reason = "everyone is trained at the strictest budget."
        owners = "1 owner" if unspent == 1 else f"{whole(unspent)} owners"
        words = f"{owners} cannot use up their budget under this plan: {reason}"
        parts.append(markup.paragraph(words, "note"))
    return "".join(parts)


def _plan_table(use: PlanUse, *, owners: bool) -> str:
    headings = ["Budget", "Owner" if owners else "Owners", "Records", "δ", "Sampling rate",
                "Clip norm", "Noise multiplier", "Batch share", "ε after all steps"]  # fmt: skip
    rows = [
        [
            f"ε {span(*row.epsilon, 4)}",
            whole(row.owners) if row.owner is None else row.owner,
            whole(row.records),
            delta_span(*row.delta),
            span(*row.sampling_rate, 4),
            span(*row.clip_norm, 4),
            span(*row.noise_multiplier, 4),
            percent(row.batch_share),
            span_up(*row.epsilon_spent),
        ]
        for row in use.plan.rows(owners=owners)
    ]
    return markup.table("By owner" if owners else "By budget class", headings, rows)


def fine_print(comparison: Comparison) -> str:
    """Return the section on assumptions, releases and anything not covered by a guarantee."""
    runs = comparison.runs
    public = dict.fromkeys(item for run in runs for item in assumed_public(run))
    left_process = dict.fromkeys(item for run in runs for item in released(run))
    return markup.section(
        "limits",
        "Assumptions and limits",
        "<div class='two'><div><h3>Assumed public</h3>",
        markup.bullets(public),
        "</div><div><h3>Released</h3>",
        markup.bullets(left_process),
        "<h3>Source of randomness</h3>",
        markup.bullets(sorted({random_source(run) for run in runs})),
        "</div></div><h3>Not covered, not private</h3>",
        markup.bullets(not_covered(runs)),
    )


def provenance(comparison: Comparison) -> str:
    """Return the section on the runs' settings, environment and hashes, and their differences."""
    facts = [_merged([_facts(run) for run in method.runs]) for method in comparison.methods]
    names = list(dict.fromkeys(name for of_method in facts for name in of_method))
    shared = {
        name: facts[0][name]
        for name in names
        if all(of_method.get(name) == facts[0].get(name) for of_method in facts)
    }
    parts = [_definitions(shared)]
    differing = [name for name in names if name not in shared]
    if differing:
        rows = [[name, *(of_method.get(name, "–") for of_method in facts)] for name in differing]
        headings = ["Setting", *(method.label for method in comparison.methods)]
        parts.append(markup.table("What differs", headings, rows, words=len(headings)))
    environment = _merged([_flat(run.environment) for run in comparison.runs])
    parts.append(markup.details("Environment", _definitions(environment)))
    return markup.section("provenance", "Settings and provenance", *parts)


_SHOWN_ELSEWHERE = ("label", "group_budgets")


def _facts(run: Run) -> dict[str, str]:
    facts = _flat({k: v for k, v in run.config.items() if k not in _SHOWN_ELSEWHERE})
    facts["steps spent"] = whole(run.steps_spent)
    facts["updates"] = whole(run.updates)
    facts["plan hash"] = run.plan.hash[:16]
    facts["hash of owners and declared counts"] = run.plan.owners_fingerprint[:16]
    seconds = run.history[-1].get("seconds") if run.history else None
    if seconds is not None:
        facts["training time (not private)"] = duration(seconds)
    return facts


def _merged(facts: list[dict[str, str]]) -> dict[str, str]:
    """Merge the facts about several runs into one mapping, listing all values where they differ."""
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    values = {name: [of_run[name] for of_run in facts if name in of_run] for name in names}
    return {name: name_some(list(dict.fromkeys(each)), shown=8) for name, each in values.items()}


def _definitions(facts: Mapping[str, str]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Flatten nested settings into a mapping of readable names to values."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        key = f"{before}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{key}: "))
        elif value is not None:
            flat[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return flat
