"""Subtract a constant from a model's outputs, if possible in the bias of its last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches.trees import map_tensors


def subtract_from_outputs(model: nn.Module, shift: Tensor, inputs: Any) -> bool:
    """Subtract `shift` from the class outputs of `model`; return whether a bias could take it.

    If the outputs are those of a linear layer with its own bias, that bias is changed and the model
    stays as it is otherwise. Else a forward hook subtracts the shift.

    Args:
        model: the model.
        shift: one number per class; with a single output, the second number minus the first.
        inputs: inputs whose shapes and dtypes are used; their values are not.
    """
    outputs = 1 if len(shift) == 2 and _width(model, inputs) == 1 else len(shift)
    amount = shift if outputs == len(shift) else (shift[1] - shift[0]).reshape(1)
    layer = _last_layer(model, inputs, outputs)
    if layer is None:
        model.register_forward_hook(lambda module, arguments, result: result - amount.to(result))
        return False
    with torch.no_grad():
        layer.bias.sub_(amount.to(layer.bias))
    return True


def _width(model: nn.Module, inputs: Any) -> int:
    outputs = _outputs(model, inputs)
    return 1 if outputs.dim() == 1 else outputs.shape[1]


def _last_layer(model: nn.Module, inputs: Any, outputs: int) -> nn.Linear | None:
    """Return the layer whose output is that of the model, unless its bias is used elsewhere."""
    found: list[tuple[nn.Linear, int]] = []
    candidates = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module._parameters.get("bias") is not None
    ]

    def note(module: nn.Module, arguments: Any, result: Any) -> None:
        assert isinstance(module, nn.Linear)
        found.append((module, _place(result)))

    hooks = [layer.register_forward_hook(note) for layer in candidates]
    try:
        place = _place(_outputs(model, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    last = [layer for layer, at in found if at == place]
    if len(last) != 1 or len(last[0].bias) != outputs:
        return None
    uses = sum(last[0].bias is p for m in model.modules() for p in m._parameters.values())
    calls = sum(layer is last[0] for layer, _ in found)
    return last[0] if uses == calls == 1 else None


def _outputs(model: nn.Module, inputs: Any) -> Tensor:
    mode = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            return model(map_tensors(torch.zeros_like, inputs))
    finally:
        for module, training in mode.items():
            module.training = training


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
