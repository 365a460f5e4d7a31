"""Table and picture of the study of repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from calibration import gain
from ownerwise.files import ANYTHING, mapping_of, read_json, write_text
from ownerwise_reproduction.drawing import MARKERS, colour, finish, new_figure, save
from repairs_data import RULE_SETTINGS, SETTINGS, UNSEEN_SETTINGS

RESULTS = Path(__file__).parents[1] / "results/repairs"
PICTURE = Path(__file__).parents[2] / "docs/figures/repairs.svg"
BASELINE = "IDP-SGD"
ROOM = 10.0  # points below the baseline; what is worse is not drawn
EMPTY: dict[str, Any] = {"epsilon": [1.0, 1.0], "methods": {}}
FIGURES = ("overall", "strict half", "worst group", "spread")
STYLES = {
    "DP-SGD": ("v", 6),
    "IDP-SGD": ("^", 6),
    "INO-SGD": ("*", 0),
    "INO-SGD, budget-aware": ("P", 0),
    "pull": ("D", 1),
    "calibrated": ("o", 1),
    "INO-SGD calibrated": ("X", 1),
    "pull, calibrated": ("s", 1),
    "share bands": ("h", 3),
    "lowered by 20%": ("<", 5),
    "lowered by 40%": ("<", 4),
    "lowered by 70%": ("<", 6),
    "lowered by 40%, calibrated": ("p", 1),
    "dropped 30%": (">", 5),
    "dropped 50%": (">", 4),
}
"""Marker and colour of each method, in the order of the legend."""

MESSAGE = "Calibration (blue) helps strict owners where classes differ; elsewhere it costs little"
SHORT = Path(__file__).parents[2] / "docs/figures/results.svg"
SHOWN = {"DP-SGD": "DP-SGD at the strictest budget", "IDP-SGD": "individual budgets (IDP-SGD)",
         "INO-SGD": "the same with INO-SGD", "calibrated": "the same, calibrated"}  # fmt: skip
WORDS = {
    "classes": "MNIST, one digit per owner",
    "mixed": "digits, mostly one per owner",
    "split": "heart rates, rare diagnoses strict",
    "inputs": "MNIST, strict owner’s images turned",
    "ages": "incomes, older owners stricter",
    "dimmed": "X-rays, strict owner’s images dimmed",
}

CHOICES = {
    "classes": "calibrated",
    "mixed": "calibrated",
    "inputs": "lowered by 40%, calibrated",
    "split": "calibrated",
    "ages": "lowered by 40%, calibrated",
    "dimmed": "lowered by 40%, calibrated",
}
"""The choice of the rule in each setting, written down before the unseen ones were run."""


def stored(path: Path) -> dict[str, Any]:
    return read_json(path, mapping_of(ANYTHING)) if path.exists() else {}


def strict_groups(epsilon: list[float]) -> int:
    """Return how many groups are below the median epsilon; at least half, if none is."""
    below = int((np.array(epsilon) < np.median(epsilon)).sum())
    return below or len(epsilon) // 2


def summary(figures: Any, strict: int) -> np.ndarray:
    """Return the percentages of `FIGURES`, [splits, seeds, 4].

    Args:
        figures: overall accuracy, then recalls from the strictest group to the laxest,
            [splits, seeds, 1 + groups].
        strict: number of strict groups.
    """
    found = 100 * np.array(figures)
    overall, recalls = found[..., 0], found[..., 1:]
    half, worst = recalls[..., :strict].mean(axis=-1), recalls.min(axis=-1)
    return np.stack([overall, half, worst, recalls.std(axis=-1)], axis=-1)


def write_pages() -> None:
    results = {name: stored(RESULTS / f"{name}.json") for name in SETTINGS}
    results = {name: found for name, found in results.items() if found}
    write_text(RESULTS / "index.md", table(results))
    save(picture(results), PICTURE)
    save(short_picture(results), SHORT)


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Which repair", "",
        "`python reproduction/studies/repairs.py` writes this page; its first lines and those",
        "of `repairs_data.py` describe methods and settings. Percentages on test records, means of",
        "three splits with two runs each; spread: standard deviation of the groups' recalls. Gains",
        "over IDP-SGD are shown with their 95% interval (Student's t) over splits. All runs have",
        "fixed seeds and are NOT PRIVATE. The rule's choice, fixed before the unseen settings",
        "(split, ages, dimmed) were run, is in bold.", "",
    ]  # fmt: skip
    for name, found in results.items():
        epsilons = ", ".join(f"{value:.2g}" for value in found["epsilon"])
        lines += [
            f"## {name}", "",
            f"Mean epsilon of the groups: {epsilons}.", "",
            f"| | {' | '.join(FIGURES)} | gain overall | gain, strict half | learning rate |",
            f"|---{'|---' * 7}|",
        ]  # fmt: skip
        measured = _measured(found)
        plain = measured[BASELINE]
        for label, values in measured.items():
            cells = [f"{value:.1f}" for value in values.mean(axis=(0, 1))]
            same = label == BASELINE
            cells += ["–"] * 2 if same else [gain(values, plain, at) for at in (0, 1)]
            cells.append(f"{found['methods'][label]['rate']:g}")
            shown = f"**{label}**" if label == CHOICES.get(name) else label
            lines.append(f"| {shown} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _measured(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the summary of each method, in the order of the legend."""
    strict = strict_groups(found["epsilon"])
    order = [*STYLES, *(label for label in found["methods"] if label not in STYLES)]
    return {
        label: summary(found["methods"][label]["figures"], strict)
        for label in order
        if label in found["methods"]
    }


def picture(results: dict[str, Any]) -> Any:
    """Plot accuracy against the recall of the strict half, and the spread against accuracy."""
    figure, axes = new_figure(4 * len(RULE_SETTINGS), MESSAGE)
    rows = [axes[start : start + 3] for start in range(0, len(axes), 3)]
    for kind, names, pair in (
        ("rule", RULE_SETTINGS, rows[:2]),
        ("unseen", UNSEEN_SETTINGS, rows[2:]),
    ):
        for name, upper, lower in zip(names, *pair, strict=True):
            upper.set_title(f"{name} ({kind})")
            points = {
                label: values.mean(axis=(0, 1))
                for label, values in _measured(results.get(name, EMPTY)).items()
            }
            for label, (overall, strict, _, spread) in points.items():
                if overall < points[BASELINE][0] - ROOM:
                    upper.text(
                        0.03, 0.93, f"not shown: {label}, {overall:.0f}%", fontsize=8,
                        transform=upper.transAxes,
                    )  # fmt: skip
                    continue
                marker, number = STYLES[label]
                style = {"color": colour(number), "marker": marker, "linestyle": "", "alpha": 0.85}
                upper.plot(strict, overall, label=label, **style)
                lower.plot(overall, spread, **style)
            finish(figure, [upper], "recall of the strict half, %", "accuracy, %", legend=False)
            finish(figure, [lower], "accuracy, %", "spread of recalls, points", legend=False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    return figure


def short_picture(results: dict[str, Any]) -> Any:
    """Plot the recall of the strict half in each setting, for four methods."""
    message = "Calibrate: strict owners gain where owners differ in their classes"
    figure, (axis,) = new_figure(1, message, size=(8.4, 3.6))
    names = [name for name in WORDS if name in results][::-1]
    for number, (label, words) in enumerate(SHOWN.items()):
        means = [_measured(results[name])[label].mean(axis=(0, 1))[1] for name in names]
        heights = np.arange(len(names)) + 0.12 * (1.5 - number)  # apart, where they coincide
        order = {"DP-SGD": 6, "IDP-SGD": 0, "INO-SGD": 2, "calibrated": 1}[label]
        axis.plot(means, heights, MARKERS[number], color=colour(order), label=words, markersize=7)
    axis.set_yticks(range(len(names)), [WORDS[name] for name in names])
    finish(figure, [axis], "recall of the stricter half of the owners, %", "", legend=False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
