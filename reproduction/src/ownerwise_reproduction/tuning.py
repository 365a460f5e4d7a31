"""A fair comparison of tuned methods: every method gets the same number of draws.

A comparison at fixed values favours the methods that these values happen to suit. Here, all methods
are tried with the same random draws of clip norm, learning rate and number of steps; INO-SGD's tail
and kappa are drawn along with them. Hyperparameters are chosen on held-out training records, and
the chosen models are evaluated on test records. The first draw is the unchanged setting.

On private records, the choice of values would itself be a release. This study uses public data and
is NOT PRIVATE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.files import write_json
from ownerwise.wording import Amount
from ownerwise_reproduction import provenance, summary
from ownerwise_reproduction.drawing import MARKERS, colour, finish, new_figure, save
from ownerwise_reproduction.methods import Method
from ownerwise_reproduction.settings import Setting
from ownerwise_reproduction.summary import Result
from ownerwise_reproduction.trials import Trial

VALIDATION_SHARE = 0.1
FACTOR = 4.0
"""Each draw scales the clip norm and the learning rate by factors in [1 / `FACTOR`, `FACTOR`]."""
STEP_FACTORS = (0.5, 1.0, 2.0)
TAILS = (0.05, 0.6)
KAPPAS = (0.0, 3.0)


@dataclass(frozen=True)
class Point:
    """The results of one hyperparameter configuration of a method, across seeds.

    Attributes:
        method: name of the method.
        number: number of the draw, the same for all methods.
        values: {"section.key": value}.
        validation, test: metrics over seeds; the validation metrics determine which values are
            chosen.
        wall_seconds: wall time for all seeds together.
        plans: hashes of the plans used.
    """

    method: str
    number: int
    values: Mapping[str, float]
    validation: Mapping[str, Amount]
    test: Mapping[str, Amount]
    wall_seconds: float
    plans: Sequence[str]


def draw(
    setting: Setting, profile: str, changes: Sequence[str], trials: int
) -> list[dict[str, float]]:
    """Return the values in every draw, including INO-SGD's own; the first is the setting itself."""
    config = setting.configure(0, profile, changes)
    plan, weights = config["plan"], config["weights"]
    generator = np.random.default_rng(0)
    drawn: list[dict[str, float]] = [
        {
            "plan.clip_norm": plan["clip_norm"],
            "training.lr": config["training"]["lr"],
            "plan.steps": plan["steps"],
            "weights.tail": weights.get("tail", 0.4),
            "weights.kappa": weights.get("kappa", 1.0),
        }
    ]
    for _ in range(trials - 1):
        factors = FACTOR ** generator.uniform(-1, 1, size=2)
        drawn.append(
            {
                "plan.clip_norm": _round(plan["clip_norm"] * factors[0]),
                "training.lr": _round(config["training"]["lr"] * factors[1]),
                "plan.steps": max(1, round(plan["steps"] * generator.choice(STEP_FACTORS))),
                "weights.tail": _round(generator.uniform(*TAILS)),
                "weights.kappa": _round(generator.uniform(*KAPPAS)),
            }
        )
    return drawn


def tuning_trials(
    setting: Setting,
    methods: Sequence[Method],
    drawn: Sequence[Mapping[str, float]],
    seeds: Sequence[int],
    profile: str = "paper",
    changes: Sequence[str] = (),
) -> dict[tuple[str, int], list[Trial]]:
    """Return the trials of every method and draw, one for each seed."""
    held_out = f"data.validation_share={VALIDATION_SHARE}"
    return {
        (method.slug, number): [
            Trial(
                setting,
                method,
                seed,
                profile,
                (*changes, held_out, *(f"{key}={value}" for key, value in values.items())),
            )
            for seed in seeds
        ]
        for number, values in enumerate(drawn)
        for method in methods
    }


def points(
    drawn: Sequence[Mapping[str, float]], results: Mapping[tuple[str, int], Sequence[Result]]
) -> list[Point]:
    """Return the results of every method and draw."""
    return [
        Point(
            method,
            number,
            _relevant(runs[0], drawn[number]),
            summary.over_seeds(runs, "validation"),
            summary.over_seeds(runs, "final"),
            sum(run["wall_seconds"] for run in runs),
            provenance.plan_hashes(runs),
        )
        for (method, number), runs in results.items()
    ]


def frontier(found: Sequence[Point], other: str) -> list[Point]:
    """Return the points that no other point of the same method beats in both accuracy and `other`.

    Both metrics are measured on validation records. The points are sorted by decreasing accuracy.
    """
    ranked = sorted(
        found,
        key=lambda point: (point.validation["accuracy"].mean, point.validation[other].mean),
        reverse=True,
    )
    kept: list[Point] = []
    for point in ranked:
        if not kept or point.validation[other].mean > kept[-1].validation[other].mean:
            kept.append(point)
    return kept


def describe(
    found: Sequence[Point], trials: int, seeds: Sequence[int], command: str
) -> dict[str, Any]:
    """Return all points, the frontiers and each method's choice as JSON-compatible values."""
    methods = list(dict.fromkeys(point.method for point in found))
    described: dict[str, Any] = {
        "not_private": "NOT PRIVATE (research): fixed seeds, values chosen on held-out records",
        "command": command,
        "trials": trials,
        "seeds": list(seeds),
        "validation_share": VALIDATION_SHARE,
        "methods": {},
    }
    for method in methods:
        own = [point for point in found if point.method == method]
        others = [other for other in ("strict", "worst_group") if other in own[0].validation]
        described["methods"][method] = {
            "points": [asdict(point) for point in own],
            "frontier": {other: [p.number for p in frontier(own, other)] for other in others},
            "best": {
                criterion: max(own, key=lambda p, c=criterion: p.validation[c].mean).number
                for criterion in ("accuracy", "balanced_accuracy", *others)
            },
        }
    return described


def write(
    name: str,
    found: Sequence[Point],
    trials: int,
    seeds: Sequence[int],
    command: str,
    folder: str | PathLike,
) -> list[Path]:
    """Write the search as NAME.json and its figure as NAME.svg, and return both paths.

    Args:
        name: name of the setting.
        found: the results of every method and draw.
        trials: number of draws.
        seeds: seeds of the runs.
        command: the command that runs the search.
        folder: the folder to write to.
    """
    table, picture = Path(folder) / f"{name}.json", Path(folder) / f"{name}.svg"
    write_json(table, describe(found, trials, seeds, command))
    save(frontier_figure(found), picture)
    return [table, picture]


def frontier_figure(found: Sequence[Point]) -> Any:
    """Plot the test results of the points on each frontier, chosen on validation records.

    All points are also shown, faintly.
    """
    others = [other for other in ("strict", "worst_group") if other in found[0].validation]
    figure, axes = new_figure(len(others), _message(found), size=(4.8, 4.0))
    for axis, other in zip(axes, others, strict=True):
        for number, method in enumerate(dict.fromkeys(point.method for point in found)):
            own = [point for point in found if point.method == method]
            best = frontier(own, other)
            for chosen, options in (
                (own, {"alpha": 0.25, "linestyle": "none"}),
                (best, {"label": _LABELS.get(method, method), "linestyle": "-"}),
            ):
                axis.plot(
                    [point.test["accuracy"].mean for point in chosen],
                    [point.test[other].mean for point in chosen],
                    marker=MARKERS[number],
                    color=colour(number),
                    **options,
                )
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.yaxis.set_major_formatter("{x:.0%}")
        finish(figure, [axis], "accuracy over all records", f"recall, {summary.METRICS[other]}")
    return figure


_LABELS = {"idp": "IDP-SGD", "ino": "INO-SGD", "ino-budget": "INO-SGD budget-aware"}


def _message(found: Sequence[Point]) -> str:
    """Return what the figure shows: the test accuracy of each method's choice."""
    best = {}
    for point in found:
        other = best.setdefault(point.method, point)
        if point.validation["accuracy"].mean > other.validation["accuracy"].mean:
            best[point.method] = point
    ends = {_LABELS.get(name, name): point.test["accuracy"].mean for name, point in best.items()}
    words = (f"{name} {100 * accuracy:.1f}%" for name, accuracy in ends.items())
    return f"Tuned in the same way: {', '.join(words)} accuracy"


def _relevant(run: Result, values: Mapping[str, float]) -> dict[str, float]:
    """Return the drawn values that appear in a run's configuration."""
    held = {f"{name}.{key}" for name, section in run["config"].items() for key in section}
    return {key: value for key, value in values.items() if key in held}


def _round(value: float) -> float:
    """Return the value rounded to three significant digits, so that it is easy to type."""
    return float(f"{value:.3g}")
