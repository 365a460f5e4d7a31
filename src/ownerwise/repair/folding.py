"""Shift class outputs by a constant, through the bias of the last layer if possible."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ownerwise.batches import described
from ownerwise.batches.trees import map_tensors
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import call_model, evaluation_mode

_HOOKS: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


def subtract_from_outputs(model: nn.Module, shift: Tensor, inputs: Any) -> bool:
    """Subtract `shift` from the class outputs of `model`; return whether a bias absorbed it.

    If the outputs are those of a linear layer with its own bias, that bias is changed and the rest
    of the model is not. Otherwise, a forward hook subtracts the shift.

    Args:
        model: the model.
        shift: one number per class; with a single output, the second number minus the first.
        inputs: inputs for a few records; only their shapes and dtypes are used.
    """
    amount = _amount(shift, _outputs(model, inputs))
    layer = _last_layer(model, inputs, len(amount))
    if layer is None:
        subtract_in_hook(model, shift)
        return False
    with torch.no_grad():
        layer.bias.sub_(amount.to(layer.bias))
    return True


def subtract_in_hook(model: nn.Module, shift: Tensor, *, again: bool = False) -> None:
    """Subtract `shift` from the outputs of `model` in a forward hook.

    With `again`, it replaces the shifts set by earlier calls on this model, as after a restore.
    """
    handles = _HOOKS.setdefault(model, [])
    while again and handles:
        handles.pop().remove()
    handles.append(model.register_forward_hook(_Subtract(shift)))


class _Subtract:
    """A forward hook that can be pickled with its model."""

    def __init__(self, shift: Tensor):
        self._shift = shift

    def __call__(self, module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        return result - _amount(self._shift, result).to(result)


def shifted(outputs: Any, shift: Tensor) -> Tensor:
    """Return class outputs, [records, classes] or single logits, plus one number per class."""
    if isinstance(outputs, Tensor) and outputs.dim() in (1, 2):
        amount = _amount(shift, outputs)
        if len(amount) == (outputs.shape[1] if outputs.dim() == 2 else 1):
            return outputs + amount.to(outputs)
    raise OwnerwiseError(
        f"the model's outputs are {described(outputs)}; expected one number per record for each of "
        f"the {len(shift)} classes of the repair: only classifiers can be repaired"
    )


def _amount(shift: Tensor, outputs: Tensor) -> Tensor:
    """Return the shift of each output; a single output is the logit of the second class."""
    single = outputs.dim() == 1 or outputs.shape[1] == 1
    return (shift[1] - shift[0]).reshape(1) if single and len(shift) == 2 else shift


def _last_layer(model: nn.Module, inputs: Any, outputs: int) -> nn.Linear | None:
    """Return the layer whose output is the model's output, unless its bias is used elsewhere."""
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
    with evaluation_mode(model):
        return call_model(model, map_tensors(torch.zeros_like, inputs))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
