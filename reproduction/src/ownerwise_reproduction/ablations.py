"""The effect of one choice: INO-SGD's tail, its order of records, or the budget of one class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ownerwise.wording import Amount
from ownerwise_reproduction import summary
from ownerwise_reproduction.drawing import finish, new_figure, say
from ownerwise_reproduction.summary import BASELINE, METRICS, Result, Study

KINDS = {"ino": "Tail length", "ino-shape": "Shape of the tail", "ino-order": "Order of records"}
"""Methods that vary one part of INO-SGD, and the name that pages use for that part."""

_REFERENCES = (BASELINE, "ino")
_SHOWN = ("accuracy", "strict", "worst_group")
_QUARTERS = (0.25, 0.5, 0.75, 1.0)


def is_ablation(run: Result) -> bool:
    """Return True if a run is an ablation: its method is in `KINDS` and has an argument."""
    name, _, argument = run["spec"].partition(":")
    return name in KINDS and argument != ""


def main_methods(study: Study) -> list[str]:
    """Return the methods that are not ablations, or all methods if there are only ablations."""
    found = [name for name, runs in study.methods.items() if not is_ablation(runs[0])]
    return found or list(study.methods)


def part(study: Study, kind: str) -> Study | None:
    """Return the runs of an ablation and of IDP-SGD and INO-SGD, for the seeds that they all share.

    Return None if there is nothing to compare.
    """
    varied = [
        name
        for name, runs in study.methods.items()
        if is_ablation(runs[0]) and runs[0]["spec"].partition(":")[0] == kind
    ]
    if not varied:
        return None
    names = [name for name in _REFERENCES if name in study.methods] + varied
    shared = set.intersection(*({run["seed"] for run in study.methods[name]} for name in names))
    compared = {
        name: [run for run in study.methods[name] if run["seed"] in shared] for name in names
    }
    return replace(study, methods=compared) if shared else None


def tails(study: Study) -> Any:
    """Plot the metrics against the tail length (0 for IDP-SGD) after each quarter of the steps."""
    found = part(study, "ino")
    if found is None:
        return None
    by_tail = {_tail(runs[0]): runs for runs in found.methods.values()}
    by_tail = dict(sorted(by_tail.items()))
    figure, axes = new_figure(len(_QUARTERS))
    for axis, share in zip(axes, _QUARTERS, strict=True):
        measured = [_measured_at(runs, share) for runs in by_tail.values()]
        for metric in _SHOWN:
            if metric in measured[0]:
                axis.errorbar(
                    list(by_tail),
                    [one[metric].mean for one in measured],
                    [one[metric].deviation or 0.0 for one in measured],
                    marker="o",
                    markersize=3,
                    capsize=2,
                    label=METRICS[metric],
                )
        axis.set_title(f"after {share:.0%} of the steps")
    return finish(figure, axes, "tail (fraction of the expected clip norm)", "recall", share=True)


def _tail(run: Result) -> float:
    """Return the tail length of a run, which is 0 for IDP-SGD because it uses no weights."""
    return run["config"].get("weights", {}).get("tail", 0.0)


def _measured_at(runs: Sequence[Result], share: float) -> dict[str, Amount]:
    """Return the metrics over seeds at the evaluation nearest to a given fraction of the steps."""
    measured = []
    for run in runs:
        wanted = share * run["history"][-1]["step"]
        line = min(run["history"], key=lambda line, at=wanted: abs(line["step"] - at))
        measured.append(summary.measure_line(line, run["budgets"]))
    return {key: Amount.of([one[key] for one in measured]) for key in measured[0]}


def shapes(study: Study) -> Any:
    """Plot heat maps of the metrics over alpha and beta, with IDP-SGD's values in the titles."""
    compared = part(study, "ino-shape")
    if compared is None:
        return None
    found = {}
    for runs in compared.methods.values():
        alpha, slash, beta = runs[0]["spec"].partition(":")[2].partition("/")
        if slash:
            found[float(alpha), float(beta)] = summary.over_seeds(runs)
    if not found:
        return None
    alphas, betas = (sorted(set(values)) for values in zip(*found, strict=True))
    metrics = [metric for metric in _SHOWN if metric in next(iter(found.values()))]
    figure, axes = new_figure(len(metrics))
    for axis, metric in zip(axes, metrics, strict=True):
        cells = np.full((len(alphas), len(betas)), np.nan)
        for (alpha, beta), measured in found.items():
            row, column = alphas.index(alpha), betas.index(beta)
            cells[row, column] = 100 * measured[metric].mean
            text = f"{cells[row, column]:.1f}"
            axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8)
        axis.pcolormesh(np.ma.masked_invalid(cells), cmap="Blues", alpha=0.6)
        axis.set_xticks(np.arange(len(betas)) + 0.5, [f"{beta:g}" for beta in betas])
        axis.set_yticks(np.arange(len(alphas)) + 0.5, [f"{alpha:g}" for alpha in alphas])
        axis.set_xlabel("beta")
        axis.set_ylabel("alpha")
        axis.set_title(_title(compared, metric))
    return figure


def _title(study: Study, metric: str) -> str:
    if BASELINE not in study.methods:
        return f"{METRICS[metric]}, %"
    baseline = summary.over_seeds(study.methods[BASELINE])[metric]
    return f"{METRICS[metric]}, % (IDP-SGD {100 * baseline.mean:.1f})"


def orders(study: Study) -> Any:
    """Plot bar charts of the metrics for every order, next to IDP-SGD and INO-SGD."""
    compared = part(study, "ino-order")
    if compared is None:
        return None
    measured = {name: summary.over_seeds(runs) for name, runs in compared.methods.items()}
    metrics = [metric for metric in _SHOWN if all(metric in one for one in measured.values())]
    figure, axes = new_figure(1)
    width = 0.8 / len(measured)
    for number, (name, one) in enumerate(measured.items()):
        axes[0].bar(
            np.arange(len(metrics)) + (number - (len(measured) - 1) / 2) * width,
            [one[metric].mean for metric in metrics],
            width,
            yerr=[one[metric].deviation or 0.0 for metric in metrics],
            capsize=2,
            label=study.label(name),
        )
    finish(figure, axes, "", "recall", share=True)
    axes[0].set_xticks(np.arange(len(metrics)), [METRICS[metric] for metric in metrics])
    return figure


def class_budgets(study: Study) -> Any:
    """Plot how each class's recall changes if one class has another budget, as heat maps.

    There is one heat map per budget, with a row for each class whose budget was changed.
    """
    if BASELINE not in study.methods:
        return None
    groups = list(study.first["final"]["groups"])
    changes: dict[float, dict[int, np.ndarray]] = {}
    for runs in study.methods.values():
        name, _, argument = runs[0]["spec"].partition(":")
        which, _, epsilon = argument.partition("=")
        if name == "class-budget" and which.isdigit():
            pairs = summary.pairs_by_seed(study.methods[BASELINE], runs)
            changed = [[_recall(new, g) - _recall(old, g) for g in groups] for old, new in pairs]
            changes.setdefault(float(epsilon), {})[int(which)] = 100 * np.mean(changed, axis=0)
    if not any(len(rows) > 1 for rows in changes.values()):
        return None
    widest = max(np.abs(row).max() for rows in changes.values() for row in rows.values())
    figure, axes = new_figure(len(changes))
    for axis, (epsilon, rows) in zip(axes, sorted(changes.items()), strict=True):
        cells = np.array([rows[which] for which in sorted(rows)])
        axis.pcolormesh(cells, cmap="RdBu", vmin=-widest, vmax=widest)
        for (row, column), value in np.ndenumerate(cells):
            text = f"{value:+.0f}"
            axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7)
        axis.set_xticks(np.arange(len(groups)) + 0.5, groups, rotation=90)
        axis.set_yticks(np.arange(len(rows)) + 0.5, [groups[which] for which in sorted(rows)])
        axis.invert_yaxis()
        axis.set_xlabel("recall of this class")
        axis.set_ylabel("class whose budget is changed")
        axis.set_title(f"ε {epsilon:g} instead of {study.budgets[groups[0]]:g}")
    own = (
        f"{np.mean([row[which] for which, row in rows.items()]):+.1f} points with ε {epsilon:g}"
        for epsilon, rows in sorted(changes.items())
    )
    say(figure, f"The class's own recall changes by {', '.join(own)}")
    return figure


def _recall(run: Result, group: str) -> float:
    return run["final"]["groups"][group]["recall"]
