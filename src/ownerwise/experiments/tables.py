"""Tables of results: a page of Markdown and a JSON file for each study, and a page over all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.evaluation import Amount
from ownerwise.experiments import settings, summary
from ownerwise.experiments.summary import BASELINE, METRICS, Gain, Study, spread_out
from ownerwise.plan_files import write_whole

_MOST_GROUPS = 10
_CAUTION = (
    "Fixed seeds: these runs are science on public data and NOT PRIVATE. Accuracies are measured "
    "on test records, which no guarantee covers."
)


def write_tables(
    studies: Sequence[Study], folder: str | PathLike, pictures: dict[str, list[Path]] | None = None
) -> list[Path]:
    """Write all pages into a folder and return them, the page over all first.

    Args:
        studies: what to write of.
        folder: made if needed.
        pictures: {study: figures in that folder}, shown on its page.
    """
    folder = Path(folder)
    written = []
    for study in studies:
        content = describe(study)
        shown = [path.name for path in (pictures or {}).get(study.name, [])]
        _write(folder / f"{study.name}.json", json.dumps(content, indent=2) + "\n")
        _write(folder / f"{study.name}.md", page(study, content, shown))
        written += [folder / f"{study.name}.md", folder / f"{study.name}.json"]
    index = folder / "README.md"
    _write(index, overview(studies))
    return [index, *written]


def describe(study: Study) -> dict[str, Any]:
    """Return everything that is known of a study over seeds, as JSON types."""
    methods = {}
    baseline = study.methods.get(BASELINE)
    for name, runs in study.methods.items():
        gained = None if baseline is None or name == BASELINE else summary.gain(baseline, runs)
        methods[name] = {
            "label": study.label(name),
            "seeds": [run["seed"] for run in runs],
            "metrics": {key: asdict(value) for key, value in summary.over_seeds(runs).items()},
            "groups": {key: asdict(value) for key, value in summary.group_recalls(runs).items()},
            "initial_drop": {key: asdict(value) for key, value in summary.drops(runs).items()},
            "gain": None if gained is None else asdict(gained),
            "epoch_seconds": summary.epoch_seconds(runs),
        }
    first = next(iter(study.methods.values()))[0]
    return {
        "study": study.name,
        "setting": first["setting"],
        "title": first["title"],
        "not_private": "NOT PRIVATE (science): fixed seeds",
        "data": first["data"],
        "owners": first["owners"],
        "steps": first["history"][-1]["step"],
        "budgets": study.budgets,
        "methods": methods,
    }


def page(study: Study, content: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    """Return the Markdown page of a study."""
    parts = [
        f"# {study.heading}",
        f"{content['title']}. {content['owners'].capitalize()}; {content['steps']} steps.",
        _origin(content["setting"]),
        _CAUTION,
        "Mean and standard deviation over seeds, in per cent. Spread is the standard deviation "
        "over groups; strict owners are those with less than the mean budget. An epoch counts "
        "training time alone.",
        overall_table(study),
    ]
    gains = {
        name: summary.gain(study.methods[BASELINE], runs)
        for name, runs in study.methods.items()
        if BASELINE in study.methods and name != BASELINE
    }
    if len(study.budgets) > 1:
        parts += ["## Groups", _group_table(study)]
    known = {name: found for name, found in gains.items() if found is not None}
    if any(found.correlation is not None for found in known.values()):
        parts += [
            "## Who gains",
            "Gain in recall over IDP-SGD against the budget: Pearson's r over the groups' means, "
            "its 95 % confidence interval, and p of no correlation. Negative r: strict owners "
            "gain more.",
            _gain_table(study, known),
        ]
    if len(study.budgets) > 1:
        parts += [
            "## Minority initial drop",
            "Steps in which a group's loss is above its start while the overall loss is below "
            "its own, and by how much at most; means over seeds.",
            _drop_table(study),
        ]
    parts += [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def _origin(name: str) -> str:
    """Return where a setting comes from, and which of its values are a choice of ours."""
    setting = settings.setting(name)
    lines = [f"Source: {setting.source}."]
    if setting.choices:
        lines += ["Choices of ours:", "", *(f"- {choice}" for choice in setting.choices)]
    return "\n".join(lines)


def overview(studies: Sequence[Study]) -> str:
    """Return the page over all studies."""
    parts = ["# Results", _CAUTION]
    for study in studies:
        title = next(iter(study.methods.values()))[0]["title"]
        parts += [f"## [{study.heading}]({study.name}.md)", f"{title}.", overall_table(study)]
    return "\n\n".join(parts) + "\n"


def overall_table(study: Study) -> str:
    """Return the table of all methods of a study."""
    measured = {name: summary.over_seeds(runs) for name, runs in study.methods.items()}
    columns = [key for key in METRICS if any(key in found for found in measured.values())]
    rows = []
    for name, found in measured.items():
        seconds = summary.epoch_seconds(study.methods[name])
        rows.append(
            [
                study.label(name),
                *(_percent(found.get(key)) for key in columns),
                str(len(study.methods[name])),
                "" if seconds is None else f"{seconds:.2f}",
            ]
        )
    return _table(["method", *(METRICS[key] for key in columns), "seeds", "s / epoch"], rows)


def _group_table(study: Study) -> str:
    shown = spread_out(list(study.budgets), _MOST_GROUPS)
    rows = []
    for name, runs in study.methods.items():
        recalls = summary.group_recalls(runs)
        rows.append([study.label(name), *(_percent(recalls.get(group)) for group in shown)])
    return _table(["method", *(f"{g} (ε {study.budgets[g]:g})" for g in shown)], rows)


def _gain_table(study: Study, gains: dict[str, Gain]) -> str:
    rows = []
    for name, found in gains.items():
        if found.correlation is not None and found.p is not None:
            low_high = "" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
            row = [study.label(name), f"{found.correlation:.3f}", low_high, f"{found.p:.2g}"]
            rows.append([*row, str(found.seeds)])
    return _table(["method", "r", "95 % interval", "p", "seeds"], rows)


def _drop_table(study: Study) -> str:
    shown = spread_out(list(study.budgets), _MOST_GROUPS)
    rows = []
    for name, runs in study.methods.items():
        found = summary.drops(runs)
        cells = (f"{found[group].steps:.0f} ({found[group].depth:.2f})" for group in shown)
        rows.append([study.label(name), *cells])
    return _table(["method", *(f"{g} (ε {study.budgets[g]:g})" for g in shown)], rows)


def _percent(value: Amount | None) -> str:
    if value is None:
        return ""
    deviation = "" if value.deviation is None else f" ± {100 * value.deviation:.2f}"
    return f"{100 * value.mean:.2f}{deviation}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: Path(file).write_text(text, encoding="utf-8"))
