"""Activation checkpointing and compiled code under the tape.

`torch.utils.checkpoint` discards the activations of a region and computes them again in the
backward pass. The second computation must make the same calls as the first, so the tape runs there
as well (`replayed`), but it records nothing. The variant with `use_reentrant=True` runs the region
without gradients at first and calls backward again within the backward pass, where no tap would see
its parameters: it is refused.

`torch.compile` hides the calls of a region, so compiled code runs as ordinary Python.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ownerwise.gradients.problems import Refused
from ownerwise.torch_internals import (
    checkpoint_forward,
    compiler_is_loaded,
    engine_backward,
    in_transform,
    saved_tensors_hook,
    without_functions,
)

__all__ = [
    "hooked",
    "refuse_reentrant",
    "refuse_transformed",
    "run_backward",
    "stored",
    "uncompiled",
    "untraced",
]


def hooked() -> bool:
    """Return whether a hook, such as that of a checkpoint, takes the tensors that calls save."""
    return saved_tensors_hook(True) is not None


def stored(active: bool = True) -> AbstractContextManager:
    """Return a context in which calls save their tensors themselves, whatever hooks there are."""
    if not active:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def untraced(mode: TorchFunctionMode | None) -> AbstractContextManager:
    """Return a context in which `mode` does not see any calls; nothing changes for None."""
    return nullcontext() if mode is None else without_functions()


def run_backward(
    losses: tuple[Tensor, ...], *, grad_tensors: Tensor, retain_graph: bool, **_: Any
) -> None:
    """Do the same as `torch.autograd.backward`, which is itself a call that modes can see."""
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine_backward(losses, (grad_tensors,), retain_graph, False, (), **options)


def uncompiled() -> AbstractContextManager:
    """Return a context in which code compiled by `torch.compile` runs as ordinary Python."""
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext()


def refuse_reentrant(where: str) -> None:
    """Raise an error inside a checkpoint with `use_reentrant=True`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is checkpoint_forward.__code__:
            raise Refused(
                where,
                "it is used in an activation checkpoint with use_reentrant=True, which computes "
                "its gradient where the tape does not see it",
                "pass use_reentrant=False (in transformers: gradient_checkpointing_enable("
                "gradient_checkpointing_kwargs={'use_reentrant': False}))",
            )
        frame = frame.f_back


def refuse_transformed(where: str) -> None:
    """Raise an error inside a transformation of torch.func, such as `torch.vmap`."""
    if in_transform() is not None:
        raise Refused(
            where,
            "it is used inside torch.vmap or another transformation of torch.func, where the tape "
            "cannot see the records",
            "call the layer on the whole batch instead, or freeze its parameters",
        )
