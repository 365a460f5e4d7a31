"""The section about audits: what attacks on canaries found, beside what any attack can reach."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.audit import Audit, GroupAudit, load_audits
from ownerwise.audit.results import interval
from ownerwise.report import plots
from ownerwise.report.blocks import Block, Bullets, Cell, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.report.plots import Figure, Panel, View
from ownerwise.runs import Run
from ownerwise.wording import down, up

INTRODUCTION = {
    "canaries": "Made-up records (canaries) trained through the same sampler, step and optimizer, "
    "under the same plan. A coin decided which of them took part, and an attacker guessed the "
    "coins.",
    "records": "An attacker with models that were trained in the same way, under the same plan, "
    "guessed which records took part in the training of other such models.",
}
AUDIT_LIMITS = (
    "An attack that fails proves nothing: a better one may succeed, up to the cap that follows "
    "from the plan. The audit trained models of its own, which were discarded, with the software "
    "and the settings of the run; it did not examine the run's own model."
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
    kinds = {audit.of for _, audit in found}
    blocks: list[Block] = [Text(text) for of, text in INTRODUCTION.items() if of in kinds]
    blocks.append(_figure(found))
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
        f"{label}: AUC {group.auc.value:.3f}, cap {up(group.cap, 3)}" for label, group in attacks
    )


def _table(label: str, audit: Audit) -> Table:
    methods, rates = list(audit.groups[0].bounds), list(audit.groups[0].rates)
    estimated = any(group.estimate is not None for group in audit.groups)
    rows: list[list[str | Cell]] = [
        [
            group.name,
            up(group.promised),
            *(down(group.bounds[method], 3) for method in methods),
            *(["–" if group.estimate is None else interval(group.estimate)] if estimated else []),
            interval(group.auc),
            up(group.cap, 3),
            *(
                f"{interval(group.rates[rate])}; at most {up(group.rate_caps[rate], 3)}"
                if rate in group.rates
                else "–"
                for rate in rates
            ),
        ]
        for group in audit.groups
    ]
    headings = [
        "Group", "ε promised", *(f"ε at least, {method}" for method in methods),
        *(["ε estimated (not a bound)"] if estimated else []), "AUC", "Cap",
        *(rate[0].upper() + rate[1:] for rate in rates),
    ]  # fmt: skip
    caption = (
        f"{label}{audit.title}: the bounds of a column, and the intervals of a column, hold "
        f"together with probability {1 - audit.failure:g}"
    )
    return Table(caption, headings, rows)
