"""The privacy card: one page to publish with a model, stating its guarantee for each owner.

The card is Markdown with a YAML header, as model hubs expect. It states everything that determines
the guarantee, and includes a snippet that recomputes an epsilon with an independent accountant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from markupsafe import Markup

from ownerwise.accounting import Schedule, gaussian_mu
from ownerwise.files import write_text
from ownerwise.report.audit_section import AUDIT_LIMITS, audits_of
from ownerwise.report.comparison import METRICS, Comparison
from ownerwise.report.facts import (
    ADJACENCY,
    ATTACKER,
    HYPOTHETICAL_EPSILON,
    NO_VALIDATION,
    NOT_PRIVATE,
    Facts,
    data_words,
)
from ownerwise.report.guarantees import attacker_words
from ownerwise.report.limits import Limits
from ownerwise.report.mechanism_sections import notes_of
from ownerwise.report.predictions import quality
from ownerwise.report.regression import ERRORS, final_errors
from ownerwise.report.rendering import render_markdown
from ownerwise.report.tuning_line import tuning_line
from ownerwise.runs import Run
from ownerwise.wording import delta_span, span, span_up, up, whole

_OVERSTATEMENT = 2e-3
_METRIC_NAMES = {
    "accuracy": ("accuracy", "Accuracy"),
    "owner_accuracy": ("accuracy", "Accuracy per owner (mean over owners)"),
    "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
    "worst": ("recall", "Recall of the worst group"),
    "strictest": ("recall", "Recall at the strictest budget"),
    "strict_half": ("recall", "Recall of the stricter half of the budgets"),
    "spread": ("standard_deviation", "Standard deviation of recall over groups"),
}


def write_card(run: Run, path: str | PathLike) -> None:
    """Write a run's privacy card to `path` atomically."""
    write_text(path, card_text(run))


def card_text(run: Run) -> str:
    """Return a run's privacy card as Markdown with a YAML header."""
    comparison = Comparison.of([run])
    facts, limits = comparison.facts, Limits.of([run])
    data = _data_name(run)
    return render_markdown(
        "card.md.jinja",
        ADJACENCY=ADJACENCY,
        ATTACKER=ATTACKER,
        HYPOTHETICAL_EPSILON=HYPOTHETICAL_EPSILON,
        NO_VALIDATION=NO_VALIDATION,
        NOT_PRIVATE=NOT_PRIVATE,
        run=run,
        facts=facts,
        budget_titles=_budget_titles(facts),
        budgets=_budgets(facts),
        mechanism=_mechanism(run, facts),
        limits=limits,
        accounting=_accounting(run, facts, limits),
        tuning=tuning_line(run),
        check=_check(run, int(facts.plans[0].budgets[0].budget.members[0])),
        audits=audits_of(run),
        AUDIT_LIMITS=AUDIT_LIMITS,
        data=data,
        data_slug=re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "unnamed",
        split=comparison.source,
        metrics=[
            (Markup(kind), (name, f"{value:.4f}"))
            for metric in METRICS
            for kind, name in [_METRIC_NAMES[metric.key]]
            if (value := comparison.value(run, metric)) is not None
        ]
        + [
            (Markup(key), (ERRORS[key], f"{value:.5g}"))
            for key, value in final_errors(run, comparison.source).items()
            if comparison.regression
        ],
        quality=quality(comparison),
        provenance=_provenance(run),
    )


def _data_name(run: Run) -> str:
    data = run.config.get("data")
    if isinstance(data, dict):
        return str(data.get("name") or "not named")
    return data_words(run) or "not named"


def _budget_titles(facts: Facts) -> list[str]:
    other = facts.plans[0].plan.other_unit
    return [
        f"ε promised per {facts.unit_noun}",
        f"ε spent per {facts.unit_noun}",
        "δ",
        *([] if other is None else [f"ε per {other}"]),
        "owners",
        "records",
        "most records per owner",
        "attacker right at most",
    ]


def _budgets(facts: Facts) -> list[list[str]]:
    return [
        [
            span(*row.budget.epsilon, 4),
            span_up(row.spent.low, row.spent.high),
            delta_span(*row.budget.delta),
            *([row.other_epsilon] if row.other_epsilon else []),
            whole(row.budget.owners),
            whole(row.budget.records),
            whole(row.budget.most_records),
            attacker_words(row.attacker_bound),
        ]
        for row in facts.plans[0].budgets
    ]


def _mechanism(run: Run, facts: Facts) -> dict[str, str]:
    return {
        **facts.plans[0].mechanism,
        "Clipping rule": _plug(run.config.get("clipping")),
        "Importance weights": _plug(run.config.get("weights")),
        **{name: words for notes in notes_of(run) for name, words in notes.card.items()},
        **_last_clip_norm(run),
        "Steps spent": f"{whole(run.steps_spent)} (model updates: {whole(run.updates)})",
    }


def _last_clip_norm(run: Run) -> dict[str, str]:
    last = next((line["steering"] for line in reversed(run.history) if "steering" in line), None)
    return {} if last is None else {"Clip norm after the last step": f"{last['clip_norm']:.4g}"}


def _plug(plug: Mapping[str, Any] | None) -> str:
    """Return a clipping rule or weights as text: "INO (tail 0.4, alpha 1.0)"."""
    if not plug:
        return "none"
    settings = [f"{name} {value}" for name, value in plug.items() if name != "kind"]
    options = f" ({', '.join(settings)})" if settings else ""
    return f"{plug.get('kind', 'custom')}{options}"


def _accounting(run: Run, facts: Facts, limits: Limits) -> dict[str, str]:
    stated = facts.plans[0].accounting
    version = run.environment.get("ownerwise", "")
    return {
        **stated,
        "Accountant": f"{stated['Accountant']}, ownerwise {version}".rstrip(),
        "Randomness": limits.randomness[0],
    }


def _check(run: Run, owner: int) -> dict[str, Any] | None:
    """Return the numbers from which an independent accountant computes an owner's epsilon.

    Return None if no steps were taken, or if dp-accounting has no event for the plan's releases.
    """
    plan = run.plan
    records = 1 if plan.counted_together is None else max(1, int(plan.records[owner]))
    # dp-accounting composes the mixtures of several records only as privacy loss distributions
    accountant = plan.accountant if records == 1 else "pld"
    if plan.release_noise == "laplace" or not run.steps_spent:
        return None
    if plan.tuning is not None:
        return _check_of_search(run, owner)
    epsilon = float(plan.epsilon_of([owner], run.steps_spent)[0])
    multiplier, delta = float(plan.accounted_multipliers[owner]), float(plan.deltas[owner])
    schedule = plan.schedule.first(run.steps_spent)
    if plan.filter is not None:  # all steps cost at most as much as this one
        schedule = Schedule.constant(1)
        multiplier = float(plan.exposures_after(run.steps_spent)[1][owner])
    closing = None
    if plan.closing is not None and run.steps_spent == plan.steps:
        closing = plan.closing.multiplier(float(plan.closing_sensitivities[owner]))
    return {
        "closing": closing,
        "opening": None if plan.opening is None else plan.opening.multiplier(records),
        "accountant": accountant,
        "options": _options_of(accountant, epsilon, delta, run.steps_spent),
        "segments": [(count, float(multiplier * factor)) for count, factor in schedule.segments],
        "rate": float(plan.sampling_rates[owner]),
        "filter": plan.filter,
        "records": records,
        "delta": delta,
        "epsilon": up(epsilon),
    }


def _check_of_search(run: Run, owner: int) -> dict[str, Any] | None:
    """Return the numbers for a search, with the chosen candidate alone; None for several records.

    With other candidates, the search may cost more than that, never less.
    """
    plan = run.plan
    tuning = plan.tuning
    assert tuning is not None
    if plan.counted_together is not None and plan.records[owner] > 1:
        return None
    multiplier = float(plan.accounted_multipliers[owner])
    others = [plan.run_cost.without_sampling(float(plan.closing_sensitivities[owner]))]
    others += [] if tuning.score_std is None else [tuning.score_std]
    return {
        "accountant": "search",
        "segments": [(n, float(multiplier * factor)) for n, factor in plan.schedule.segments],
        "others": [std for std in others if std < np.inf],
        "rate": float(plan.sampling_rates[owner]),
        "records": 1,
        "mean": tuning.law.mean,
        "shape": Markup('float("inf")') if tuning.law.name == "poisson" else tuning.law.shape,
        "delta": float(tuning.deltas(plan.accounted_deltas[owner])),
        "several": len(tuning.rivals) > 1,
        "epsilon": up(float(plan.epsilon_of([owner], plan.steps)[0])),
    }


def _options_of(accountant: str, epsilon: float, delta: float, steps: int) -> Markup:
    """Return the options for dp-accounting's accountant, as code."""
    if accountant == "rdp":
        return Markup("[1 + 1.01**n for n in range(-100, 700)]")
    # A grid of width w overstates epsilon by about steps * order * w^2 / 12, where the order is
    # the one that determines delta for a Gaussian mechanism with the same budget.
    order = 1.5 + epsilon / gaussian_mu(epsilon, delta) ** 2
    width = min(np.sqrt(12 * _OVERSTATEMENT * epsilon / (steps * order)), 1e-4)
    return Markup(f"value_discretization_interval={width:.0e}")


def _provenance(run: Run) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("Method", run.label)]
    for name in ("model", "data", "loss", "optimizer", "schedule", "averaging"):
        if value := run.config.get(name):
            text = json.dumps(value) if isinstance(value, dict | list) else value
            text = data_words(run) if name == "data" and isinstance(value, str) else text
            rows.append((name.capitalize(), text))
    return [
        *rows,
        ("Plan hash", Markup(f"`{run.plan.hash}`")),
        ("Hash of owners and declared counts", Markup(f"`{run.plan.owners_fingerprint}`")),
        *run.environment.items(),
    ]
