"""Write the HTML report: one self-contained file about one or more runs.

The file opens from disk without a network connection and embeds plotly once. The same runs always
produce the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from ownerwise.files import write_text
from ownerwise.report import budget_figures, constraint_section, figures, markup, overview, sections
from ownerwise.report.comparison import Comparison
from ownerwise.report.page import page
from ownerwise.report.plots import Figure
from ownerwise.runs import Run


def write_report(runs: Sequence[Run], path: str | PathLike, *, title: str | None = None) -> None:
    """Write one self-contained HTML file about `runs`.

    Runs with the same label count as seeds of one method; the report shows their mean and standard
    deviation. Methods are compared with a baseline: IDP-SGD if any run uses importance weights,
    else DP-SGD, else the method of the first run.

    Args:
        runs: from `Trainer.fit` or `Run.load`.
        path: the file to write; it is written atomically.
        title: heading of the page; by default it names the methods.
    """
    comparison = Comparison.of(runs)
    heading = overview.default_title(comparison) if title is None else title
    write_text(path, _document(comparison, heading))


def _document(comparison: Comparison, title: str) -> str:
    drawn: list[Figure] = []
    content = [overview.overview(comparison)]
    navigation = [("overview", "At a glance")]
    omitted = []

    def add(identity: str, link: str, heading: str, intro: str, *parts: str | Figure) -> None:
        navigation.append((identity, link))
        drawn.extend(part for part in parts if isinstance(part, Figure))
        pieces = [markup.figure(part) if isinstance(part, Figure) else part for part in parts]
        content.append(markup.section(identity, heading, markup.paragraph(intro), *pieces))

    for identity, link, heading, intro, figure, reason in _utility(comparison):
        if figure is None:
            omitted.append(f"{heading}: {reason}")
        elif identity == "learning":
            add(identity, link, heading, intro, figure, sections.group_table(comparison))
        else:
            add(identity, link, heading, intro, figure)
    multipliers = constraint_section.figure(comparison)
    if multipliers is not None:
        warnings = [markup.paragraph(w, "note") for w in constraint_section.warnings(comparison)]
        table = constraint_section.table(comparison)
        intro = constraint_section.INTRODUCTION
        add("constraints", "Constraints", "Constraints", intro, *warnings, table, multipliers)
    spending = budget_figures.spending(comparison)
    tables = sections.budget_tables(comparison)
    add("budgets", "Budgets", "Privacy budgets and spending", _BUDGETS, spending, *tables)
    content.append(sections.meaning(comparison))
    navigation.append(("meaning", "What ε means"))
    importance = budget_figures.importance(comparison)
    if importance is not None:
        add("importance", "Weights", _IMPORTANCE_HEADING, _IMPORTANCE, importance)
    else:
        omitted.append(f"{_IMPORTANCE_HEADING}: {_no_weights(comparison)}")
    for section, identity, link in (
        (sections.plan_section, "plan", "Plan"),
        (sections.fine_print, "limits", "Limits"),
        (sections.provenance, "provenance", "Provenance"),
    ):
        content.append(section(comparison))
        navigation.append((identity, link))
    if omitted:
        content.append(markup.section("omitted", "Left out, and why", markup.bullets(omitted)))
    return page(title, navigation, "\n".join(content), drawn)


_BUDGETS = (
    "Each owner set their own ε. The plan spends each ε step by step, and training stops before "
    "any step that would exceed it."
)
_IMPORTANCE_HEADING = "Importance weights within a batch"
_IMPORTANCE = (
    "INO ranks the records in a batch and reduces the weight of the least important ones. Records "
    "of strict owners are sampled rarely and learned late; the ranking prevents the other records "
    "from dominating the update."
)


def _no_weights(comparison: Comparison) -> str:
    if any(method.weights for method in comparison.methods):
        return "the run does not store the tail function of the weights it used."
    return "no importance weights were used."


def _utility(comparison: Comparison) -> list[tuple[str, str, str, str, Figure | None, str]]:
    """Return (id, link, heading, introduction, figure, reason for a missing figure) tuples."""
    single = "needs at least two methods, but all these runs have the same label."
    groups = "needs validation groups and at least two evaluations."
    several = "needs the accuracy and spread of several methods."
    return [
        (
            "learning",
            "Groups",
            "Learning curves by group",
            "Records with strict budgets are sampled rarely or clipped heavily, so the model may "
            "learn them late or even get worse on them at first. Each panel shows one group.",
            figures.learning_curves(comparison),
            groups,
        ),
        (
            "gain",
            "Gain",
            "Gain by budget",
            "If a method helps the owners held back by strict budgets, the points on the left are "
            "above zero.",
            figures.gain_against_budget(comparison),
            single if not comparison.others else "needs at least two groups with known budgets.",
        ),
        (
            "worst",
            "Worst group",
            "Worst group and overall accuracy",
            "A high average can hide a group on which the model performs poorly.",
            figures.worst_and_overall(comparison),
            "needs validation data and at least two evaluations.",
        ),
        (
            "trade-off",
            "Trade-off",
            "Overall accuracy against balance",
            "Equal recall is of little use if it is low for every group, as is high accuracy if "
            "some groups are left behind.",
            figures.trade_off(comparison),
            single if not comparison.others else several,
        ),
    ]
