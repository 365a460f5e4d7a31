"""The privacy card: one page to publish with a model, stating its guarantee for each owner.

The card is Markdown with a YAML header, as model hubs expect. It states everything that determines
the guarantee, and includes a snippet that recomputes an epsilon with an independent accountant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ownerwise.accounting import gaussian_mu
from ownerwise.files import write_text
from ownerwise.planning import BudgetClass
from ownerwise.report.comparison import METRICS, Comparison
from ownerwise.report.guarantees import attacker_words, class_attacker_bound, classes_of, spent
from ownerwise.report.markdown import bullets, escape, table
from ownerwise.report.statements import (
    ADJACENCY,
    ATTACKER,
    HYPOTHETICAL_EPSILON,
    NO_VALIDATION,
    NOT_PRIVATE,
    accounting,
    assumed_public,
    large_delta,
    mechanism,
    no_guarantee,
    not_covered,
    protected,
    random_source,
    released,
    unit,
)
from ownerwise.runs import Run
from ownerwise.wording import delta_span, span, span_up, up, whole

_OVERSTATEMENT = 2e-3
_METRIC_NAMES = {
    "accuracy": ("accuracy", "Accuracy"),
    "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
    "worst": ("recall", "Recall of the worst group"),
    "strictest": ("recall", "Recall of the strictest owner"),
    "spread": ("standard_deviation", "Standard deviation of recall over groups"),
}


def write_card(run: Run, path: str | PathLike) -> None:
    """Write a run's privacy card to `path` atomically."""
    write_text(path, card_text(run))


def card_text(run: Run) -> str:
    """Return a run's privacy card as Markdown with a YAML header."""
    classes = classes_of(run.plan)
    parts = [
        f"---\n{_header(run)}---",
        f"# Privacy card: {escape(run.name)}",
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
        bullets(released(run)),
        "## Assumed public",
        bullets(assumed_public(run)),
        "## Not covered, not private",
        bullets(not_covered([run])),
        "## Metrics (not private)",
        _metrics(run),
        "## Provenance",
        _provenance(run),
    ]
    return "\n\n".join(parts) + "\n"


def _header(run: Run) -> str:
    """Return the YAML header, without a license. JSON strings are valid YAML strings."""
    tags = ["differential-privacy", "individualized-differential-privacy", "pytorch"]
    if not run.private:
        tags.append("not-private")
    lines = ["library_name: ownerwise", "tags:", *(f"- {tag}" for tag in tags)]
    measured = _measured(run)
    if measured:
        source, values = measured
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
    """Return the data split and a (type, name, value) tuple per final metric; None without data."""
    comparison = Comparison.of([run])
    if comparison.source is None:
        return None
    values = [
        (*_METRIC_NAMES[metric.key], value)
        for metric in METRICS
        if (value := comparison.value(run, metric)) is not None
    ]
    return (comparison.source, values) if values else None


def _data_name(run: Run) -> str:
    data = run.config.get("data")
    if isinstance(data, dict):
        data = data.get("name")
    return str(data) if data else "not named"


def _status(run: Run) -> str:
    if not run.private:
        return f"> # {NOT_PRIVATE}\n>\n> {escape(no_guarantee([run]))} {HYPOTHETICAL_EPSILON}"
    caution = large_delta(run)
    return f"**Private.** {protected([run])}" + (f"\n\n**{caution}**" if caution else "")


def _budgets(run: Run, classes: Sequence[BudgetClass]) -> str:
    rows = [
        [
            span(*budget_class.epsilon, 4),
            span_up(spending.low, spending.high),
            delta_span(*budget_class.delta),
            whole(budget_class.owners),
            whole(budget_class.records),
            attacker_words(class_attacker_bound(budget_class)),
        ]
        for budget_class, spending in zip(
            classes, spent(run.plan, classes, run.steps_spent), strict=True
        )
    ]
    headings = ["ε promised", "ε spent", "δ", "owners", "records", "attacker right at most"]
    return f"{_text_table(headings, rows)}\n\n{ATTACKER}"


def _mechanism(run: Run) -> str:
    rows = {
        **mechanism(run.plan),
        "Clipping rule": _options(run.config.get("clipping")),
        "Importance weights": _options(run.config.get("weights")),
        "Steps spent": f"{whole(run.steps_spent)} (model updates: {whole(run.updates)})",
    }
    return _text_table(["", ""], rows.items())


def _options(plug: Mapping[str, Any] | None) -> str:
    """Return a clipping rule or weights as text: "INO (tail 0.4, alpha 1.0)"."""
    if not plug:
        return "none"
    settings = [f"{name} {value}" for name, value in plug.items() if name != "kind"]
    options = f" ({', '.join(settings)})" if settings else ""
    return escape(f"{plug.get('kind', 'custom')}{options}")


def _accounting(run: Run) -> str:
    facts = accounting(run.plan)
    version = escape(run.environment.get("ownerwise", ""))
    rows = [
        ["Accountant", f"{facts['Accountant']}, ownerwise {version}".rstrip()],
        ["Verified by", escape(facts["Verified by"])],
        ["Randomness", random_source(run)],
    ]
    return _text_table(["", ""], rows)


def _check(run: Run, strictest: BudgetClass) -> str:
    """Return a snippet that recomputes the strictest owner's epsilon."""
    if run.steps_spent == 0:
        return "No steps were taken, so the ε spent is 0 for every owner."
    owner = int(strictest.members[0])
    plan = run.plan
    if plan.release_noise == "laplace":
        return (
            "dp-accounting has no event for a Gaussian and a Laplace release from the same "
            "Poisson-sampled batch. `ownerwise.Plan.load(path).verify()` builds the privacy loss "
            "distribution from the curve of deltas and uses dp-accounting to compose it."
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
        # A grid of width w overstates epsilon by about steps * order * w^2 / 12, where the order is
        # the one that determines delta for a Gaussian mechanism with the same budget.
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
        "This recomputes the strictest owner's ε with dp-accounting (`pip install dp-accounting`) "
        "from the sampling rate, the noise multiplier and the number of steps alone:\n\n"
        f"```python\n{code}\n```"
    )


def _metrics(run: Run) -> str:
    measured = _measured(run)
    if measured is None:
        return NO_VALIDATION
    source, values = measured
    rows = [[name, f"{value:.4f}"] for _, name, value in values]
    return (
        f"Measured without noise on {source} records, which are NOT covered by any guarantee.\n\n"
        + _text_table(["metric", "value"], rows)
    )


def _provenance(run: Run) -> str:
    rows = [["Method", escape(run.label)]]
    for name in ("model", "data", "loss", "optimizer", "schedule", "averaging"):
        if value := run.config.get(name):
            text = json.dumps(value) if isinstance(value, dict | list) else value
            rows.append([name.capitalize(), escape(text)])
    rows.append(["Plan hash", f"`{run.plan.hash}`"])
    rows.append(["Hash of owners and declared counts", f"`{run.plan.owners_fingerprint}`"])
    rows += [[escape(name), escape(value)] for name, value in run.environment.items()]
    return _text_table(["", ""], rows)


def _text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table(headings, rows, texts=len(headings))


def _quoted(value: str) -> str:
    """Return a one-line YAML string, with spaces in place of characters that YAML forbids."""
    kept = "".join(letter if letter.isprintable() else " " for letter in value)
    return json.dumps(kept, ensure_ascii=False)
