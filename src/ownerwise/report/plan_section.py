"""The section on the plans: settings fixed before training, and their verification."""

from __future__ import annotations

from ownerwise.planning import epsilon_words
from ownerwise.report.blocks import Block, Definitions, Details, Heading, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.report.facts import PlanFacts
from ownerwise.report.groups import MOST_NAMED
from ownerwise.wording import delta_span, percent, span, span_up, whole


def plan_section(comparison: Comparison) -> list[Block]:
    """Return the settings that each plan fixes."""
    introduction = (
        "Everything in a plan is fixed before training and assumed to be public. Each private step "
        f"samples each {comparison.facts.unit_noun} at {_whose(comparison)} rate, clips its "
        "gradient to the clip norm and adds noise to the sum."
    )
    plans = comparison.facts.plans
    if all(use.plan.filter is not None for use in plans):
        introduction = (
            "Everything in a plan is fixed before training and assumed to be public. Each private "
            f"step uses each {comparison.facts.unit_noun} that has budget left, clips its gradient "
            "to the clip norm and adds noise to the sum."
        )
    content: list[Block] = [Text(introduction)]
    for use in plans:
        if len(plans) > 1:
            content.append(Heading(f"Plan of {use.labels}"))
        content += _plan(use)
    return content


def _whose(comparison: Comparison) -> str:
    return "the owner's" if comparison.facts.by_owner else "its owner's"


def _plan(use: PlanFacts) -> list[Block]:
    plan = use.plan
    facts = {**use.mechanism, **use.accounting}
    parts: list[Block] = [Definitions(facts), _table(use, owners=False)]
    if use.names_owners and len(plan.targets) <= MOST_NAMED:
        parts.append(Details("By owner", _table(use, owners=True)))
    unspent = int(plan.unspent.sum())
    if unspent:
        reason = "sampling rates cannot exceed 1, and the noise cannot fall below a minimum."
        if plan.filter is not None:
            reason = "its steps are too few, or its filter is not the tight one."
        if plan.method == "uniform":
            reason = "the strictest budget applies to everyone."
        owners = "1 owner" if unspent == 1 else f"{whole(unspent)} owners"
        words = f"{owners} cannot use up their budget under this plan: {reason}"
        parts.append(Text(words, "note"))
    return parts


def _table(use: PlanFacts, *, owners: bool) -> Table:
    headings = ["Budget", "Owner" if owners else "Owners", "Records", "δ",
                "Sampling rate", "Clip norm", "Noise multiplier", "Batch share",
                f"ε per {use.plan.unit} after all steps"]  # fmt: skip
    other = use.plan.other_unit
    headings += [] if other is None else [f"ε per {other} after all steps"]
    rows = [
        [
            f"ε {span(*row.epsilon, 4)} per {row.unit}",
            whole(row.owners) if row.owner is None else row.owner,
            whole(row.records),
            delta_span(*row.delta),
            span(*row.sampling_rate, 4),
            span(*row.clip_norm, 4),
            span(*row.noise_multiplier, 4),
            percent(row.batch_share),
            span_up(*row.epsilon_spent),
            *([] if other is None else [epsilon_words(row.epsilon_per(other))]),
        ]
        for row in use.plan.rows(owners=owners)
    ]
    return Table("By owner" if owners else "By budget class", headings, rows)
