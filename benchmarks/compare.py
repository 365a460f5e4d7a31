"""Compare the speed of the private step in this checkout with that in another checkout.

    python benchmarks/compare.py OTHER_CHECKOUT                     # all models
    python benchmarks/compare.py OTHER_CHECKOUT --models mlp,lstm --quick

Each checkout runs in its own process, with its own `src` and models. The two processes take turns
of about a tenth of a second, so noise on the machine affects both. A ratio below 1 means that this
checkout is faster. On a busy machine, rely on the fastest turns and repeat the comparison, or
measure the CPU time of one thread (`--cpu`), which does not include waiting for a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
MODELS = "mlp,mnist,cifar,lstm,transformer,resnet18"
TURN = 0.1
# Whether malloc returns freed memory to the system varies by chance between processes and changes
# the time of a step by a tenth, so both processes are set to keep it.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


class Worker:
    """A process that takes turns on one checkout."""

    def __init__(self, checkout: Path, options: list[str]) -> None:
        paths = [str(checkout / part) for part in ("src", "reproduction/src", "benchmarks")]
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", str(checkout), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def ask(self, *words: object) -> float:
        """Send a command, and return the number received in reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker stopped at {words}; its error is printed above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(checkout: Path, cpu: bool) -> None:
    """In the worker process: prepare models and time turns on the parent's command."""
    import warnings

    import torch

    import ownerwise
    import step as benchmark

    if not Path(ownerwise.__file__).resolve().is_relative_to(checkout):
        raise RuntimeError(f"ownerwise was imported from {ownerwise.__file__}, not {checkout}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1 if cpu else 2)
    clock = time.process_time if cpu else time.perf_counter
    answers, sys.stdout = sys.stdout, sys.stderr
    run = None
    for line in sys.stdin:
        command, argument = line.split()
        if command == "prepare":
            run = benchmark.ours(argument)
            seconds = min(_seconds(run, 1, clock) for _ in range(5))  # the first runs warm up
        else:
            assert run is not None
            seconds = _seconds(run, int(argument), clock)
        print(seconds, file=answers, flush=True)


def _seconds(run: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(steps):
        run()
    return (clock() - begin) / steps


def compare(new: Worker, old: Worker, name: str, seconds: float) -> str:
    """Return one row of the table: fastest and median turns of both checkouts, and their ratios."""
    single = min(worker.ask("prepare", name) for worker in (new, old))
    steps = max(1, round(TURN / single))
    turns: dict[Worker, list[float]] = {new: [], old: []}
    end = time.perf_counter() + seconds
    order = [new, old]
    while time.perf_counter() < end or len(turns[new]) < 5:
        for worker in order:
            turns[worker].append(worker.ask("turn", steps))
        order.reverse()
    cells = [name]
    for figure in (min, statistics.median):
        first, second = 1e3 * figure(turns[new]), 1e3 * figure(turns[old])
        cells += [f"{first:.2f}", f"{second:.2f}", f"{first / second:.3f}"]
    return "| " + " | ".join([*cells, str(len(turns[new]))]) + " |"


def main() -> int:
    """Compare the checkouts on every requested model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare with")
    parser.add_argument("--models", default=MODELS, help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="a few seconds per model")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.cpu)
        return 0
    if arguments.other is None:
        parser.error("specify the checkout to compare with")
    options = ["--cpu"] if arguments.cpu else []
    new, old = Worker(HERE, options), Worker(arguments.other.resolve(), options)
    print("| model | fastest: new ms | old ms | ratio | median: new ms | old ms | ratio | turns |")
    print("|---" * 8 + "|")
    try:
        for name in arguments.models.split(","):
            print(compare(new, old, name, 6.0 if arguments.quick else 30.0), flush=True)
    finally:
        for worker in (new, old):
            worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
