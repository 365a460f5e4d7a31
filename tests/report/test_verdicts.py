"""Key figures, findings and captions say the same about every difference, whatever the numbers."""

import re

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.report import figures
from ownerwise.report.blocks import Findings, Tiles
from ownerwise.report.comparison import METRICS, Comparison, difference
from ownerwise.report.overview import findings, overview
from ownerwise.report.verdicts import UNTESTED, WITHIN_CHANCE, pairs, plainer, rival, verdict
from tools.report_tools import INO_SETTINGS, evaluation, made_run, small_plan

GROUPS = {"a": 0.5, "b": 0.8, "c": 1.5, "d": 3.0, "e": 5.0, "f": 8.0}
TITLES = {metric.title.lower(): metric for metric in METRICS}
CHANGE = r"(?P<change>[+−]?[\d.]+ points(?: \(\S+ to \S+\))?)"
TILE = re.compile(rf"(?P<method>.+?); {CHANGE} vs (?P<other>.+?): (?P<verdict>[^;(]+)")
HALF = re.compile(
    rf"(?P<method>[\w -]+): [^;]+; stricter half of the groups: {CHANGE}, (?P<verdict>[^.]+)\."
)


def calibrated_plan() -> ow.Plan:
    return small_plan(calibration=ow.Calibration())


METHODS = {
    "DP-SGD": {"plan": lambda: small_plan("uniform"), "weights": None},
    "IDP-SGD": {"plan": small_plan, "weights": None},
    "INO-SGD": {"plan": small_plan, "weights": INO_SETTINGS},
    "calibrated": {"plan": calibrated_plan, "weights": None},
}


def random_runs(rng: np.random.Generator, labels, seeds: int, split: bool) -> list:
    """Runs whose recalls and accuracies are drawn, with differences of any size and sign."""
    runs = []
    level = rng.uniform(0.3, 0.8, len(GROUPS))
    size = rng.choice([0.0, 0.002, 0.02, 0.1])
    for label in labels:
        lift, noise = rng.normal(0, size, len(GROUPS)), rng.choice([0.001, 0.02, 0.08])
        for seed in range(seeds):
            given = METHODS[label]
            options = {"split": str(seed)} if split else {}
            run = made_run(
                label, seed=seed, plan=given["plan"](), weights=given["weights"],
                budgets=GROUPS, evaluations=2, **options,
            )  # fmt: skip
            recalls = (level + lift + rng.normal(0, noise, len(GROUPS))).clip(0, 1)
            last = evaluation(dict(zip(GROUPS, recalls, strict=True)), dict.fromkeys(GROUPS, 1.0))
            last["accuracy"] = float(np.clip(rng.normal(recalls.mean(), noise), 0, 1))
            run.history[-1]["validation"] = last
            runs.append(run)
    return runs


def outcome_in(finding: str, change: str, metric: str) -> str:
    """What a finding says of a metric: the word of the list in which it stands."""
    for part in re.split(r"\. (?=[A-Z])", finding):
        if f"{metric} {change}" in part:
            return part.split(":")[0].lower()
    return "absent"


SAME = {
    "gained": ("gained",),
    "lost": ("lost",),
    WITHIN_CHANCE: (f"unchanged or {WITHIN_CHANCE}",),
    UNTESTED: ("better here", "worse here", f"unchanged or {WITHIN_CHANCE}"),
}


@pytest.mark.parametrize("seed", range(60))
def test_tiles_findings_and_captions_agree_on_random_results(seed):
    rng = np.random.default_rng(seed)
    labels = list(rng.permutation(list(METHODS)))[: rng.integers(2, 5)]
    seeds = int(rng.integers(1, 5))
    runs = random_runs(rng, labels, seeds, split=bool(rng.integers(2)) and seeds > 1)
    comparison = Comparison.of(runs)
    found = findings(comparison)
    blocks = overview(comparison)
    assert dict(next(b for b in blocks if isinstance(b, Findings)).items) == found
    compared = 0
    for tile in next(block for block in blocks if isinstance(block, Tiles)).tiles:
        said = TILE.search(tile.note)
        if said is None:
            assert " vs " not in tile.note
            continue
        compared += 1
        pair = f"{said['method']} vs {said['other']}"
        word = said["verdict"].strip()
        if said["method"] == "INO-SGD" and "IDP-SGD" in labels:
            plain = [m for m in comparison.methods if m.label in ("IDP-SGD", "DP-SGD")]
            metric = TITLES[tile.name]
            best = max(plain, key=lambda m, by=metric: comparison.amounts(m, by).mean).label
            assert said["other"] == best  # nothing that plain budgets give is credited to INO
        if pair in found:
            assert outcome_in(found[pair], said["change"], tile.name) in SAME[word], (tile, found)
    assert compared or len(comparison.methods) > 2  # the baseline of several may lead
    caption = figures.gain_against_budget(comparison).caption
    assert " p = " not in caption
    assert " p < " not in caption
    for said in HALF.finditer(caption):
        pair = f"{said['method'].strip()} vs {comparison.baseline.label}"
        if pair in found:
            assert outcome_in(found[pair], said["change"], "stricter half") in SAME[said["verdict"]]
    for words in found.values():
        nothing = "Nothing gained beyond chance." in words
        assert nothing != bool(re.search(r"\b(Gained|Better here):", words))


def of(*labels, **options) -> Comparison:
    rng = np.random.default_rng(0)
    return Comparison.of(random_runs(rng, labels, **{"seeds": 3, "split": False, **options}))


def named(comparison):
    return {method.label: method for method in comparison.methods}


def test_what_each_method_builds_on():
    comparison = of(*METHODS)
    methods = named(comparison)
    builds_on = {name: [m.label for m in plainer(comparison, m)] for name, m in methods.items()}
    assert builds_on == {
        "DP-SGD": [],
        "IDP-SGD": ["DP-SGD"],
        "INO-SGD": ["IDP-SGD", "DP-SGD"],
        "calibrated": ["IDP-SGD", "DP-SGD"],
    }
    assert [(a.label, b.label) for a, b in pairs(comparison)] == [
        ("IDP-SGD", "DP-SGD"),
        ("INO-SGD", "IDP-SGD"),
        ("calibrated", "IDP-SGD"),
    ]


def test_the_rival_is_the_best_plainer_method_by_the_metric_at_hand():
    runs = [run for label in ("DP-SGD", "IDP-SGD", "INO-SGD")
            for run in random_runs(np.random.default_rng(0), [label], 3, split=False)]  # fmt: skip
    levels = {"DP-SGD": (0.7, 0.3), "IDP-SGD": (0.8, 0.1), "INO-SGD": (0.81, 0.12)}
    for run in runs:
        last = run.history[-1]["validation"]
        last["accuracy"], last["worst_group"]["recall"] = levels[run.label]
    comparison = Comparison.of(runs)
    ino = named(comparison)["INO-SGD"]
    by_metric = {m.key: rival(comparison, ino, m).label for m in METRICS if m.key in
                 ("accuracy", "worst")}  # fmt: skip
    assert by_metric == {"accuracy": "IDP-SGD", "worst": "DP-SGD"}


def test_two_causes_are_not_told_apart_without_the_method_in_between():
    words = findings(of("DP-SGD", "INO-SGD"))["INO-SGD vs DP-SGD"]
    assert words.startswith("This is the effect of individual budgets and weights together.")
    tiles = next(b for b in overview(of("DP-SGD", "INO-SGD")) if isinstance(b, Tiles))
    assert any("individual budgets and weights together" in tile.note for tile in tiles.tiles)
    assert "together" not in str(findings(of("DP-SGD", "IDP-SGD", "INO-SGD")))


def test_a_difference_that_shows_as_zero_is_no_gain():
    runs = random_runs(np.random.default_rng(1), ["IDP-SGD", "INO-SGD"], 3, split=False)
    for run in runs:
        run.history[-1]["validation"]["accuracy"] = 0.5 + 0.0004 * (run.label == "INO-SGD")
    comparison = Comparison.of(runs)
    change = difference(comparison, comparison.others[0], comparison.baseline, METRICS[0])
    assert change.clear
    assert verdict(change) == WITHIN_CHANCE
