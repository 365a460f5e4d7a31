"""The sections after the overview, in the order of the story."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.errors import name_some
from ownerwise.planning import BudgetClass
from ownerwise.report import markup
from ownerwise.report.budget_classes import (
    Spent,
    attacker_bound,
    attacker_words,
    spent,
)
from ownerwise.report.figures import study_data
from ownerwise.report.groups import MOST_NAMED
from ownerwise.report.markup import Cell, escape
from ownerwise.report.statements import (
    ADJACENCY,
    assumed_public,
    not_covered,
    random_source,
    released,
    unit,
)
from ownerwise.report.study import PlanUse, Study
from ownerwise.runs import (
    Run,
)
from ownerwise.wording import delta, duration, epsilon, percent, percent_up, span, span_up, whole

_LITTLE_PROMISED = 95.0


def group_table(study: Study) -> str:
    """Return every group's recall at the end, method by method, to open on demand."""
    if not study.groups or study.source is None:
        return ""
    rows = []
    for group in study.groups[:MOST_NAMED]:
        found = [study.group_recall(method, group) for method in study.methods]
        shown = [
            percent(f.mean) if f.deviation is None
            else f"{100 * f.mean:.1f} ± {100 * f.deviation:.1f} %"
            for f in found
        ]  # fmt: skip
        top = max(round(100 * f.mean, 1) for f in found)
        best = [len(found) > 1 and round(100 * f.mean, 1) == top for f in found]
        budget = "–" if group.epsilon is None else epsilon(group.epsilon)
        cells = [Cell(text, best=mark and not all(best))
                 for text, mark in zip(shown, best, strict=True)]  # fmt: skip
        rows.append([group.name, budget, *cells])
    caption = f"Recall by group at the end, on {study_data(study)} data (not private)"
    headings = ["Group", "ε", *(method.label for method in study.methods)]
    return markup.details("All groups as a table", markup.table(caption, headings, rows))


def budget_tables(study: Study) -> list[str]:
    """Return target and spent epsilon of every budget class; plans with equal classes share one."""
    together: dict[tuple, list[PlanUse]] = {}
    for use in study.plans:
        key = tuple((one.epsilon, one.delta, one.owners) for one in use.classes)
        together.setdefault(key, []).append(use)
    return [_budget_table(uses, titled=len(study.plans) > 1) for uses in together.values()]


def _budget_table(uses: list[PlanUse], *, titled: bool) -> str:
    columns = [spent(use.plan, use.classes, use.steps_spent) for use in uses]
    rows = [
        [
            one.name,
            _span(one.delta, delta),
            whole(one.owners),
            whole(one.records),
            *(_share(column[at]) for column in columns),
        ]
        for at, one in enumerate(uses[0].classes)
    ]
    titles = [
        f"ε spent after {whole(use.steps_spent)} of {whole(use.plan.steps)} steps"
        + (f": {use.labels}" if titled else "")
        for use in uses
    ]
    headings = ["Budget", "δ", "Owners", "Records", *titles]
    return markup.table("Budgets and what each record has spent of them", headings, rows)


def _share(found: Spent) -> str:
    return f"{span_up(found.low, found.high)} ({percent_up(found.share)})"


def meaning(study: Study) -> str:
    """Return what each epsilon means for a person, in plain language."""
    intro = (
        "Suppose somebody knows everything about a record except whether it was used in training, "
        "and then gets the model. A guess without the model is right 50 times in 100. With the "
        "model, whatever the method and whatever the computer, it is right at most about so many "
        "times in 100:"
    )
    distinct: dict[tuple, list[BudgetClass]] = {}
    for use in study.plans:
        key = tuple((one.epsilon, one.delta) for one in use.classes)
        distinct.setdefault(key, use.classes)
    parts = [markup.paragraph(intro)]
    parts += [_odds_table(classes) for classes in distinct.values()]
    bounds = [_bound(one) for classes in distinct.values() for one in classes]
    if max(bounds) > _LITTLE_PROMISED:
        parts.append(
            markup.paragraph(
                "Where the number is close to 100 the promise alone rules out little. It still "
                "bounds every attack, and attacks that are known usually do much worse than the "
                "bound; but only a stricter budget makes the promise itself strong.",
                "note",
            )
        )
    parts.append(
        markup.paragraph(
            f"{unit(study.runs[0])} {ADJACENCY} The number is 100 (exp ε + δ) / (1 + exp ε)."
        )
    )
    return markup.section("meaning", "What an ε means for a person", *parts)


def _bound(one: BudgetClass) -> float:
    return attacker_bound(one.epsilon[1], one.delta[1])


def _odds_table(classes: list[BudgetClass]) -> str:
    rows = []
    for one in classes:
        bound = _bound(one)
        bar = (
            f'<span class="odds" aria-hidden="true"><span style="width:{2 * (bound - 50):.1f}%">'
            "</span></span>"
        )
        rows.append(
            [
                one.name,
                Cell(markup=bar),
                attacker_words(bound),
                whole(one.owners),
            ]
        )
    headings = ["Budget", "From 50 (a coin) to 100 (certain)", "Right at most about", "Owners"]
    return markup.table("The best that any attacker can do", headings, rows, words=2)


def _span(values: tuple[float, float], form: Any) -> str:
    low, high = map(form, values)
    return low if low == high else f"{low} to {high}"


def plan_section(study: Study) -> str:
    """Return the plans: what was fixed before training, and who checked it."""
    uses = study.plans
    intro = (
        "Everything in a plan is fixed before training and taken as public. One private step draws "
        "each record with its owner's rate, holds its gradient to the clip norm, and adds noise to "
        "the sum."
    )
    parts = [markup.paragraph(intro)]
    parts += [_plan(use, titled=len(uses) > 1) for use in uses]
    return markup.section("plan", "The plan", *parts)


def _plan(use: PlanUse, *, titled: bool) -> str:
    plan = use.plan
    facts = {
        "Method": plan.method + ("" if plan.mixture is None else f" (mixture {plan.mixture:g})"),
        "Steps": whole(plan.steps),
        "Expected batch": f"{plan.expected_batch_size:.5g} records",
        "Noise on the sum": f"std {plan.noise_std:.5g}" + (
            "" if len(plan.schedule.segments) == 1 else " × the factor of each step"
        ),
        "Clip norm": f"{plan.clip_norm:g}",
        "Accountant": plan.accountant,
        "Checked by": str(plan.verify()),
        "Plan hash": plan.hash[:16],
    }  # fmt: skip
    title = f"<h3>{escape(f'Plan of {use.labels}')}</h3>" if titled else ""
    parts = [title, _definitions(facts), _plan_table(use, owners=False)]
    if plan.owners is not None and len(plan.targets) <= MOST_NAMED:
        parts.append(markup.details("By owner", _plan_table(use, owners=True)))
    unspent = int(plan.unspent.sum())
    if unspent:
        parts.append(
            markup.paragraph(
                f"{unspent} owners cannot use up their budget under this plan: "
                + (
                    "all are trained with the strictest budget."
                    if plan.method == "uniform"
                    else "a sampling rate is at most 1, and there is a least amount of noise."
                ),
                "note",
            )
        )
    return "".join(parts)


def _plan_table(use: PlanUse, *, owners: bool) -> str:
    headings = ["Budget", "Owner" if owners else "Owners", "Records", "δ", "Rate", "Clip norm",
                "Noise multiplier", "Batch share", "ε after all steps"]  # fmt: skip
    rows = [
        [
            f"ε {span(*row.epsilon, 4)}",
            whole(row.owners) if row.owner is None else row.owner,
            whole(row.records),
            _span(row.delta, delta),
            span(*row.sampling_rate, 4),
            span(*row.clip_norm, 4),
            span(*row.noise_multiplier, 4),
            f"{100 * row.batch_share:.1f} %",
            span_up(*row.epsilon_spent),
        ]
        for row in use.plan.rows(owners=owners)
    ]
    return markup.table("By owner" if owners else "By budget class", headings, rows)


def fine_print(study: Study) -> str:
    """Return assumptions, what was released, and what no guarantee covers."""
    run = study.runs[0]
    public = list(dict.fromkeys(item for run in study.runs for item in assumed_public(run)))
    return markup.section(
        "limits",
        "What is assumed, and what is not covered",
        "<div class='two'><div><h3>Assumed public</h3>",
        markup.bullets(public),
        "</div><div><h3>Released</h3>",
        markup.bullets(released(run)),
        "<h3>Source of randomness</h3>",
        markup.bullets(sorted({random_source(run) for run in study.runs})),
        "</div></div><h3>Not covered</h3>",
        markup.bullets(not_covered(study.runs)),
    )


def made(study: Study) -> str:
    """Return settings, environment and hashes of the runs: what they share, and what differs."""
    facts = [_merged([_facts(run) for run in method.runs]) for method in study.methods]
    names = list(dict.fromkeys(name for found in facts for name in found))
    shared = {
        name: facts[0][name]
        for name in names
        if all(found.get(name) == facts[0].get(name) for found in facts)
    }
    parts = [_definitions(shared)]
    differing = [name for name in names if name not in shared]
    if differing:
        rows = [[name, *(found.get(name, "–") for found in facts)] for name in differing]
        headings = ["Setting", *(method.label for method in study.methods)]
        parts.append(markup.table("What differs", headings, rows, words=len(headings)))
    environment = _merged([_flat(run.environment) for run in study.runs])
    parts.append(markup.details("Environment", _definitions(environment)))
    return markup.section("made", "How this was made", *parts)


_SHOWN_ELSEWHERE = ("label", "group_budgets")


def _facts(run: Run) -> dict[str, str]:
    facts = _flat({k: v for k, v in run.config.items() if k not in _SHOWN_ELSEWHERE})
    facts["steps spent"] = whole(run.steps_spent)
    facts["updates"] = whole(run.updates)
    facts["plan hash"] = run.plan.hash[:16]
    facts["hash of owners and counts"] = run.plan.owners_fingerprint[:16]
    seconds = run.history[-1].get("seconds") if run.history else None
    if seconds is not None:
        facts["training time (not private)"] = duration(seconds)
    return facts


def _merged(facts: list[dict[str, str]]) -> dict[str, str]:
    """Return the facts of several runs as one, differing values side by side."""
    names = dict.fromkeys(name for found in facts for name in found)
    values = {name: [found[name] for found in facts if name in found] for name in names}
    return {name: name_some(list(dict.fromkeys(all_)), shown=8) for name, all_ in values.items()}


def _definitions(facts: Mapping[str, str]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as one level of readable names and values."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        key = f"{before}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{key}: "))
        elif value is not None:
            found[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return found
