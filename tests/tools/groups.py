"""Processes of a group for tests: they run a function with gloo, and return its results."""

import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.processes import fresh_processes

SECONDS = 120  # on a busy machine; a group that hangs ends after this time


def in_group(function: Callable, count: int, *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returns in each process of a group.

    The function is defined at the top of a module. An error in any process is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _started(function, count, Path(folder), arguments)
    for result in results:
        if isinstance(result, _Failure):
            raise AssertionError(f"a process failed:\n{result.text}")
    return results


class _Failure:
    def __init__(self, text: str):
        self.text = text


def _started(function: Callable, count: int, folder: Path, arguments: tuple) -> list[Any]:
    context = fresh_processes(function.__module__)
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(
            target=_run, args=(function, rank, count, folder / "store", pipes[rank][1], arguments)
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(SECONDS):
                raise TimeoutError(f"process {rank} of {count} hangs")
            try:
                results.append(pickle.loads(receiver.recv_bytes()))
            except EOFError:
                results.append(None)  # it was killed
        return results
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _run(function, rank, count, store, sender, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    try:
        result = function(*arguments)
    except BaseException:
        result = _Failure(traceback.format_exc())
    sender.send_bytes(pickle.dumps(result))  # tensors by value: this process ends
    sender.close()
    dist.destroy_process_group()
