"""The sections of the report, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ownerwise.errors import OwnerwiseError
from ownerwise.report import figures
from ownerwise.report.audit_section import audit_section
from ownerwise.report.blocks import (
    Block,
    Bullets,
    Cell,
    Columns,
    Details,
    Heading,
    Section,
    Table,
    Text,
)
from ownerwise.report.comparison import Comparison
from ownerwise.report.facts import ADJACENCY, ATTACKER, BudgetFacts, PlanFacts
from ownerwise.report.groups import MOST_NAMED
from ownerwise.report.guarantees import attacker_words
from ownerwise.report.limits import Limits
from ownerwise.report.mechanism_sections import MECHANISM_SECTIONS
from ownerwise.report.overview import overview
from ownerwise.report.plan_section import plan_section
from ownerwise.report.plots import Figure
from ownerwise.report.predictions import SECTION as PREDICTIONS
from ownerwise.report.provenance import provenance
from ownerwise.report.spending import spending
from ownerwise.report.tuning_line import tuning_lines
from ownerwise.wording import amount, delta_span, epsilon, percent_up, span_up, whole

_WEAK_PROMISE = 95.0
_SAME_LABEL = "needs at least two methods, but all these runs have the same label."


def all_sections() -> list[Section]:
    """Return the sections in reading order, including those of mechanisms."""
    sections = list(SECTIONS)
    for name in MECHANISM_SECTIONS:
        section = MECHANISM_SECTIONS[name]
        ids = [other.id for other in sections]
        if section.follows not in ids:
            raise OwnerwiseError(
                f"the report section of {name} follows {section.follows!r}; expected follows= to "
                f"be one of {', '.join(ids)}"
            )
        sections.insert(ids.index(section.follows) + 1, section)
    return sections


def _drawn(
    draw: Callable[[Comparison], Figure | None], introduction: str
) -> Callable[[Comparison], Sequence[Block] | None]:
    """Return a function that builds a section with one figure."""

    def build(comparison: Comparison) -> Sequence[Block] | None:
        figure = draw(comparison)
        return None if figure is None else [Text(introduction), figure]

    return build


def _learning(comparison: Comparison) -> Sequence[Block] | None:
    curves = _drawn(
        figures.learning_curves,
        "Records with strict budgets are sampled rarely or clipped heavily, so the model may learn "
        "them late or even get worse on them at first. Each panel shows one group.",
    )(comparison)
    if curves is None or comparison.regression:
        return curves
    return [*curves, _group_table(comparison)]


def _group_table(comparison: Comparison) -> Details:
    """Return a collapsed table with each group's final recall under each method."""
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
    headings = [
        "Group",
        f"ε per {comparison.facts.units}",
        *(method.label for method in comparison.methods),
    ]
    return Details("All groups as a table", Table(caption, headings, rows))


def _budgets(comparison: Comparison) -> list[Block]:
    """Return promised and spent epsilon; plans with the same budget classes share a table."""
    plans = comparison.facts.plans
    together: dict[tuple, list[PlanFacts]] = {}
    for use in plans:
        key = tuple((row.budget.name, row.budget.delta, row.budget.owners) for row in use.budgets)
        together.setdefault(key, []).append(use)
    introduction = (
        "Each owner set their own ε. The plan spends each ε step by step, and training stops "
        "before any step that would exceed it."
    )
    if any(use.plan.tuning is not None for use in plans):
        introduction += (
            " A search for the best settings is spent in one lump, as soon as it begins."
        )
    tables = [_budget_table(uses, titled=len(plans) > 1) for uses in together.values()]
    return [Text(introduction), spending(comparison), *tables]


def _budget_table(uses: list[PlanFacts], *, titled: bool) -> Table:
    several = max(row.budget.most_records for use in uses for row in use.budgets) > 1
    others = [use for use in uses if several and use.plan.other_unit is not None]
    rows = [
        [
            row.budget.name,
            *(_spent(use.budgets[at]) for use in uses),
            *(use.budgets[at].other_epsilon for use in others),
            *([whole(row.budget.most_records)] if several else []),
            whole(row.budget.owners),
            whole(row.budget.records),
            delta_span(*row.budget.delta),
        ]
        for at, row in enumerate(uses[0].budgets)
    ]
    titles = [f"ε spent per {use.plan.unit}{f': {use.labels}' if titled else ''}" for use in uses]
    titles += [
        f"ε per {use.plan.other_unit}{f': {use.labels}' if titled else ''}" for use in others
    ]
    titles += ["Most records per owner"] if several else []
    steps = dict.fromkeys(
        f"{whole(use.steps_spent)} of {whole(use.plan.steps)} steps" for use in uses
    )
    caption = (
        f"The budget and what has been spent of it after {' and '.join(steps)}; the largest spent "
        "share of any budget is in parentheses"
    )
    if any(use.plan.other_unit == "owner" for use in others):
        caption += ". ε per owner holds for all records of an owner together"
    return Table(caption, ["Budget", *titles, "Owners", "Records", "δ"], rows)


def _spent(row: BudgetFacts) -> str:
    return f"{span_up(row.spent.low, row.spent.high)} ({percent_up(row.spent.share)})"


def _meaning(comparison: Comparison) -> list[Block]:
    """Return a plain-language explanation of each epsilon."""
    distinct: dict[tuple, list[BudgetFacts]] = {}
    for use in comparison.facts.plans:
        key = tuple((row.budget.name, row.budget.delta) for row in use.budgets)
        distinct.setdefault(key, use.budgets)
    parts: list[Block] = [Text(ATTACKER[comparison.facts.unit_noun])]
    parts += [_attacker_table(budgets) for budgets in distinct.values()]
    if max(row.attacker_bound for rows in distinct.values() for row in rows) > _WEAK_PROMISE:
        parts.append(
            Text(
                "A bound close to 100 rules out little on its own. It still limits every attack, "
                "and known attacks usually do much worse than the bound; but only a stricter "
                "budget makes the guarantee itself stronger.",
                "note",
            )
        )
    bound = "The bound is 100 (exp ε + δ) / (1 + exp ε)."
    adjacency = ADJACENCY[comparison.facts.unit_noun]
    return [*parts, Text(f"{comparison.facts.unit} {adjacency} {bound}")]


def _attacker_table(budgets: list[BudgetFacts]) -> Table:
    rows = [
        [
            row.budget.name,
            Cell(attacker_words(row.attacker_bound), whole=True),
            Cell(bar=2 * (row.attacker_bound - 50)),
            whole(row.budget.owners),
        ]
        for row in budgets
    ]
    headings = ["Budget", "Right at most", "From 50 (coin toss) to 100 (certainty)", "Owners"]
    return Table("The best any attacker can do", headings, rows, words=3)


def _limits(comparison: Comparison) -> list[Block]:
    """Return the assumptions, the releases and anything not covered by a guarantee."""
    limits = Limits.of(comparison.runs)
    return [
        Columns(
            [
                {"Assumed public": limits.assumed_public},
                {
                    "Released": limits.released,
                    "Source of randomness": limits.randomness,
                    "Choice of settings": tuning_lines(comparison.runs),
                },
            ]
        ),
        Heading("Not covered, not private"),
        Bullets(limits.not_covered),
    ]


def _of_classes(why_missing: Callable[[Comparison], str]) -> Callable[[Comparison], str]:
    """Return why a section about classes is missing."""
    numbers = "is about classes, but the runs predict numbers."
    return lambda comparison: numbers if comparison.regression else why_missing(comparison)


SECTIONS = (
    Section("overview", "At a glance", "At a glance", overview),
    PREDICTIONS,
    Section(
        "learning",
        "Groups",
        "Learning curves by group",
        _learning,
        lambda comparison: "needs validation groups and at least two evaluations.",
    ),
    Section(
        "gain",
        "Gain",
        "Gain by budget",
        _drawn(
            figures.gain_against_budget,
            "If a method helps the owners held back by strict budgets, the points on the left are "
            "above zero.",
        ),
        _of_classes(
            lambda comparison: (
                "needs at least two groups with known budgets."
                if comparison.others
                else _SAME_LABEL
            )
        ),
    ),
    Section(
        "worst",
        "Worst group",
        "Worst group and overall accuracy",
        _drawn(
            figures.worst_and_overall,
            "A high average can hide a group on which the model performs poorly.",
        ),
        _of_classes(lambda comparison: "needs validation data and at least two evaluations."),
    ),
    Section(
        "trade-off",
        "Trade-off",
        "Overall accuracy against balance",
        _drawn(
            figures.trade_off,
            "Equal recall is of little use if it is low for every group, as is high accuracy if "
            "some groups are left behind.",
        ),
        _of_classes(
            lambda comparison: (
                "needs the accuracy and spread of several methods."
                if comparison.others
                else _SAME_LABEL
            )
        ),
    ),
    Section("budgets", "Budgets", "Privacy budgets and spending", _budgets),
    Section("meaning", "What ε means", "What ε means for a person", _meaning),
    Section("audit", "Audit", "Attacks on training", audit_section),
    Section("plan", "Plan", "The plan", plan_section),
    Section("limits", "Limits", "Assumptions and limits", _limits),
    Section("provenance", "How made", "How this was made", provenance),
)
"""The library's own sections; `MECHANISM_SECTIONS` adds those of mechanisms."""
