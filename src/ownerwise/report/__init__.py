"""The HTML report: one file about one run or several, for engineers and for those who must trust.

It opens from disk without a network, embeds plotly once, and is the same bytes for the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from ownerwise.files import write_text
from ownerwise.report import budget_figures, constraint_section, figures, markup, overview, sections
from ownerwise.report.card import write_card
from ownerwise.report.page import page, plotly
from ownerwise.report.plots import Figure
from ownerwise.report.study import Study
from ownerwise.runs import (
    Run,
)

__all__ = ["page", "plotly", "write_card", "write_report"]


def write_report(runs: Sequence[Run], path: str | PathLike, *, title: str | None = None) -> None:
    """Write one self-contained HTML file about `runs`.

    Runs with the same label are seeds of one method: means and standard deviations are shown. The
    methods are compared with a baseline: IDP-SGD if there are importance weights, else DP-SGD,
    else the method of the first run.

    Args:
        runs: from `Trainer.fit` or `Run.load`.
        path: where the report goes; written whole or not at all.
        title: heading of the page, made from the methods if not given.
    """
    study = Study.of(runs)
    text = _document(study, overview.default_title(study) if title is None else title)
    write_text(path, text)


def _document(study: Study, title: str) -> str:
    drawn: list[Figure] = []
    content = [overview.overview(study)]
    navigation = [("overview", "At a glance")]
    missing = []

    def add(identity: str, name: str, heading: str, intro: str, *parts: str | Figure) -> None:
        navigation.append((identity, name))
        drawn.extend(part for part in parts if isinstance(part, Figure))
        shown = [markup.figure(part) if isinstance(part, Figure) else part for part in parts]
        content.append(markup.section(identity, heading, markup.paragraph(intro), *shown))

    for identity, name, heading, intro, figure, reason in _utility(study):
        if figure is None:
            missing.append(f"{heading}: {reason}")
        elif identity == "learning":
            add(identity, name, heading, intro, figure, sections.group_table(study))
        else:
            add(identity, name, heading, intro, figure)
    multipliers = constraint_section.figure(study)
    if multipliers is not None:
        cautions = [markup.paragraph(words, "note") for words in constraint_section.warnings(study)]
        table = constraint_section.table(study)
        intro = constraint_section.INTRODUCTION
        add("constraints", "Constraints", "Constraints", intro, *cautions, table, multipliers)
    spending = budget_figures.spending(study)
    tables = sections.budget_tables(study)
    add("budgets", "Budgets", "Budgets, and what was spent", _BUDGETS, spending, *tables)
    content.append(sections.meaning(study))
    navigation.append(("meaning", "What ε means"))
    importance = budget_figures.importance(study)
    if importance is not None:
        add("importance", "Weights", "How importance falls within a batch", _IMPORTANCE, importance)
    else:
        missing.append(f"How importance falls within a batch: {_no_weights(study)}")
    for section, identity, name in (
        (sections.plan_section, "plan", "Plan"),
        (sections.fine_print, "limits", "Limits"),
        (sections.made, "made", "How made"),
    ):
        content.append(section(study))
        navigation.append((identity, name))
    if missing:
        content.append(markup.section("missing", "Not shown, and why", markup.bullets(missing)))
    return page(title, navigation, "\n".join(content), drawn)


_BUDGETS = (
    "Every owner set an own ε. The plan spends it step by step; training stops before a step that "
    "would exceed it."
)
_IMPORTANCE = (
    "INO puts the records of a batch in order and lets the least important ones count less, so "
    "that records of strict owners, which are drawn rarely and learned late, are not drowned."
)


def _no_weights(study: Study) -> str:
    if any(method.weights for method in study.methods):
        return "the weights that were used have no stored tail function to draw."
    return "no importance weights were used."


def _utility(study: Study) -> list[tuple[str, str, str, str, Figure | None, str]]:
    """Return (id, short name, heading, introduction, figure, reason if there is none)."""
    single = "needs at least two methods; these runs have one label."
    groups = "needs validation groups and at least two evaluations."
    return [
        (
            "learning",
            "Groups",
            "How each group learned",
            "Strict budgets are drawn rarely or clipped hard, and the model may learn their "
            "records late, or get worse on them at first. One panel per group shows it.",
            figures.learning_curves(study),
            groups,
        ),
        (
            "gain",
            "Gain",
            "Who gained, by budget",
            "If a method helps those whom strict budgets held back, points on the left lie high.",
            figures.gain_against_budget(study),
            single if not study.others else "needs at least two groups whose budget is known.",
        ),
        (
            "worst",
            "Worst group",
            "The worst-served group, and everybody",
            "A good average can hide a group that the model fails.",
            figures.worst_and_overall(study),
            "needs validation data and at least two evaluations.",
        ),
        (
            "trade-off",
            "Trade-off",
            "Overall accuracy against balance",
            "Balance is worth little if everybody is served badly, and accuracy if some are.",
            figures.trade_off(study),
            single if not study.others else "needs the accuracy and the spread of several methods.",
        ),
    ]
