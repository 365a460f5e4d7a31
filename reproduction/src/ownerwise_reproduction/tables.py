"""Tables of results: a Markdown page and a JSON file for each study, and an overview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.files import write_json, write_text
from ownerwise.report.markdown import table
from ownerwise.wording import duration
from ownerwise_reproduction import ablations, provenance, published, settings, summary
from ownerwise_reproduction.amounts import percent
from ownerwise_reproduction.claim_pages import page_part
from ownerwise_reproduction.claims import Finding
from ownerwise_reproduction.figures import Picture
from ownerwise_reproduction.summary import BASELINE, METRICS, Drop, Gain, Study, spread_out
from ownerwise_reproduction.trials import PLAIN_MOMENTUM

_MOST_GROUPS = 10
_MOST_HASHES = 3
_WITHIN = {True: "yes", False: "no", None: "not private"}
CAUTION = (
    "These runs use fixed seeds and public data; they are for research and NOT PRIVATE. Accuracies "
    "are measured on test records, which no guarantee covers."
)


def write_tables(
    studies: Sequence[Study],
    folder: str | PathLike,
    pictures: Mapping[str, Sequence[Picture]] | None = None,
    *,
    findings: Sequence[Finding] = (),
    further: Mapping[str, str] | None = None,
    earlier: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write all pages to a folder and return their paths, starting with the overview.

    Args:
        studies: the studies to write about.
        folder: the folder, created if needed.
        pictures: {study: its figures}, shown on its page.
        findings: the papers' claims with our results, for the overview.
        further: {title: file} for other pages in the folder, listed in the overview.
        earlier: {study: its section of the overview} for studies written earlier.
    """
    folder = Path(folder)
    index = folder / published.OVERVIEW
    write_text(index, overview(studies, findings, further or {}, earlier))
    written = [index]
    if findings:
        written.append(folder / published.CLAIMS)
        write_json(written[-1], list(map(asdict, findings)))
    for study in studies:
        content = describe(study)
        shown = (pictures or {}).get(study.name, ())
        place = folder / study.name
        write_json(place / "runs.json", content)
        write_text(place / "index.md", page(study, content, shown))
        written += [place / "index.md", place / "runs.json"]
    return written


def describe(study: Study) -> dict[str, Any]:
    """Return the results of a study over seeds, as JSON-compatible values."""
    methods = {}
    baseline = study.methods.get(BASELINE)
    for name, runs in study.methods.items():
        gained = None if baseline is None or name == BASELINE else summary.gain(baseline, runs)
        methods[name] = {
            "label": study.label(name),
            **provenance.origin(runs),
            "metrics": {key: asdict(value) for key, value in summary.over_seeds(runs).items()},
            "groups": {key: asdict(value) for key, value in summary.group_recalls(runs).items()},
            "initial_drop": {key: asdict(value) for key, value in summary.drops(runs).items()},
            "gain": None if gained is None else asdict(gained),
            "epoch_seconds": summary.epoch_seconds(runs),
            "gradients": summary.gradients(runs),
        }
    first = study.first
    return {
        "study": study.name,
        "setting": first["setting"],
        "title": _title(study),
        "not_private": "NOT PRIVATE (research): fixed seeds",
        "commands": provenance.commands(study),
        "environment": first["environment"],
        "data": first["data"],
        "owners": first["owners"],
        "steps": first["history"][-1]["step"],
        "budgets": study.budgets,
        "methods": methods,
    }


def page(study: Study, content: dict[str, Any], pictures: Sequence[Picture] = ()) -> str:
    """Return the Markdown page for a study."""
    main = study.only(ablations.main_methods(study))
    columns = _columns(study)
    parts = [
        f"# {study.heading}",
        f"{content['title']}. {content['owners'].capitalize()}; {content['steps']} steps.",
        *_changes(study),
        _origin(content["setting"]),
        CAUTION,
        _notes(main, columns),
        overall_table(main, columns),
    ]
    gains = {
        name: summary.gain(main.methods[BASELINE], runs)
        for name, runs in main.methods.items()
        if BASELINE in main.methods and name != BASELINE
    }
    if len(study.budgets) > 1:
        parts += ["## Groups", *_mixture(study), _group_table(main)]
    known = {name: found for name, found in gains.items() if found is not None}
    if any(found.correlation is not None for found in known.values()):
        parts += [
            "## Who gains",
            "Correlation between the gain in recall over IDP-SGD and the budget: Pearson's r "
            "over the groups' means, its 95% confidence interval and its p-value. A negative r "
            "means that strict owners gain more.",
            _gain_table(main, known),
        ]
    if len(study.budgets) > 1:
        parts += [
            "## Minority initial drop",
            "For the first series of evaluations (with gaps of at most one evaluation) at which a "
            "group's loss is above its initial value while the overall loss is below its own, the "
            "table shows the first and last step and, in parentheses, the largest rise. The values "
            "are means over the seeds that show such a drop.",
            _drop_table(main),
        ]
    for kind, heading in ablations.KINDS.items():
        varied = ablations.part(study, kind)
        if varied is not None:
            parts += [f"## {heading}", overall_table(varied, columns)]
    if pictures:
        parts.append("## Figures")
    for picture in pictures:
        parts += [picture.caption, f"![{picture.path.stem}]({picture.path.name})"]
    parts += [
        "## How to reproduce it",
        "\n".join(f"    {command}" for command in (*content["commands"], provenance.TABLE)),
        "*Within budgets* shows whether every plan spends at most the budgets that the setting "
        "declares. Training time covers all sessions of an interrupted run; wall time covers "
        "only its last session. `runs.json` next to this page lists all plan hashes and the times "
        "of each run.",
        _origin_table(content),
    ]
    return "\n\n".join(parts) + "\n"


def _changes(study: Study) -> list[str]:
    """Return the changes to the setting, if any."""
    changes = ", ".join(f"`{change}`" for change in study.first["changes"])
    return [f"Changes to the setting: {changes}."] if changes else []


def _notes(study: Study, columns: Sequence[str]) -> str:
    """Return notes on the tables and figures of a study."""
    said = [
        "Mean and standard deviation over seeds, in per cent. Spread is the standard deviation "
        "over groups. Epoch times cover training only and were measured while the machine also ran "
        "other jobs."
    ]
    if "strict" in columns:
        said.append("Strict owners are those whose budget is below the mean.")
    if study.first["evaluated_on"] == "validation":
        said.append(
            "Models were evaluated on validation records during training, and on test records at "
            "the end. The initial drop and the figures over training use the validation records; "
            "the tables and other figures use the test records."
        )
    if "nonprivate" in study.methods:
        rate = study.methods["nonprivate"][0]["history"][-1]["learning_rate"]
        said.append(
            f"Plain SGD uses momentum {PLAIN_MOMENTUM:g} and its own learning rate, {rate:g}."
        )
    if len({tuple(run["seed"] for run in runs) for runs in study.methods.values()}) > 1:
        said.append(
            "Methods were run with different seeds: compare them using the differences in the "
            "[overview](../../README.md), which use the seeds that both methods share."
        )
    return " ".join(said)


def _mixture(study: Study) -> list[str]:
    if not provenance.is_mixed(study):
        return []
    return ["Records in the same group have different budgets here, so groups are not owners."]


def _origin_table(content: dict[str, Any]) -> str:
    rows = []
    for method in content["methods"].values():
        runs, hashes = len(method["seeds"]), method["plans"]
        more = f" and {len(hashes) - _MOST_HASHES} more" if len(hashes) > _MOST_HASHES else ""
        rows.append(
            [
                method["label"],
                ", ".join(f"`{one[:12]}`" for one in hashes[:_MOST_HASHES]) + more,
                _WITHIN[method["within_budgets"]],
                ", ".join(map(str, method["seeds"])),
                duration(sum(method["train_seconds"]) / runs),
                duration(sum(method["wall_seconds"]) / runs),
            ]
        )
    header = ["method", "plans", "within budgets", "seeds", "training", "wall"]
    return table(header, rows, texts=3)


def _origin(name: str) -> str:
    """Return the source of a setting, and the values that we chose ourselves."""
    setting = settings.setting(name)
    lines = [f"Source: {setting.source}."]
    if setting.choices:
        lines += ["Our choices:", "", *(f"- {choice}" for choice in setting.choices)]
    return "\n".join(lines)


def overview(
    studies: Sequence[Study],
    findings: Sequence[Finding] = (),
    further: Mapping[str, str] | None = None,
    earlier: Mapping[str, str] | None = None,
) -> str:
    """Return the overview page, which covers the claims, other pages and all studies.

    `earlier` contains the sections of studies that were written earlier.
    """
    parts = ["# Results", CAUTION]
    if findings:
        parts += ["## The papers' claims at a glance", page_part(findings)]
    if further:
        links = "\n".join(f"- [{title}]({file})" for title, file in further.items())
        parts += [published.FURTHER, links]
    sections = {**(earlier or {}), **{study.name: _section(study) for study in studies}}
    parts += [sections[name] for name in sorted(sections)]
    return "\n\n".join(parts) + "\n"


def _section(study: Study) -> str:
    shown = study.only(ablations.main_methods(study))
    parts = [
        f"## [{study.heading}]({study.name}/index.md)",
        f"{_title(study)}.",
        *_changes(study),
        overall_table(shown, _columns(study), times=False),
    ]
    return "\n\n".join(parts)


def _columns(study: Study) -> list[str]:
    """Return the metrics to show in a study's tables, without redundant ones.

    `strict` is left out if it always equals `strictest`.
    """
    measured = [summary.measure(run) for runs in study.methods.values() for run in runs]
    found = [key for key in METRICS if any(key in one for one in measured)]
    if all(one.get("strict") == one.get("strictest") for one in measured):
        return [key for key in found if key != "strict"]
    return found


def _title(study: Study) -> str:
    """Return the setting's current title, or the title stored in the results."""
    name = study.first["setting"]
    return settings.setting(name).title if name in settings.names() else study.first["title"]


def overall_table(study: Study, columns: Sequence[str] = (), *, times: bool = True) -> str:
    """Return the table of all methods in a study.

    Args:
        study: the study to show.
        columns: the metrics to show; by default all except redundant ones.
        times: whether to show the time per epoch.
    """
    measured = {name: summary.over_seeds(runs) for name, runs in study.methods.items()}
    columns = columns or _columns(study)
    work = _work(study)
    rows = []
    for name, found in measured.items():
        seconds = summary.epoch_seconds(study.methods[name])
        rows.append(
            [
                study.label(name),
                *(percent(found.get(key)) for key in columns),
                str(len(study.methods[name])),
                *(["" if seconds is None else f"{seconds:.2f}"] if times else []),
                *work.get(name, ()),
            ]
        )
    heading = ["method", *(METRICS[key] for key in columns), "seeds"]
    heading += ["s / epoch"] if times else []
    return table(heading + (["gradients, thousands (summed)"] if work else []), rows)


def _work(study: Study) -> dict[str, list[str]]:
    """Return every method's gradient counts, or {} if all evaluated gradients are summed."""
    found = {name: summary.gradients(runs) for name, runs in study.methods.items()}
    if all(one is None or one[0] == one[1] for one in found.values()):
        return {}
    return {
        name: ["" if one is None else f"{one[0] / 1000:.1f} ({one[1] / 1000:.1f})"]
        for name, one in found.items()
    }


def _group_table(study: Study) -> str:
    shown = spread_out(list(study.budgets), _MOST_GROUPS)
    rows = []
    for name, runs in study.methods.items():
        recalls = summary.group_recalls(runs)
        rows.append([study.label(name), *(percent(recalls.get(group)) for group in shown)])
    return table(["method", *_group_titles(study, shown)], rows)


def _group_titles(study: Study, groups: Sequence[str]) -> list[str]:
    """Return the groups' names, with their budgets if each group has a single budget."""
    if provenance.is_mixed(study):
        return list(groups)
    return [f"{group} (ε {study.budgets[group]:g})" for group in groups]


def _gain_table(study: Study, gains: dict[str, Gain]) -> str:
    rows = []
    for name, found in gains.items():
        if found.correlation is not None and found.p is not None:
            low_high = "" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
            row = [study.label(name), f"{found.correlation:.3f}", low_high, f"{found.p:.2g}"]
            rows.append([*row, str(found.seeds)])
    return table(["method", "r", "95 % interval", "p", "seeds"], rows)


def _drop_table(study: Study) -> str:
    shown = spread_out(list(study.budgets), _MOST_GROUPS)
    rows = []
    for name, runs in study.methods.items():
        found = summary.drops(runs)
        rows.append([study.label(name), *(_drop(found.get(group), len(runs)) for group in shown)])
    return table(["method", *_group_titles(study, shown)], rows)


def _drop(drop: Drop | None, seeds: int) -> str:
    if drop is None:
        return "none"
    some = "" if drop.seeds == seeds else f", {drop.seeds} of {seeds} seeds"
    return f"{drop.first:.0f} to {drop.last:.0f} ({drop.depth:.2f}{some})"
