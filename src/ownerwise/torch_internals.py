"""The torch internals that the package relies on, each with its purpose.

Torch may change these without notice, so the package declares the one version it is tested with.
Code that uses one of these internals imports this module first; internals that are functions are
called through it. It raises an ImportError that names the version if an internal is missing. It
warns if any other version of torch is installed, because its internals may behave differently.
`tests/gradients/test_torch_internals.py` pins the behaviour of each internal.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ownerwise.errors import PrivacyWarning

TESTED = "2.13"
"""The version of torch the package is tested with, as in pyproject.toml."""

INTERNALS: Mapping[str, str] = {
    "torch._utils._flatten_dense_tensors": "add noise to all sums at once",
    "torch._utils._unflatten_dense_tensors": "shape the noise like the parameters",
    "torch.utils._pytree.tree_flatten": "find the tensors in inputs, outputs and batches",
    "torch.utils._pytree.tree_unflatten": "put changed tensors back into their containers",
    "torch.utils._pytree.tree_leaves": "find the tensors in inputs, outputs and batches",
    "torch.utils._pytree.tree_map": "take rows of batches",
    "torch.nn.modules.module._has_any_global_hook": "find hooks that run in every module",
    "torch.nn.modules.batchnorm._BatchNorm": "refuse layers that mix records",
    "torch.nn.modules.instancenorm._InstanceNorm": "refuse layers that keep statistics",
    "torch.nn.functional.multi_head_attention_forward.__code__": "trace the calls in attention",
    "torch.nn.functional.multi_head_attention_forward.__globals__": "trace the calls in attention",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "find hooks that all optimizers run",
    "torch.optim.optimizer._global_optimizer_post_hooks": "find hooks that all optimizers run",
    "torch.ops.aten.tanh_backward.default": "derivative of tanh",
    "torch.ops.aten.tanh_backward.grad_input": "derivative of tanh, in place",
    "torch.ops.aten.sigmoid_backward.default": "derivative of the sigmoid",
    "torch.ops.aten.sigmoid_backward.grad_input": "derivative of the sigmoid, in place",
    "torch.ops.aten.threshold_backward.default": "derivative of ReLU",
    "torch.ops.aten.convolution_backward.default": "derivatives of convolutions",
    "torch._pack_padded_sequence": "know the order of the records in packed sequences",
    "torch._C._nn.pad_sequence": "notice that records are joined into one tensor",
    "torch._C._autograd._top_saved_tensors_default_hooks": "notice activation checkpoints",
    "torch._C._functorch.peek_interpreter_stack": "refuse layers inside torch.vmap",
    "torch._C.DisableTorchFunction": "keep the tape from tracing its own calls",
    "torch.autograd.graph._engine_run_backward": "trace what checkpoints compute again",
    "torch.utils.checkpoint.CheckpointFunction.forward": "refuse reentrant checkpoints",
    "torch.utils._python_dispatch.TorchDispatchMode": "refuse exchanges in models and losses",
    "torch.Tensor._version": "detect tensors that were changed in place",
    "torch.Tensor._base": "follow outputs that are changed in place",
    "torch.Tensor._is_view": "reject in-place operations on a part of a tensor",
}
"""Internals that are looked up by name, with their purpose."""

OPTIONAL: Mapping[str, str] = {
    "torch.ops.mkldnn._linear_pointwise": "multiply matrices faster on some processors",
}
"""Internals that some builds of torch lack, with their purpose."""

MODULE_STATE: Mapping[str, str] = {
    "_parameters": "find all parameters of a model",
    "_buffers": "find all buffers of a model",
    "_modules": "find all layers of a model",
    "_forward_hooks": "let the tape handle modules with hooks",
    "_forward_pre_hooks": "let the tape handle modules with hooks",
    "_backward_hooks": "let the tape handle modules with hooks",
    "_backward_pre_hooks": "let the tape handle modules with hooks",
}
"""Attributes that every module has in its `__dict__`, with their purpose."""

OPTIMIZER_STATE: Mapping[str, str] = {
    "_optimizer_step_pre_hooks": "reject hooks that could write to the model",
    "_optimizer_step_post_hooks": "reject hooks that could write to the model",
}
"""Attributes of every optimizer, with their purpose."""


def missing(internals: Mapping[str, str] = INTERNALS) -> list[str]:
    """Return each internal that this version of torch does not have, with its purpose."""
    lost = [f"{path} ({use})" for path, use in internals.items() if _find(path) is None]
    lost += [
        f"{owner}.{name} ({use})"
        for owner, holder, names in (
            ("Module", nn.Module(), MODULE_STATE),
            ("Optimizer", torch.optim.SGD([torch.zeros(1)]), OPTIMIZER_STATE),
        )
        for name, use in names.items()
        if name not in vars(holder)
    ]
    return lost


def check(version: str = torch.__version__, internals: Mapping[str, str] = INTERNALS) -> None:
    """Raise an ImportError if an internal is missing; warn if this version of torch is untested."""
    if lost := missing(internals):
        raise ImportError(
            f"torch {version} lacks internals that ownerwise relies on: {', '.join(lost)}. "
            f"ownerwise is tested with torch {TESTED}: pip install 'torch=={TESTED}.*'"
        )
    if version.split(".")[:2] != TESTED.split("."):
        warnings.warn(
            f"ownerwise is tested with torch {TESTED}, but this is torch {version}, whose "
            "internals may behave differently: run tests/gradients/test_torch_internals.py before "
            f"relying on a guarantee, or pip install 'torch=={TESTED}.*'",
            PrivacyWarning,
            stacklevel=2,
        )


def compiler_is_loaded() -> bool:
    """Return whether anything may have been compiled; loading the compiler takes seconds."""
    return "torch._dynamo" in sys.modules


def _find(path: str) -> Any:
    """Return the object at a dotted path, or None."""
    found: Any = torch
    at = "torch"
    for name in path.split(".")[1:]:
        at = f"{at}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(at)
            except ImportError:
                return None
    return found


check()

pytree = _find("torch.utils._pytree")
aten = torch.ops.aten
has_any_global_hook = _find("torch.nn.modules.module._has_any_global_hook")
saved_tensors_hook = _find("torch._C._autograd._top_saved_tensors_default_hooks")
engine_backward = _find("torch.autograd.graph._engine_run_backward")
checkpoint_forward = _find("torch.utils.checkpoint.CheckpointFunction.forward")
in_transform = _find("torch._C._functorch.peek_interpreter_stack")
pack_padded_sequence = _find("torch._pack_padded_sequence")
pad_sequence = _find("torch._C._nn.pad_sequence")
DispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode")
without_functions = _find("torch._C.DisableTorchFunction")
flatten_dense_tensors = _find("torch._utils._flatten_dense_tensors")
unflatten_dense_tensors = _find("torch._utils._unflatten_dense_tensors")
onednn_linear: Any = _find("torch.ops.mkldnn._linear_pointwise")  # None without oneDNN
global_step_hooks = tuple(
    _find(f"torch.optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post")
)
