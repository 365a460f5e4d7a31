"""Compare private steps in several processes with plain DDP, and with one process of more threads.

    python benchmarks/distributed.py                     # bytes, time and shares
    python benchmarks/distributed.py --quick --models mlp
    python benchmarks/distributed.py --json benchmarks/results/distributed.json

Bytes: what each process sends in one step of a model of more than a million parameters, computed
from the tensors that are passed to torch.distributed (or to DistributedDataParallel's hook), for a
ring: 2 (W - 1) / W times the size of a tensor that is added, and W - 1 times one that is gathered.
The step is the most talkative one, with INO weights.

Time: the median time of a step in two processes of one thread each, relative to one process of two
threads, in alternating turns on the same batches. Needs an idle machine with two cores.

Shares: the records that each process has computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ownerwise as ow
from models import build

LARGE = 1024  # a square layer of this width has more than a million parameters


def traffic(count: int, added: int, gathered: int) -> float:
    """Return the bytes that each process of a ring sends."""
    return 2 * (count - 1) / count * added + (count - 1) * gathered


def counted(step: Callable[[], None], count: int) -> float:
    """Return the bytes that this process sends during a step."""
    sizes = {"added": 0, "gathered": 0}
    real = dist.all_reduce, dist.all_gather

    def all_reduce(tensor: torch.Tensor, **options: Any) -> Any:
        sizes["added"] += tensor.nbytes
        return real[0](tensor, **options)

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        sizes["gathered"] += tensor.nbytes
        return real[1](parts, tensor, **options)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        step()
    finally:
        dist.all_reduce, dist.all_gather = real
    return traffic(count, **sizes)


def bytes_of_ddp(model: nn.Module, x: torch.Tensor, y: torch.Tensor, count: int) -> float:
    """Return the bytes that this process sends for one ordinary step."""
    wrapped, sizes = DistributedDataParallel(model), []

    def hook(state, bucket):  # torch reads annotations, which must be classes
        sizes.append(bucket.buffer().nbytes)
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()  # type: ignore[union-attr]
        return done.then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, hook)
    functional.cross_entropy(wrapped(x), y).backward()
    return traffic(count, sum(sizes), 0)


def run_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    """Return a step and its batches, with an expected batch of half of the records."""
    owners = ow.Owners(np.resize(["a", "b"], len(x)), {"a": 4.0, "b": 8.0}, delta=1e-6)
    plan = ow.plan(owners, steps=500, batch_size=len(x) // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = ow.SecretStream()
    step = ow.PrivateStep(
        model, plan, optimizer, functional.cross_entropy, stream=stream, **options
    )
    return step, iter(ow.PoissonBatches((x, y), plan, stream=stream))


def compare_bytes(rank: int, count: int) -> dict[str, float]:
    x, y = torch.randn(1024, LARGE), torch.randint(0, LARGE, (1024,))
    model = nn.Sequential(nn.Linear(LARGE, LARGE))
    plain = bytes_of_ddp(model, x, y, count)
    step, batches = run_of(model, x, y, weights=ow.INO())
    step(next(batches))  # at the first steps, the weights are compared as well
    step(next(batches))
    step(next(batches))
    batch = next(batches)
    private = counted(lambda: step(batch), count)
    return {"plain": plain, "private": private, "ratio": private / plain}


def timed(rank: int, count: int, name: str, steps: int) -> dict[str, Any]:
    model, x, y = build(name)
    step, batches = run_of(model, torch.cat([x, x]), torch.cat([y, y]))
    seconds, rows = [], 0
    for _ in range(3):
        step(next(batches))
    for _ in range(steps):
        batch = next(batches)
        rows += len(batch)
        since = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - since)
    return {"seconds": statistics.median(seconds), "records": rows}


def _worker(rank: int, function: Any, count: int, threads: int, place: str, given: tuple) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if count > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/store", rank=rank, world_size=count
        )
    found = function(rank, count, *given)
    Path(place, f"{rank}.json").write_text(json.dumps(found))
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def in_processes(function: Any, count: int, threads: int, *given: Any) -> list[dict[str, Any]]:
    """Return what the function returns in each process."""
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(_worker, (function, count, threads, place, given), nprocs=count)  # type: ignore[attr-defined]
        return [json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mlp,mnist,cifar", help="see benchmarks/models.py")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one turn of five steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    turns, steps = (1, 5) if options.quick else (options.turns, options.steps)
    results: dict[str, Any] = {"bytes": {}, "time": {}}
    for count in (2, 4):
        found = in_processes(compare_bytes, count, 1)[0]
        results["bytes"][count] = found
        print(
            f"bytes, {count} processes: {found['ratio']:.5f} of plain DDP ({found['private']:,.0f})"
        )
    for name in options.models.split(","):
        ratios, shares = [], []
        for _ in range(turns):
            (alone,) = in_processes(timed, 1, 2, name, steps)
            both = in_processes(timed, 2, 1, name, steps)
            ratios.append(max(each["seconds"] for each in both) / alone["seconds"])
            shares.append([each["records"] for each in both])
        results["time"][name] = {"ratios": ratios, "records": shares}
        print(
            f"time, {name}: two processes {statistics.median(ratios):.3f} of two threads "
            f"({min(ratios):.3f} to {max(ratios):.3f}); records of each: {shares[0]}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
