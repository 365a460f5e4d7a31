"""Torch's wrappers for several processes: which of them can be removed, and which are refused.

The step adds the processes' clipped sums itself. Whatever else sends gradients or parameters
between processes would send them unclipped and without noise (pitfall 48).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ownerwise.processes import Processes, launched_processes

_OWN_SUMS = "the private step adds the clipped gradients of all processes itself"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, with a notice; others as they are.

    A wrapper that is not called reduces nothing: it waits for its own forward pass.
    """
    if not isinstance(model, DistributedDataParallel) or _hooks(model):
        return model
    warnings.warn(
        f"the model was taken out of its DistributedDataParallel: {_OWN_SUMS}, and the wrapper "
        "would reduce them before they are clipped. Pass `.module` to avoid this notice",
        stacklevel=3,
    )
    return model.module


def wrapper_problems(model: nn.Module, optimizer: Optimizer, processes: Processes) -> Iterator[str]:
    """Yield the reasons why the processes cannot train this model with this optimizer."""
    launched = launched_processes()
    if launched > 1 and not processes.several:
        yield (
            f"torchrun started {launched} processes, but there is no process group, so each would "
            "train on its own and spend the budgets: call "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(model, DistributedDataParallel) and _hooks(model):
        yield (
            "the model has a communication hook of DistributedDataParallel, which would compress "
            "or change the sums after they were clipped: remove it, and pass `.module`"
        )
    if any(kind.__module__.startswith("torch.distributed.") for kind in type(optimizer).__mro__):
        name = type(optimizer).__name__
        yield (
            f"{name} sends parameters or gradients between processes, but {_OWN_SUMS} and every "
            "process updates all parameters: pass a plain optimizer, such as torch.optim.AdamW"
        )
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        yield (
            f"{sharded[0]} is sharded over processes (FSDP or a DTensor), which is not supported: "
            "pass the module before fully_shard, so that every process holds all parameters"
        )


def _hooks(model: DistributedDataParallel) -> bool:
    return bool(model._get_ddp_logging_data().get("comm_hook"))
