"""Compare the time and memory of private steps (ours and others') with those of a plain step.

    python benchmarks/step.py                        # all models, all contenders
    python benchmarks/step.py --quick --models mlp,mnist --json out.json
    python benchmarks/step.py --cpu --contenders "ours,owners of 8,owners of 1 to 8"

Time: all contenders for a model run interleaved in one process, in turns of a tenth of a second.
The figure is the ratio of each contender's fastest turn to the fastest turn of the plain
(contiguous, non-private) step. Memory: peak resident memory of a process that only takes a few
steps with one contender. A step consists of forward pass, backward pass and update; private steps
also clip to norm 1 and add Gaussian noise. On a busy machine, measure the CPU time of one thread
(`--cpu`), which does not include waiting for a core.

Contenders: plain, plain-cl (channels-last), shared-cl (the part of plain-cl that a private step
shares), ours, lean (ours with less memory), owners (ours with whole owners as the unit, at the same
number of records), the Opacus modes hooks, ew, functorch and ghost, and vmap (torch.func per-record
gradients). Where a mode does not support a model, its cell says "-". With `--peers`, jax_privacy
and TensorFlow Privacy are timed as well (`benchmarks/peers.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from models import CASES, Criterion, build, loss_of

CLIP, NOISE, RATE, THREADS = 1.0, 1.0, 0.01, 2
TURN = 0.1
Step = Callable[[], None]
Clock = Callable[[], float]


def plain(name: str, channels_last: bool = False) -> Step:
    model, x, y = build(name)
    if channels_last:
        if x.dim() != 4:
            raise NotImplementedError("no images")
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(trained(model), lr=RATE)
    criterion = loss_of(name)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def shared(name: str) -> Step:
    """Return what plain and private steps have in common: a plain one without weight gradients.

    Images are in channels-last. The first layer's input needs no gradient, but its output does.
    """
    model, x, y = build(name)
    if x.dim() != 4:
        raise NotImplementedError("no images")
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    first = next(layer for layer in model.modules() if not list(layer.children()))
    first.register_forward_hook(lambda layer, inputs, output: output.requires_grad_())
    criterion = loss_of(name)
    return lambda: criterion(model(x), y).backward()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_plan(batch: int) -> ow.Plan:
    owners = ow.Owners(np.zeros(batch, dtype=int), {0: 8.0}, 1e-7, records=[1_000_000])
    return ow.plan(owners, "uniform", steps=100_000, batch_size=batch, clip_norm=CLIP)


def ours(name: str, **options: Any) -> Step:
    """Return this library's private step, with secret noise and per-owner clip norms."""
    model, x, y = build(name)
    plan = make_plan(len(x))
    optimizer = torch.optim.SGD(trained(model), lr=RATE)
    step = ow.PrivateStep(model, plan, optimizer, loss_of(name), **options)
    indices = np.arange(len(x))
    owner_index = np.zeros(len(x), dtype=np.int64)
    return lambda: step(ow.Batch(step.steps_spent, indices, owner_index, (x, y)))


def owners(name: str, *sizes: int) -> Step:
    """Return the private step with owners as the unit: owners of these sizes in turn."""
    model, x, y = build(name)
    owner_index = np.repeat(np.arange(len(x)), np.resize(sizes, len(x)))[: len(x)]
    count = int(owner_index[-1]) + 1
    budgets = dict.fromkeys(range(count), 8.0)
    of_rows = ow.Owners(owner_index, budgets, 1e-7)
    plan = ow.plan(
        of_rows, "uniform", unit="owner", steps=100_000, batch_size=count, clip_norm=CLIP,
        records_per_owner=None,
    )  # fmt: skip
    optimizer = torch.optim.SGD(trained(model), lr=RATE)
    step = ow.PrivateStep(model, plan, optimizer, loss_of(name))
    rows = np.arange(len(x)), owner_index
    return lambda: step(ow.Batch(step.steps_spent, *rows, (x, y), by_owner=True))


def opacus(name: str, mode: str) -> Step:
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    model, x, y = build(name)
    model = ModuleValidator.fix(model)
    optimizer = torch.optim.SGD(trained(model), lr=RATE)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
    criterion = Criterion()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    if mode == "ghost":
        private, private_optimizer, criterion, _ = made
    else:
        private, private_optimizer, _ = made

    def step() -> None:
        private_optimizer.zero_grad()
        criterion(private(x), y).backward()
        private_optimizer.step()

    return step


def vmap(name: str) -> Step:
    model, x, y = build(name)
    optimizer = torch.optim.SGD(trained(model), lr=RATE)
    criterion = loss_of(name)

    def loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (record[None],))
        return criterion(output, target[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        parameters = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}
        gradients = each(parameters, x, y)
        squares = [g.flatten(1).square().sum(dim=1) for g in gradients.values()]
        norms = torch.stack(squares).sum(dim=0).sqrt_()
        factors = (CLIP / norms).clamp_(max=1).div_(len(y))
        for key, parameter in model.named_parameters():
            if key not in gradients:
                continue
            total = torch.tensordot(factors, gradients[key], dims=1)
            parameter.grad = total + torch.randn_like(total) * (NOISE * CLIP / len(y))
        optimizer.step()

    return step


CONTENDERS: dict[str, Callable[[str], Step]] = {
    "plain": plain,
    "plain-cl": lambda name: plain(name, channels_last=True),
    "shared-cl": shared,
    "ours": ours,
    "lean": lambda name: ours(name, performance=ow.Performance(lean=True)),
    "owners of 8": lambda name: owners(name, 8),
    "owners of 1 to 8": lambda name: owners(name, 1, 8, 3, 5, 2, 7, 4, 6),
    "opacus hooks": lambda name: opacus(name, "hooks"),
    "opacus ew": lambda name: opacus(name, "ew"),
    "opacus functorch": lambda name: opacus(name, "functorch"),
    "opacus ghost": lambda name: opacus(name, "ghost"),
    "vmap": vmap,
}


def start(contender: str, name: str) -> Step | str:
    """Return the step after two warm-up runs, or the reason why there is none."""
    try:
        step = CONTENDERS[contender](name)
        step()
        step()
    except Exception as error:  # a mode that does not support the model says so in its own way
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return step


def interleaved(
    steps: dict[str, Step], seconds: float, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Return each contender's seconds per step in every turn; contenders take turns.

    A turn lasts TURN seconds: some contenders prepare work for later steps, and the time of a
    single step would not include it.
    """
    turns = {key: _steps_per_turn(step) for key, step in steps.items()}
    found: dict[str, list[float]] = {key: [] for key in steps}
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        for key, step in steps.items():
            begin = clock()
            for _ in range(turns[key]):
                step()
            found[key].append((clock() - begin) / turns[key])
        done += 1
    return found


def _steps_per_turn(step: Step) -> int:
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < TURN:
        step()
        count += 1
    return count


def peak_memory(contender: str, name: str) -> float | None:
    """Return the peak resident memory of a separate process, in megabytes."""
    command = [sys.executable, __file__, "--memory-of", contender, "--models", name]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    return float(answer.stdout.split()[-1]) if answer.returncode == 0 else None


def report_memory(contender: str, name: str) -> int:
    """In the child process: take a few steps and print the peak memory of these steps alone."""
    make_plan(len(build(name)[1]))  # so that every process has loaded and left behind the same
    step = start(contender, name)
    if isinstance(step, str):
        return 1
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return the memory used for planning
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(3):
        step()
    # not ru_maxrss: that survives exec, so a child would show its parent's peak
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    print(int(kilobytes) / 1024)
    return 0


def measure(
    name: str,
    contenders: list[str],
    seconds: float,
    rounds: int,
    clock: Clock,
    memory: bool = True,
) -> dict[str, Any]:
    started = {contender: start(contender, name) for contender in contenders}
    steps = {k: v for k, v in started.items() if not isinstance(v, str)}
    turns = interleaved(steps, seconds, rounds, clock)
    seconds_of = {key: min(found) for key, found in turns.items()}
    del steps
    result: dict[str, Any] = {}
    for contender, step in started.items():
        if isinstance(step, str):
            result[contender] = {"refused": step}
            continue
        result[contender] = {
            "milliseconds": 1e3 * seconds_of[contender],
            "median": 1e3 * statistics.median(turns[contender]),
            "ratio": seconds_of[contender] / seconds_of["plain"],
            "megabytes": peak_memory(contender, name) if memory else None,
        }
    base = result["plain"]["megabytes"]
    for entry in result.values():
        if entry.get("megabytes") and base:
            entry["memory_ratio"] = entry["megabytes"] / base
    return result


def peers(pythons: str | None, name: str) -> str:
    """Return the figures of libraries that need their own environments, or why there are none."""
    if pythons is None:
        return f"{name}: no peers; benchmarks/peers.py says how to install them"
    lines = []
    for python in pythons.split(","):
        command = [python, str(Path(__file__).with_name("peers.py")), name]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            lines.append(f"{name}: no peers; {answer.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(answer.stdout.splitlines()[-1])
        for plain in (True, False):
            times = {k: v for k, v in found.items() if k.startswith("plain") == plain}
            if times:
                fastest = min(times, key=lambda k: times[k])
                lines.append(f"{name}: {fastest} {times[fastest]:.2f} ms")
    return "\n".join(lines)


def table(results: dict[str, dict[str, Any]]) -> str:
    contenders = list(dict.fromkeys(c for result in results.values() for c in result))
    lines = ["| model | plain ms, MB | " + " | ".join(contenders[1:]) + " |"]
    lines.append("|---" * (len(contenders) + 1) + "|")
    for name, result in results.items():
        base = result["plain"]
        cells = [name, f"{base['milliseconds']:.2f}, {base['megabytes'] or 0:.0f}"]
        for contender in contenders[1:]:
            entry = result.get(contender, {"refused": ""})
            if "refused" in entry:
                cells.append("-")
            else:
                cells.append(f"{entry['ratio']:.2f} ({entry.get('memory_ratio', 0):.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "ratio of minima to plain time (peak resident memory to plain)"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="a few seconds per model")
    parser.add_argument("--time-only", action="store_true", help="do not measure memory")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread")
    parser.add_argument("--peers", metavar="PYTHONS", help="of their environments, with commas")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    threads = 1 if arguments.cpu else THREADS
    torch.set_num_threads(threads)
    clock = time.process_time if arguments.cpu else time.perf_counter
    names = arguments.models.split(",")
    if arguments.memory_of:
        return report_memory(arguments.memory_of, names[0])
    contenders = [c for c in CONTENDERS if c in arguments.contenders.split(",") or c == "plain"]
    seconds, rounds = (4.0, 3) if arguments.quick else (30.0, 8)
    results = {}
    for name in names:
        memory = not arguments.time_only
        results[name] = measure(name, contenders, seconds, rounds, clock, memory)
        print(table({name: results[name]}).splitlines()[2], flush=True)
        print(peers(arguments.peers, name), flush=True)
    print(table(results))
    if arguments.json:
        facts = {"torch": torch.__version__, "threads": threads, "results": results}
        arguments.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
