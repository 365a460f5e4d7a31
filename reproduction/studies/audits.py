"""Audits of the library's methods: are lower bounds sound, how strong are they, what do they find?

    python reproduction/studies/audits.py bugs methods power

- bugs: how many of 100 comparisons of a run with its plan find a bug that is planted into the code
  (those of tests/tools/planted_bugs.py), and how many fail without one.
- methods: for each method, 200 runs in which canaries train through the real sampler, step and
  optimizer: how often a lower bound exceeds the plan's epsilon, and for each group the promised
  epsilon, the median lower bounds, the AUC reached and its cap.
- power: median lower bounds of a run of one Gaussian step, for several epsilons and numbers of
  canaries, beside those of an ideal attack on simulated normal scores.

Runs have fixed seeds and are NOT PRIVATE; no record of a person takes part. The figures are files
in reproduction/results/audits; index.md is written from them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise.accounting import gaussian_mu
from ownerwise.audit import conformance
from ownerwise.audit.bounds import guess, theorem
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.canary_attack import audited_groups
from ownerwise.audit.observation import Training, observe
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text
from ownerwise.wording import down, up

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from tools import planted_bugs  # pyright: ignore[reportMissingImports]

RESULTS = Path(__file__).parents[1] / "results/audits"
RUNS, CANARIES, STEPS, OWNERS = 200, 500, 20, 1000
BUDGETS = (1.0, 4.0)
SEEDS = 100
CELLS = [(epsilon, canaries) for epsilon in (2, 4, 8) for canaries in (250, 1000, 5000)]


def owners(each: int = 1) -> ow.Owners:
    names = np.arange(OWNERS)
    budgets = {int(name): BUDGETS[name % 2] for name in names}
    return ow.Owners(np.repeat(names, each), budgets, 1e-5)


def planned(each: int = 1, **options: Any) -> ow.Plan:
    return ow.plan(owners(each), steps=STEPS, batch_size=150, **options)


def constrained() -> tuple[ow.Plan, Training]:
    """Return a plan and a linear model with a rate constraint, on random records."""
    draws = np.random.default_rng(0)
    inputs = torch.from_numpy(draws.normal(size=(OWNERS, 5))).float()
    labels, side = draws.integers(0, 2, OWNERS), draws.choice(["left", "right"], OWNERS)
    partition = ow.Partition({"side": ("left", "right")}, classes=2)
    parity = ow.constraints.demographic_parity(partition, "side", max_gap=0.1)
    release = ow.RateConstraints(parity)
    targets = partition.targets(labels, {"side": side})
    training = Training(
        torch.nn.Linear(5, 2), (inputs, targets), torch.nn.functional.cross_entropy, release=release
    )
    return planned(constraints=release), training


METHODS: dict[str, Callable[[], tuple[ow.Plan, Training]]] = {
    "DP-SGD (uniform)": lambda: (planned(method="uniform"), Training()),
    "IDP-SGD, sample": lambda: (planned(method="sample"), Training()),
    "IDP-SGD, scale": lambda: (planned(method="scale"), Training()),
    "IDP-SGD, both": lambda: (planned(method="both"), Training()),
    "IDP-SGD, hardened": lambda: (planned(hardened=True), Training()),
    "IDP-SGD, AUTO-S": lambda: (planned(), Training(clipping=ow.AutoS())),
    "IDP-SGD, PSAC": lambda: (planned(), Training(clipping=ow.Psac())),
    "IDP-SGD, adaptive clip norm": lambda: (planned(clip_norm="adaptive"), Training()),
    "IDP-SGD, noise schedule": lambda: (
        planned(noise_schedule={"name": "exponential", "rate": 0.02}),
        Training(),
    ),
    "IDP-SGD, calibration release": lambda: (planned(calibration=ow.Calibration()), Training()),
    "INO-SGD": lambda: (planned(), Training(weights=ow.INO())),
    "INO-SGD, scale": lambda: (planned(method="scale"), Training(weights=ow.INO())),
    "INO-SGD, budget-aware": lambda: (
        planned(),
        Training(weights=ow.INO(score_by=ow.BudgetAware())),
    ),
    "INO-SGD, unit owner": lambda: (planned(3, unit="owner"), Training(weights=ow.INO())),
    "importance sampling": lambda: (
        planned(release_std=15.0),
        Training(clipping=ow.ImportanceSampling(accepted_batch=100)),
    ),
    "importance sampling, hardened": lambda: (
        planned(release_std=15.0, hardened=True),
        Training(clipping=ow.ImportanceSampling(accepted_batch=100)),
    ),
    "rate constraints": constrained,
    "individual accounting": lambda: (
        ow.plan(owners(), method="individual", steps=STEPS, clipped_steps=15),
        Training(),
    ),
    "unit owner, owners drawn": lambda: (planned(3, unit="owner"), Training()),
    "unit owner, records drawn": lambda: (
        planned(3, unit="owner", sampling="record"),
        Training(),
    ),
}


def audit_method(name: str, runs: int) -> dict[str, Any]:
    """Return what audits of a method find, for each group."""
    plan, training = METHODS[name]()
    found: list[list[Any]] = []
    start = ow.SecretStream.from_seed(0)
    ordered = training.weights is not None
    canaries = Canaries.of(plan, CANARIES, start, alone=training.alone, ordered=ordered)
    for seed in range(runs):
        stream = ow.SecretStream.from_seed(seed)
        seen = observe(canaries.flipped(stream), training, stream)
        found.append(audited_groups(seen, seen.scores))
    groups = {}
    for at, first in enumerate(found[0]):
        of_group = [run[at] for run in found]
        bounds = {b: [float(group.bounds[b]) for group in of_group] for b in first.bounds}
        groups[first.name] = {
            "promised": first.promised,
            "cap": first.cap,
            "auc": float(np.median([group.auc.value for group in of_group])),
            "estimate": float(np.median([group.estimate.value for group in of_group])),
            "bounds": {b: float(np.median(values)) for b, values in bounds.items()},
            "largest": {b: float(np.max(values)) for b, values in bounds.items()},
        }
    spent = [
        canaries.plan.epsilon()[canaries.owner[canaries.members(at)[0]]]
        for at in range(len(groups))
    ]
    wrong = {
        b: sum(
            any(group.bounds[b] > true for group, true in zip(run, spent, strict=True))
            for run in found
        )
        for b in found[0][0].bounds
    }
    return {"runs": runs, "canaries": CANARIES, "wrong": wrong, "groups": groups}


def audit_bug(bug: Callable[[pytest.MonkeyPatch], None] | None) -> dict[str, Any]:
    """Return how many comparisons with the plan find a bug, and what finds it."""
    cases = [({}, {}), ({}, {"weights": ow.INO()}), ({"unit": "owner"}, {})]
    cases = cases if bug is None else [planted_bugs.BUGS[bug]]
    caught, finders, seconds = 0, Counter(), []
    with pytest.MonkeyPatch.context() as patches:
        if bug is not None:
            bug(patches)
        for of_plan, of_step in cases:
            plan = planted_bugs.make_plan(**of_plan)
            for seed in range(SEEDS):
                began = time.process_time()
                result = conformance(plan, stream=ow.SecretStream.from_seed(seed), **of_step)
                seconds.append(time.process_time() - began)
                caught += not result.passed
                finders.update({check.name for check in result.failures})
    return {
        "audits": len(seconds),
        "caught": caught,
        "seconds": max(seconds),
        "found by": dict(finders.most_common(3)),
    }


def power(epsilon: float, canaries: int, runs: int) -> dict[str, Any]:
    """Return the median lower bounds of audits of a single Gaussian step."""
    people = ow.Owners(None, np.full(OWNERS, epsilon), 1e-5)
    plan = ow.plan(people, steps=1, batch_size=OWNERS)
    made = Canaries.of(plan, canaries, ow.SecretStream.from_seed(0), alone=True)
    bounds: dict[str, list[float]] = {}
    for seed in range(runs):
        stream = ow.SecretStream.from_seed(seed)
        seen = observe(made.flipped(stream), Training(), stream)
        (group,) = audited_groups(seen, seen.scores)
        for name, bound in group.bounds.items():
            bounds.setdefault(name, []).append(float(bound))
    return {
        "epsilon": epsilon, "canaries": canaries, "runs": runs,
        "medians": {name: float(np.median(values)) for name, values in bounds.items()},
        "quartiles": {
            name: np.quantile(values, [0.25, 0.75]).tolist() for name, values in bounds.items()
        },
    }  # fmt: skip


def simulated(epsilon: float, canaries: int, runs: int) -> float:
    """Return the median bound for any mechanism of attacks on ideal normal scores."""
    draws, shift = np.random.default_rng(0), gaussian_mu(epsilon, 1e-5)
    bounds = []
    for _ in range(runs):
        included = draws.integers(0, 2, canaries).astype(bool)
        scores = draws.normal(size=canaries) + shift * included
        bounds.append(theorem(guess(scores, included), 1e-5, 0.05))
    return float(np.median(bounds))


def stored(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return read_json(path, mapping_of(ANYTHING)) if path.exists() else {}


def keep(name: str, key: str, value: Any) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(RESULTS / f"{name}.json", {**stored(name), key: value})
    print(name, key, value, flush=True)


def allowed(runs: int) -> float:
    """Return the largest number of wrong bounds: 5% and three standard errors."""
    return 0.05 * runs + 3 * math.sqrt(0.05 * 0.95 * runs)


def index() -> str:
    """Return the page with all figures."""
    lines = [
        "# Audits",
        "",
        "Canaries train through the real sampler, step and optimizer; an attacker who sees every",
        "model guesses which of them took part. Written by `reproduction/studies/audits.py`. ",
        "Fixed seeds, NOT PRIVATE; no person's record takes part. An attack that fails proves",
        "nothing.",
        "",
        "## All methods",
        "",
        f"Medians of {RUNS} runs with {CANARIES} canaries, {STEPS} steps, delta 1e-5; lower bounds",
        "hold with 95% confidence over all groups. Wrong: runs in which a lower bound exceeds the",
        f"epsilon that the plan spends; {allowed(RUNS):.0f} of {RUNS} would still be consistent. A",
        "median AUC has a standard error of about 0.003, so it may exceed its cap by chance.",
        "",
        "| method | group | promised ε | bound: any mechanism | bound: plan's curve "
        "| estimate | AUC | cap | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    methods = stored("methods")
    for method in (name for name in METHODS if name in methods):
        result = methods[method]
        wrong = " / ".join(str(count) for count in result["wrong"].values())
        for group, values in result["groups"].items():
            any_mechanism, curve = values["bounds"].values()
            lines.append(
                f"| {method} | {group} | {up(values['promised'])} | {down(any_mechanism, 2)} "
                f"| {down(curve, 2)} | {values['estimate']:.2f} | {values['auc']:.3f} "
                f"| {up(values['cap'], 3)} | {wrong} |"
            )
    lines += [
        "",
        "Not in the table are PATE, tuning and `ino_sum`, which release without the private step,",
        "and the release of column statistics before the first step, which audits of canaries",
        "leave out. Canaries under individual accounting are always clipped, so they use up their",
        "budgets. Rate constraints train a linear model on random records beside the canaries.",
        "",
        "## Power",
        "",
        "Median lower bounds of one Gaussian step; one tenth of the canaries are guessed. Ideal:",
        "simulated normal scores with the bound for any mechanism.",
        "",
        "| ε | canaries | runs | any mechanism | ideal | plan's curve |",
        "|---|---|---|---|---|---|",
    ]
    for values in stored("power").values():
        any_mechanism, curve = values["medians"].values()
        ideal = simulated(values["epsilon"], values["canaries"], values["runs"])
        lines.append(
            f"| {values['epsilon']:g} | {values['canaries']} | {values['runs']} "
            f"| {any_mechanism:.2f} | {ideal:.2f} | {curve:.2f} |"
        )
    return "\n".join([*lines, *_of_bugs(), ""])


def _of_bugs() -> list[str]:
    """Return the section about planted bugs; nothing if they were not audited."""
    bugs = stored("bugs")
    if not bugs:
        return []
    lines = [
        "",
        "## Planted bugs",
        "",
        "Bugs patched into the library's code; the comparison with the plan (`conformance`, 1,000",
        "canaries, ε = 1 and 3, false alarms 0.001) is not told of them. Seconds: the longest",
        "audit, on one core.",
        "",
        "| bug | audits | alarms | seconds | comparisons that fail most often |",
        "|---|---|---|---|---|",
    ]
    for name, found in bugs.items():
        finders = ", ".join(f"{check} ({count})" for check, count in found["found by"].items())
        lines.append(
            f"| {name} | {found['audits']} | {found['caught']} | {found['seconds']:.1f} "
            f"| {finders or '–'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="bugs, methods, power")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    if "bugs" in options.parts:
        for bug in (*planted_bugs.BUGS, None):
            name = "none" if bug is None else bug.__name__.replace("_", " ")
            if name not in stored("bugs"):
                keep("bugs", name, audit_bug(bug))
    if "power" in options.parts:
        for epsilon, canaries in CELLS:
            if f"{epsilon} {canaries}" not in stored("power"):
                keep(
                    "power", f"{epsilon} {canaries}", power(float(epsilon), canaries, options.runs)
                )
    if "methods" in options.parts:
        for name in METHODS:
            if name not in stored("methods"):
                keep("methods", name, audit_method(name, options.runs))
    write_text(RESULTS / "index.md", index())


if __name__ == "__main__":
    main()
