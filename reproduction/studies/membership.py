"""Membership inference per budget group: IDP-SGD against INO-SGD, with the papers' attack (LiRA).

    python reproduction/studies/membership.py cifar10 mnist

Settings: a pool of 20,000 training records with fixed features, whose halves have two budgets at
random. Every model, target or shadow, is trained on a random half of the pool by the same plan:
CIFAR-10 with epsilon 10 and 20, as in the IDP-SGD paper (features of patches, no pretraining), and
MNIST with epsilon 1 and 5, as in the INO-SGD paper (pixels at half resolution).
Models are linear heads; the last setting of each data set trains networks with a hidden layer.
512 shadow models and five targets; targets are never shadow models. All methods see the same
halves and the same batches.

Figures: AUC per budget group for LiRA (online, offline, and offline with 8 shadow models) and RMIA
beside the cap from the plan; Student's t-test of the scores of one group's members against those of
the other's, as in the IDP-SGD paper; and a paired t-test of INO-SGD's AUC against IDP-SGD's over
the five targets. Fixed seeds, NOT PRIVATE. Each setting is a file in
reproduction/results/membership; index.md is written from them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

import ownerwise as ow
from ownerwise.audit import INFERENCES, Heads, Signals, membership
from ownerwise.audit.rates import auc_and_error
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text
from ownerwise.models.patches import Patches
from ownerwise.wording import up

RESULTS = Path(__file__).parents[1] / "results/membership"
POOL, TEST, SHADOWS, TARGETS = 20_000, 5000, 512, 5
STEPS, BATCH = 150, 400
BUDGETS = {"cifar10": (10.0, 20.0), "mnist": (1.0, 5.0)}
RATES = {"cifar10": 32.0, "mnist": 32.0}
PAPERS = {
    "cifar10": "IDP-SGD: .537 / .581",
    "mnist": "INO-SGD: .563 to .571 / .580 to .663",
}
FEW = 8
METHODS: dict[str, dict[str, Any]] = {
    "IDP sample": {"method": "sample"},
    "INO sample": {"method": "sample", "ino": True},
    "IDP scale": {"method": "scale"},
    "INO scale": {"method": "scale", "ino": True},
    "IDP sample, hidden layer": {"method": "sample", "hidden": (32,)},
}


def features(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the features and labels of the pool and of test records."""
    data = ow.data.load(name)
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(len(data.train))[:POOL])
    parts = []
    for records, rows in ((data.train, chosen), (data.test, slice(0, TEST))):
        assert records is not None
        inputs, labels = records.tensors()
        inputs, labels = inputs[rows], labels[rows]
        if name == "cifar10":
            encode = Patches(filters=96, components=28)
            encoded = torch.cat([encode(part) for part in inputs.split(500)])
        else:
            pixels = inputs.view(-1, 1, 28, 28)
            encoded = functional.normalize(functional.avg_pool2d(pixels, 2).flatten(1), dim=1)
        parts += [encoded, labels]
    return parts[0], parts[1], parts[2], parts[3]


def planned(name: str, method: str) -> ow.Plan:
    strict, lax = BUDGETS[name]
    epsilon = np.random.default_rng(1).permutation(np.repeat([strict, lax], POOL // 2))
    owners = ow.Owners(None, epsilon, 1e-5)
    return ow.plan(owners, method=method, steps=STEPS, batch_size=BATCH)


def attacked(
    name: str,
    data: tuple[Tensor, ...],
    *,
    method: str,
    ino: bool = False,
    hidden: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the figures of one method."""
    began = time.process_time()
    plan = planned(name, method)
    weights = ow.INO() if ino else None
    heads = Heads(data[0], data[1], plan, lr=RATES[name], hidden=hidden, weights=weights)
    shadows = Signals.of_heads(heads, SHADOWS, ow.SecretStream.from_seed(1))
    stream = ow.SecretStream.from_seed(2)
    targets = Signals.of_heads(heads, TARGETS, stream)
    first = heads.train(targets.included[:1], stream.child("accuracy"))
    (outputs,) = heads.outputs(first, data[2])
    found: dict[str, Any] = {
        "accuracy": float((outputs.argmax(1) == data[3]).float().mean()),
        "attacks": {},
    }
    for attack in INFERENCES:
        audit = membership(targets, shadows, plan, attack=attack)
        found["attacks"][attack] = _groups(audit)
    few = membership(targets, shadows.first(FEW), plan, attack="LiRA offline")
    found["attacks"][f"LiRA offline, {FEW} shadow models"] = _groups(few)
    found |= _tests(targets, shadows, plan)
    found["seconds"] = time.process_time() - began
    return found


def _groups(audit: Any) -> dict[str, Any]:
    return {
        group.name: {
            "auc": list(group.auc),
            "cap": group.cap,
            "rates": {key: list(value) for key, value in group.rates.items()},
            "rate caps": dict(group.rate_caps),
        }
        for group in audit.groups
    }


def _tests(targets: Signals, shadows: Signals, plan: ow.Plan) -> dict[str, Any]:
    """Return each target's AUC per group, and the t-test between the groups' members."""
    strict = plan.targets == plan.targets.min()
    areas: dict[str, list[float]] = {"strict": [], "lax": []}
    between = []
    for confidences, included in zip(targets.confidences, targets.included, strict=True):
        scores = INFERENCES["LiRA online"](confidences, shadows)
        for group, of_group in (("strict", strict), ("lax", ~strict)):
            pair = scores[of_group & included], scores[of_group & ~included]
            areas[group].append(auc_and_error(*pair)[0])
        test = stats.ttest_ind(scores[~strict & included], scores[strict & included])
        between.append([float(test.statistic), float(test.pvalue)])  # pyright: ignore
    return {"areas": areas, "between groups": between}


def stored(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return read_json(path, mapping_of(ANYTHING)) if path.exists() else {}


def index() -> str:
    lines = [
        "# Membership inference",
        "",
        f"LiRA and RMIA with {SHADOWS} shadow models and {TARGETS} targets; linear heads on",
        "fixed features, or networks with a hidden layer. Every model sees a random half of",
        f"{POOL:,} records; {STEPS} steps. Written by `reproduction/studies/membership.py`. Fixed",
        "seeds, NOT PRIVATE. The cap is the largest AUC that the plan permits any attack. An",
        "attack that fails proves nothing.",
        "",
        "| data | method | attack | AUC, strict (95%) | cap | AUC, lax (95%) | cap "
        "| papers, LiRA |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in BUDGETS:
        for method, found in stored(name).items():
            for attack, groups in found["attacks"].items():
                strict, lax = groups.values()
                lines.append(
                    f"| {name} | {method} | {attack} | {_area(strict)} | {up(strict['cap'], 3)} "
                    f"| {_area(lax)} | {up(lax['cap'], 3)} | {PAPERS[name]} |"
                )
    lines += [
        "",
        "Detections at 1% and 0.1% false alarms and balanced accuracy (LiRA online):",
        "",
        "| data | method | group | figure | found (95%) | cap |",
        "|---|---|---|---|---|---|",
    ]
    for name in BUDGETS:
        for method, found in stored(name).items():
            for group, values in found["attacks"]["LiRA online"].items():
                for key, (value, low, high) in values["rates"].items():
                    lines.append(
                        f"| {name} | {method} | {group} | {key} | {value:.4f} ({low:.4f} to "
                        f"{high:.4f}) | {up(values['rate caps'][key], 3)} |"
                    )
    lines += [
        "",
        "Tests. Between groups: Student's t of the members' scores, lax against strict, with p,",
        "for each target. INO against IDP: paired t-test of the AUC over the targets.",
        "",
    ]
    for name in BUDGETS:
        results = stored(name)
        for method, found in results.items():
            pairs = ", ".join(f"{t:.2f} (p = {p:.2g})" for t, p in found["between groups"])
            lines.append(
                f"- {name}, {method}: test accuracy {found['accuracy']:.3f}, "
                f"{found['seconds'] / 60:.1f} CPU minutes; between groups {pairs}"
            )
        for method in ("sample", "scale"):
            if {f"IDP {method}", f"INO {method}"} <= results.keys():
                for group in ("strict", "lax"):
                    pair = [np.array(results[f"{kind} {method}"]["areas"][group]) for kind in
                            ("INO", "IDP")]  # fmt: skip
                    test = stats.ttest_rel(pair[0], pair[1])
                    lines.append(
                        f"- {name}, {method}, {group}: AUC of INO minus IDP "
                        f"{(pair[0] - pair[1]).mean():+.4f}, p = {test.pvalue:.2g}"  # pyright: ignore
                    )
    return "\n".join([*lines, ""])


def _area(group: dict[str, Any]) -> str:
    value, low, high = group["auc"]
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(BUDGETS))
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().settings:
        data = features(name)
        for key, options in METHODS.items():
            if key not in stored(name):
                found = attacked(name, data, **options)
                write_json(RESULTS / f"{name}.json", {**stored(name), key: found})
                print(name, key, found["accuracy"], found["areas"], found["seconds"], flush=True)
    write_text(RESULTS / "index.md", index())


if __name__ == "__main__":
    main()
