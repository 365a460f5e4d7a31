"""The privacy card: what a model promises to whom, on one page that travels with it.

Markdown with a YAML head, as model hubs read it. Everything that decides the guarantee stands on
it, and so does a snippet with which anybody can recompute an epsilon by another accountant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ownerwise.accounting import (
    gaussian_mu,
)
from ownerwise.files import write_text
from ownerwise.planning import BudgetClass
from ownerwise.report.budget_classes import (
    attacker_bound,
    attacker_words,
    classes_of,
    spent,
)
from ownerwise.report.markdown import table
from ownerwise.report.statements import (
    ADJACENCY,
    NOT_PRIVATE,
    assumed_public,
    budget_words,
    large_delta,
    not_covered,
    random_source,
    released,
    unit,
    why_not_private,
)
from ownerwise.report.study import METRICS, Study
from ownerwise.runs import (
    Run,
)
from ownerwise.wording import delta, span, span_up, up, whole

_OVERSTATEMENT = 2e-3
_METRIC_NAMES = {
    "accuracy": ("accuracy", "Accuracy"),
    "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
    "worst": ("recall", "Recall of the worst group"),
    "strictest": ("recall", "Recall of the strictest owner"),
    "spread": ("standard_deviation", "Standard deviation of recall over groups"),
}


def write_card(run: Run, path: str | PathLike) -> None:
    """Write the privacy card of a run to `path`, whole or not at all."""
    write_text(path, card_text(run))


def card_text(run: Run) -> str:
    """Return the privacy card of a run as Markdown with a YAML head."""
    classes = classes_of(run.plan)
    parts = [
        f"---\n{_head(run)}---",
        f"# Privacy card: {_plain(run.name)}",
        _status(run),
        "## Budgets",
        _budgets(run, classes),
        f"{unit(run)} {ADJACENCY}",
        "## Mechanism",
        _mechanism(run),
        "## Accounting",
        _accounting(run),
        "## Check it yourself",
        _check(run, classes[0]),
        "## Released",
        _bullets(released(run)),
        "## Assumed public",
        _bullets(assumed_public(run)),
        "## Not covered, not private",
        _bullets(not_covered([run])),
        "## Figures (not private)",
        _figures(run),
        "## Provenance",
        _provenance(run),
    ]
    return "\n\n".join(parts) + "\n"


def _head(run: Run) -> str:
    """Return the YAML head; JSON strings are YAML strings. An unknown license is left out."""
    tags = ["differential-privacy", "individualized-differential-privacy", "pytorch"]
    if not run.private:
        tags.append("not-private")
    lines = ["library_name: ownerwise", "tags:", *(f"- {tag}" for tag in tags)]
    metrics = _measured(run)
    if metrics:
        source, values = metrics
        data = _data_name(run)
        slug = re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "unnamed"
        lines += [
            "model-index:",
            f"- name: {_quoted(run.name)}",
            "  results:",
            "  - task:",
            "      type: other",
            "    dataset:",
            f"      name: {_quoted(data)}",
            f"      type: {_quoted(slug)}",
            f"      split: {source}",
            "    metrics:",
        ]
        for kind, name, value in values:
            lines += [
                f"    - type: {kind}",
                f"      value: {value:.4f}",
                f"      name: {_quoted(f'{name} ({source}, not private)')}",
            ]
    return "\n".join(lines) + "\n"


def _measured(run: Run) -> tuple[str, list[tuple[str, str, float]]] | None:
    """Return the data set's part and (type, name, value) of every figure at the end."""
    study = Study.of([run])
    if study.source is None:
        return None
    values = [
        (*_METRIC_NAMES[metric.key], value)
        for metric in METRICS
        if (value := study.value(run, metric)) is not None
    ]
    return (study.source, values) if values else None


def _data_name(run: Run) -> str:
    data = run.config.get("data")
    if isinstance(data, dict):
        data = data.get("name")
    return str(data) if data else "not named"


def _status(run: Run) -> str:
    if run.private:
        caution = large_delta(run)
        return (
            f"**Private.** Each single record is protected with the budget that its owner set: "
            f"{budget_words(run)}." + (f"\n\n**{caution}**" if caution else "")
        )
    return (
        f"> # {NOT_PRIVATE}\n>\n> This run carries no guarantee: {why_not_private([run])}. Do not "
        "release the model as private. What follows is what the same run with secret randomness "
        "would promise."
    )


def _budgets(run: Run, classes: Sequence[BudgetClass]) -> str:
    rows = []
    for one, found in zip(classes, spent(run.plan, classes, run.steps_spent), strict=True):
        deltas = {delta(value) for value in one.delta}
        rows.append(
            [
                span(*one.epsilon, 4),
                span_up(found.low, found.high),
                " to ".join(sorted(deltas)),
                whole(one.owners),
                whole(one.records),
                attacker_words(attacker_bound(one.epsilon[1], one.delta[1])),
            ]
        )
    table = _text_table(["ε promised", "ε spent", "δ", "owners", "records", "attacker right"], rows)
    return (
        f"{table}\n\n“Attacker right”: whoever knows everything but whether a record was used, and "
        "would guess it right 50 times in 100, is right at most about so often with the model."
    )


def _mechanism(run: Run) -> str:
    plan = run.plan
    clips = span(float(plan.clip_norms.min()), float(plan.clip_norms.max()), 4)
    rates = span(float(plan.sampling_rates.min()), float(plan.sampling_rates.max()), 4)
    factors = [factor for _, factor in plan.schedule.segments]
    noise = f"Gaussian, std {plan.noise_std:.6g} on the sum of clipped gradients, once per step"
    if len(factors) > 1:
        noise += f", times {factors[0]:g} to {factors[-1]:g} by schedule"
    mixture = "" if plan.mixture is None else f", mixture {plan.mixture:g}"
    rows = [
        ["Plan", f"{plan.method}{mixture}"],
        ["Sampling", f"Poisson: each record on its own, with its owner's rate ({rates})"],
        ["Clipping", f"rule {_options(run.config.get('clipping'))}, norm {clips}"],
        ["Noise", noise],
        ["Divisor", f"{plan.expected_batch_size:.6g}, the expected batch, fixed beforehand"],
        ["Importance weights", _options(run.config.get("weights"))],
        ["Steps planned", whole(plan.steps)],
        ["Steps spent", f"{whole(run.steps_spent)} (updates of the model: {whole(run.updates)})"],
    ]
    return _text_table(["", ""], rows)


def _options(plug: Mapping[str, Any] | None) -> str:
    """Return a clipping rule or weights in words: "INO (tail 0.4, alpha 1.0)"."""
    if not plug:
        return "none"
    given = [f"{name} {value}" for name, value in plug.items() if name != "kind"]
    options = f" ({', '.join(given)})" if given else ""
    return _plain(f"{plug.get('kind', 'custom')}{options}")


def _accounting(run: Run) -> str:
    plan = run.plan
    names = {
        "pld": "privacy loss distributions (pld)",
        "rdp": "Rényi divergences (rdp)",
    }
    version = run.environment.get("ownerwise")
    made_by = f"ownerwise {version}" if version else "ownerwise"
    rows = [
        ["Accountant", f"{names[plan.accountant]} of {_plain(made_by)}"],
        ["Verified by", _plain(plan.verify())],
        ["Randomness", random_source(run)],
    ]
    return _text_table(["", ""], rows)


def _check(run: Run, strictest: BudgetClass) -> str:
    """Return a snippet that recomputes the epsilon of the strictest owner."""
    if run.steps_spent == 0:
        return "No step was taken: every ε is 0."
    owner = int(strictest.members[0])
    plan = run.plan
    if plan.release_noise == "laplace":
        return (
            "dp-accounting has no event for a Gaussian and a Laplace release of one Poisson batch. "
            "`ownerwise.Plan.load(path).verify()` makes its privacy loss distribution from the "
            "curve of deltas and lets dp-accounting compose it."
        )
    multiplier = float(plan.accounted_multipliers[owner])
    segments = [
        (count, float(multiplier * factor))
        for count, factor in plan.schedule.first(run.steps_spent).segments
    ]
    rate, its_delta = float(plan.sampling_rates[owner]), float(plan.deltas[owner])
    result = float(plan.epsilon_of([owner], run.steps_spent)[0])
    if plan.accountant == "rdp":
        imports = "from dp_accounting.rdp import RdpAccountant"
        orders = "[1 + 1.01**n for n in range(-100, 700)]"
        accountant = f"RdpAccountant({orders})"
    else:
        # A grid of width w overstates epsilon by about steps * order * w^2 / 12, the order being
        # where a Gaussian of the same budget decides delta.
        order = 1.5 + result / gaussian_mu(result, its_delta) ** 2
        width = np.sqrt(12 * _OVERSTATEMENT * result / (run.steps_spent * order))
        imports = "from dp_accounting.pld import PLDAccountant"
        accountant = f"PLDAccountant(value_discretization_interval={min(width, 1e-4):.0e})"
    code = f"""\
import dp_accounting as dp
{imports}

accountant = {accountant}
for steps, noise_multiplier in {segments!r}:
    step = dp.PoissonSampledDpEvent({rate!r}, dp.GaussianDpEvent(noise_multiplier))
    accountant.compose(step, steps)
print(accountant.get_epsilon({its_delta!r}))  # this card says {up(result)}"""
    return (
        "The strictest owner's ε, by dp-accounting (`pip install dp-accounting`), from sampling "
        f"rate, noise multiplier and steps alone:\n\n```python\n{code}\n```"
    )


def _figures(run: Run) -> str:
    measured = _measured(run)
    if measured is None:
        return "No validation data were given: how well the model works is not known."
    source, values = measured
    rows = [[name, f"{value:.4f}"] for _, name, value in values]
    return (
        f"Measured without noise on {source} records, which NO guarantee covers.\n\n"
        + _text_table(["figure", "value"], rows)
    )


def _provenance(run: Run) -> str:
    rows = [["Method", _plain(run.label)]]
    for name in ("model", "data", "loss", "optimizer", "schedule", "averaging"):
        if value := run.config.get(name):
            text = json.dumps(value) if isinstance(value, dict | list) else value
            rows.append([name.capitalize(), _plain(text)])
    rows.append(["Plan hash", f"`{run.plan.hash}`"])
    rows.append(["Hash of owners and declared counts", f"`{run.plan.owners_fingerprint}`"])
    rows += [[_plain(name), _plain(value)] for name, value in run.environment.items()]
    return _text_table(["", ""], rows)


def _text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(headings, rows, texts=len(headings))


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _plain(value: Any) -> str:
    """Return text that Markdown shows as it is, on one line."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#>])", r"\\\1", text)


def _quoted(value: str) -> str:
    """Return a YAML string on one line; characters that YAML forbids become spaces."""
    kept = "".join(letter if letter.isprintable() else " " for letter in value)
    return json.dumps(kept, ensure_ascii=False)
