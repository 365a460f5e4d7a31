"""Measure the time to train a linear head on fixed features of CIFAR-10, as in the results.

    OWNERWISE_DATA=... OWNERWISE_CACHE=... python benchmarks/fixed_features.py [--json OUT]

Trains one seed of IDP-SGD for each row of IDP-SGD's Table 2, and DP-SGD, without pretraining. The
features should be in the folder that OWNERWISE_CACHE names, so that they are only read; reading
them is not part of the times. One thread; fixed seed, NOT PRIVATE.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ownerwise_reproduction import methods, settings
from ownerwise_reproduction.population import populate
from ownerwise_reproduction.trials import Trial, run_trial

SCALE = ('plan.method="scale"',)
ROWS = {
    "DP-SGD": ("IDP-CIFAR10-A-PF", "uniform", ()),
    "34 / 43 / 23 %, Sample": ("IDP-CIFAR10-A-PF", "idp", ()),
    "34 / 43 / 23 %, Scale": ("IDP-CIFAR10-A-PF", "idp", SCALE),
    "54 / 37 / 9 %, Sample": ("IDP-CIFAR10-B-PF", "idp", ()),
    "54 / 37 / 9 %, Scale": ("IDP-CIFAR10-B-PF", "idp", SCALE),
}


def measure(setting: str, method: str, changes: tuple[str, ...]) -> dict[str, float]:
    trial = Trial(settings.setting(setting), methods.parse(method)[0], 0, changes=changes)
    populate(trial.config)  # reads the features, which later runs reuse
    with TemporaryDirectory() as folder:
        since, since_cpu = time.perf_counter(), time.process_time()
        result = run_trial(trial, folder)
        seconds, cpu = time.perf_counter() - since, time.process_time() - since_cpu
    return {
        "training": result["train_seconds"],
        "with plan and evaluation": seconds,
        "processor time": cpu,
        "accuracy": result["final"]["accuracy"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name, row in ROWS.items():
        rows[name] = measure(*row)
        print(
            name, ", ".join(f"{key} {value:.3g}" for key, value in rows[name].items()), flush=True
        )
    if options.json is not None:
        described = {"python": platform.python_version(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(described, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
