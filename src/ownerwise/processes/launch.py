"""Processes that torchrun has started: how many there are, and how they find each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ownerwise.processes.group import Processes


def launched_processes() -> int:
    """Return how many processes torchrun started, or 1."""
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def speaks() -> bool:
    """Return whether this process prints what all of them know: torchrun's first one does."""
    return launched_processes() == 1 or os.environ.get("RANK", "0") == "0"


def release_problems(what: str) -> list[str]:
    """Return a problem unless this process may make a release that is not the step's.

    Several processes that run the same script would each make it, with noise of their own.

    Args:
        what: what is released, for the message.
    """
    if speaks() and Processes.here().first:
        return []
    return [
        f"{what} in several processes: each of them would release it with noise of its own, and "
        "the epsilons would add up; call it in the first process only (RANK 0), or in a script of "
        "its own"
    ]


@contextmanager
def joined(device: str | None) -> Iterator[Processes]:
    """Join the processes that torchrun has started, if any, while the context lasts.

    Args:
        device: where the models are; on GPUs, each process gets its own, and they use NCCL.
    """
    if launched_processes() == 1 or dist.is_initialized():
        yield Processes.here()
        return
    on_gpus = device is not None and device.startswith("cuda") and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield Processes.here()
    finally:
        dist.destroy_process_group()
