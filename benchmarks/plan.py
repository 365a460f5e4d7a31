"""Measure planning time for 10 to 1,000,000 owners with distinct budgets.

    python benchmarks/plan.py [--owners 1000000] [--json OUT]
    python benchmarks/plan.py --unit owner --sampling record

Every case runs in its own process, so its peak memory is measured separately. For each method, it
prints the time to plan, to verify, and to read epsilon for all owners after half of the steps, and
the ratio to the same method with 10 owners; "all CPU s" is the processor time of `plan()`, with the
verification and without waiting for a core. For comparison, it also prints the time to find one
owner's multiplier by bisection with a public accountant. With `--unit owner`, owners have 1 to 100
records and a single delta.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

STEPS, BATCH_SHARE = 2000, 0.01
METHODS = ("uniform", "sample", "scale", "both")


def measure(method: str, count: int, unit: str, sampling: str) -> dict:
    import numpy as np

    from ownerwise import Owners, plan

    rng = np.random.default_rng(0)
    epsilon = np.exp(rng.uniform(np.log(0.1), np.log(10.0), count))
    delta = rng.choice([1e-9, 3e-9, 1e-8], count)
    records = np.full(count, max(1, 1_000_000 // count))
    if unit == "owner":
        delta, records = 1e-9, rng.integers(1, 101, count)
    elements = count if sampling == "owner" else records.sum()
    owners = Owners(np.arange(count), epsilon, delta, records=records)
    start, start_cpu = time.perf_counter(), time.process_time()
    made = plan(
        owners,
        method,
        steps=STEPS,
        batch_size=BATCH_SHARE * elements,
        unit=unit,
        sampling=sampling,
    )
    planned, planned_cpu = time.perf_counter(), time.process_time()
    verification = made.verify()  # plan() also verifies; this second time is subtracted
    verified = time.perf_counter()
    read = made.epsilon(steps=STEPS // 2)
    spent = time.perf_counter()
    ratio = made.epsilon() / epsilon
    assert (read < made.epsilon()).all()
    assert (ratio <= 1.0).all()
    if method != "uniform":
        free = made.sampling_rates < 0.99  # at rate 1, part of a budget may remain
        assert (ratio[free] >= (0.995 if sampling == unit else 0.99)).all()
    return {
        "method": method,
        "owners": count,
        "plan_seconds": (planned - start) - (verified - planned),
        "cpu_seconds": planned_cpu - start_cpu,
        "epsilon_seconds": spent - verified,
        "verify_seconds": verified - planned,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "lowest_spent_over_target": float(ratio.min()),
        "highest_spent_over_target": float(ratio.max()),
        "verification": str(verification),
    }


def one_owner_by_public_loop() -> float:
    """Return seconds to find ONE owner's multiplier by bisecting dp-accounting's accountant."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    start = time.perf_counter()
    dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-4),
        lambda sigma: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(BATCH_SHARE, dp_accounting.GaussianDpEvent(sigma)),
            STEPS,
        ),
        target_epsilon=1.0,
        target_delta=1e-8,
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owners", type=int, default=1_000_000)
    parser.add_argument("--counts", type=int, nargs="+", help="numbers of owners, instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--unit", default="record", choices=("record", "owner"))
    parser.add_argument("--sampling", choices=("record", "owner"), help="by default, the unit")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    drawn = options.unit, options.sampling or options.unit
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]), *drawn)))
        return
    counts = [10]
    while counts[-1] < options.owners:
        counts.append(1000 if counts[-1] == 10 else counts[-1] * 10)
    counts = options.counts or counts
    results = []
    print(
        f"{'method':8} {'owners':>9} {'plan s':>8} {'x of 10':>8} {'all CPU s':>9} "
        f"{'epsilon s':>10} {'verify s':>9} {'peak MB':>8}  spent / target"
    )
    for method in METHODS:
        for count in counts:
            command = [sys.executable, __file__, "--unit", drawn[0], "--sampling", drawn[1]]
            command += ["--case", method, str(count)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = json.loads(output.splitlines()[-1])
            base = next(r for r in [*results, result] if r["method"] == method)
            result["times_of_10_owners"] = result["plan_seconds"] / base["plan_seconds"]
            results.append(result)
            print(
                f"{method:8} {count:9d} {result['plan_seconds']:8.2f} "
                f"{result['times_of_10_owners']:8.1f} {result['cpu_seconds']:9.2f} "
                f"{result['epsilon_seconds']:10.2f} "
                f"{result['verify_seconds']:9.2f} {result['peak_megabytes']:8.0f}  "
                f"{result['lowest_spent_over_target']:.4f} to "
                f"{result['highest_spent_over_target']:.4f}",
                flush=True,
            )
    loop = one_owner_by_public_loop()
    print(f"one owner by bisecting dp-accounting: {loop:.2f} s "
          f"({loop * counts[-1] / 86400:.0f} days for {counts[-1]} owners)")  # fmt: skip
    if options.json:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        document = {"machine": machine, "results": results, "one_owner_public_loop_seconds": loop}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
