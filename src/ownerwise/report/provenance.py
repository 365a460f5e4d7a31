"""How the runs were made: in words first, then all settings, the environment and the hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.errors import name_some
from ownerwise.report.blocks import Block, Definitions, Details, Table, Text
from ownerwise.report.comparison import Comparison, MethodRuns
from ownerwise.report.facts import data_words
from ownerwise.runs import Run
from ownerwise.runs.settings import flat
from ownerwise.wording import delta_span, duration, span, whole

_SHOWN_ELSEWHERE = ("label", "group_budgets")
_TIME = "training time (not private)"
_OF_ONE_RUN = ("name", _TIME)  # these differ between any two runs, so they are no difference
_WORDS = {"lr": "learning rate", "num workers": "worker processes", "kind": "name"}
"""Readable names of settings, by their stored names."""


def provenance(comparison: Comparison) -> list[Block]:
    """Return how each method trained, the settings that differ, and everything else on request."""
    facts = [_merged([_facts(run) for run in method.runs]) for method in comparison.methods]
    names = list(dict.fromkeys(name for of_method in facts for name in of_method))
    shared = {
        name: facts[0][name]
        for name in names
        if all(of_method.get(name) == facts[0].get(name) for of_method in facts)
    }
    told: dict[str, list[str]] = {}
    for method in comparison.methods:
        told.setdefault(_told(comparison, method), []).append(method.label)
    parts: list[Block] = [
        Text(words if len(told) == 1 else f"{', '.join(labels)}: {words}")
        for words, labels in told.items()
    ]
    differing = [name for name in names if name not in shared and name not in _OF_ONE_RUN]
    if differing:
        rows = [[name, *(of_method.get(name, "–") for of_method in facts)] for name in differing]
        headings = ["Setting", *(method.label for method in comparison.methods)]
        parts.append(Table("What differs", headings, rows, words=len(headings)))
    environment = _merged([_readable(run.environment) for run in comparison.runs])
    hashes = _merged([_hashes(run) for run in comparison.runs])
    return [
        *parts,
        Details("All settings", Definitions(shared)),
        Details("Software", Definitions(environment)),
        Details("Hashes", Definitions(hashes)),
    ]


def _told(comparison: Comparison, method: MethodRuns) -> str:
    """Return in words how a method trained."""
    run, plan = method.runs[0], method.runs[0].plan
    rates = span(float(plan.sampling_rates.min()), float(plan.sampling_rates.max()))
    mechanism = next(use for use in comparison.facts.plans if use.plan.hash == plan.hash).mechanism
    budgets = span(float(plan.targets.min()), float(plan.targets.max()))
    deltas = delta_span(float(plan.deltas.min()), float(plan.deltas.max()))
    unit, what = plan.unit, "owners" if plan.sampling == "owner" else "records"
    average = f"about {plan.expected_batch_size:.3g} {what} on average"
    whose = "their" if plan.sampling == "owner" else "its owner’s"
    steps = {each.steps_spent for each in method.runs}
    taken = whole(plan.steps)
    if steps != {plan.steps}:
        taken = f"{span(min(steps), max(steps), 6)} of {taken} planned"
    rate = run.config.get("optimizer") or {}
    learning = (
        f" at learning rate {rate['lr']:g}" if isinstance(rate.get("lr"), int | float) else ""
    )
    if len({str((each.config.get("optimizer") or {}).get("lr")) for each in method.runs}) > 1:
        learning = " (the learning rate differs between runs)"
    optimizer = f"the optimizer ({rate['name']})" if rate.get("name") else "the optimizer"
    randomness = "secret randomness" if run.seed is None else "fixed seeds, so they are NOT PRIVATE"
    return (
        f"{whole(len(plan.targets))} {'owner' if len(plan.targets) == 1 else 'owners'} with "
        f"{whole(plan.total_records)} declared records set budgets of ε {budgets} per {unit} "
        f"(δ {deltas}). Training took {taken} steps. Each step draws every {what[:-1]} at random "
        f"at {whose} rate ({rates}), {average}; clips each gradient (clip norm "
        f"{mechanism['Clip norm']}); adds noise to their sum ({mechanism['Noise']}); and divides "
        f"by {plan.expected_batch_size:.4g}, whatever the size of the batch. Then {optimizer} "
        f"updates the model{learning}. Batches and noise come from {randomness}."
    )


def _facts(run: Run) -> dict[str, str]:
    config = run.config_without_ids.items()
    facts = _readable({k: v for k, v in config if k not in _SHOWN_ELSEWHERE})
    if "data" in facts:
        facts["data"] = data_words(run)
    facts["steps spent"] = whole(run.steps_spent)
    facts["updates"] = whole(run.updates)
    seconds = run.history[-1].get("seconds") if run.history else None
    if seconds is not None:
        facts[_TIME] = duration(seconds)
    return facts


def _hashes(run: Run) -> dict[str, str]:
    return {
        "plan": run.plan.hash[:16],
        "owners and declared counts": run.plan.owners_fingerprint[:16],
    }


def _merged(facts: list[dict[str, str]]) -> dict[str, str]:
    """Merge the facts about several runs into one mapping, listing all values where they differ."""
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    values = {name: [of_run[name] for of_run in facts if name in of_run] for name in names}
    return {name: name_some(list(dict.fromkeys(each)), shown=8) for name, each in values.items()}


def _readable(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings as a flat mapping of readable names to values."""
    return {
        _name(path): _value(value)
        for path, value in flat(settings, separator=": ")
        if value is not None and value != {} and value != []
    }


def _name(path: str) -> str:
    parts = path.removeprefix("settings: ").replace("_", " ").split(": ")
    return ": ".join(_WORDS.get(part, part) for part in parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
