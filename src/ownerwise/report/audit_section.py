"""The section about audits: what attacks on canaries found, beside what any attack can reach."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.audit import Audit, GroupAudit, load_audits
from ownerwise.report import plots
from ownerwise.report.blocks import Block, Bullets, Cell, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.report.plots import Figure, Panel, View
from ownerwise.runs import Run

INTRODUCTION = (
    "Made-up records (canaries) trained through the same sampler, step and optimizer, under the "
    "same plan. A coin decided which of them took part, and an attacker guessed the coins."
)
AUDIT_LIMITS = (
    "An attack that fails proves nothing: a better one may succeed, up to the cap that follows "
    "from the plan. The audit trained a model of its own, which was discarded; canaries are not "
    "people, and their results say nothing about any person."
)


def audits_of(run: Run) -> list[Audit]:
    """Return the audits of a run's plan that are stored in its folder."""
    if run.folder is None:
        return []
    return [audit for audit in load_audits(run.folder) if audit.plan == run.plan.hash]


def audit_section(comparison: Comparison) -> Sequence[Block] | None:
    """Return the section; None if no run was audited."""
    found = [
        (f"{method.label}, " if len(comparison.methods) > 1 else "", audit)
        for method in comparison.methods
        for audit in audits_of(method.runs[0])
    ]
    if not found:
        return None
    blocks: list[Block] = [Text(INTRODUCTION), _figure(found)]
    for label, audit in found:
        blocks += [Text(f"{label}{audit.title}:"), Bullets(audit.findings()), _table(label, audit)]
    return [*blocks, Text(AUDIT_LIMITS, "note")]


def _figure(found: list[tuple[str, Audit]]) -> Figure:
    """Return one chart per group, with every attack beside its cap."""
    names = dict.fromkeys(group.name for _, audit in found for group in audit.groups)
    panels = []
    for name in names:
        attacks = [
            (f"{label}{audit.attack}", group)
            for label, audit in found
            for group in audit.groups
            if group.name == name
        ]
        panels.append(Panel(name, _words(attacks), {"AUC": _view(attacks)}))
    legend = [plots.legend_entry(0, "attack"), plots.legend_entry(1, "cap on any attack")]
    caption = (
        "Area under the curve (AUC) of each attack with its confidence interval, and the largest "
        "area that any attack can reach. Guessing has 0.5"
    )
    return Figure("audit", panels, caption, legend, height=260, small=True)


def _view(attacks: list[tuple[str, GroupAudit]]) -> View:
    labels = [label for label, _ in attacks]
    places = [float(at) for at in range(len(attacks))]
    groups = [group for _, group in attacks]
    reached = plots.points(
        places, [group.auc.value for group in groups], 0, "attack", names=labels,
        hover="%{text}: AUC %{y:.3f}",
        y_error=[(group.auc.high - group.auc.low) / 2 for group in groups],
    )  # fmt: skip
    caps = plots.points(
        places, [group.cap for group in groups], 1, "cap on any attack", names=labels,
        hover="%{text}: at most %{y:.3f}",
    )  # fmt: skip
    ticks = {"tickvals": places, "ticktext": [plots.text(label) for label in labels]}
    ticks["range"] = [-0.5, len(attacks) - 0.5]
    return View([reached, caps], plots.axes("", "AUC", xaxis=ticks, yaxis={"range": [0.25, 1.02]}))


def _words(attacks: list[tuple[str, GroupAudit]]) -> str:
    return "; ".join(
        f"{label}: AUC {group.auc.value:.3f}, cap {group.cap:.3f}" for label, group in attacks
    )


def _table(label: str, audit: Audit) -> Table:
    methods = list(audit.groups[0].bounds)
    rows: list[list[str | Cell]] = [
        [
            group.name,
            f"{group.promised:.4g}",
            *(f"{group.bounds[method]:.3g}" for method in methods),
            "–" if group.estimate is None else f"{group.estimate.value:.3g}",
            f"{group.auc.value:.3f} ({group.auc.low:.3f} to {group.auc.high:.3f})",
            f"{group.cap:.3f}",
        ]
        for group in audit.groups
    ]
    headings = [
        "Group", "ε promised", *(f"ε at least, {method}" for method in methods),
        "ε estimated (not a bound)", "AUC", "Cap",
    ]  # fmt: skip
    caption = (
        f"{label}{audit.title}: all lower bounds and intervals hold together with probability "
        f"{1 - audit.failure:g}"
    )
    return Table(caption, headings, rows)
