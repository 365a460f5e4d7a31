"""Turn any torch loss into per-record losses by switching off its reduction."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ownerwise.batches import row_counts, shape_name
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.mechanisms.regression import RegressionLoss
from ownerwise.torch_internals import has_any_global_hook

Loss = Callable[..., Tensor]

# Torch's own losses, and their named arguments that apply to each record separately.
_BY_RECORD = {
    functional.cross_entropy: {"weight", "ignore_index", "label_smoothing", "reduction"},
    functional.nll_loss: {"weight", "ignore_index", "reduction"},
}
_BY_NUMBER = {
    functional.binary_cross_entropy: {"reduction"},
    functional.binary_cross_entropy_with_logits: {"reduction"},
    functional.huber_loss: {"reduction", "delta"},
    functional.l1_loss: {"reduction"},
    functional.mse_loss: {"reduction"},
    functional.smooth_l1_loss: {"reduction", "beta"},
}
_MODULES: dict[type[nn.Module], Loss] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.HuberLoss: functional.huber_loss,
    nn.L1Loss: functional.l1_loss,
    nn.MSELoss: functional.mse_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def never_mixes(loss: Loss, outputs: Any, targets: Any) -> bool:
    """Return True if this is a torch loss that by definition treats every record separately.

    The step checks every other loss on every batch. Elementwise losses are exempt from this check
    only if the outputs and targets have the same shape, because torch would broadcast other shapes.
    """
    named: set[str] = set()
    if isinstance(loss, functools.partial) and not loss.args:
        loss, named = loss.func, set(loss.keywords)
    if isinstance(loss, nn.Module):
        function = _MODULES.get(type(loss))
        hooked = any(map(vars(loss).get, _HOOKS)) or has_any_global_hook()
        if function is None or hooked or "forward" in vars(loss):
            return False
        own = {**vars(loss), **dict(loss.named_buffers()), **dict(loss.named_parameters())}
        named = {name for name, value in own.items() if isinstance(value, Tensor)}
        loss = function
    if type(loss) is RegressionLoss:  # it compares one output with one number per record
        return True
    if not inspect.isroutine(loss):  # may not be hashable
        return False
    if loss in _BY_RECORD:
        return named <= _BY_RECORD[loss]
    same = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    same = same and outputs.shape == targets.shape
    return same and loss in _BY_NUMBER and named <= _BY_NUMBER[loss]


def per_record(loss: Loss) -> Loss:
    """Return `loss` as a function that returns one number per record.

    A loss with a `reduction` argument or attribute (all of torch's) is called with "none"; any
    other loss must itself return one entry per record. If a record has several values (tokens,
    pixels, output columns), they are averaged within the record, so a record's gradient depends
    only on that record. Ignored targets (`ignore_index`) are left out of the average: otherwise a
    record's loss would depend on its padding, and thus on the longest record in the batch. Class
    weights multiply the loss and are not normalised, because their sum over the batch depends on
    the other records. Extra arguments, such as a noised release, are passed to the loss.
    """
    unreduced = _without_reduction(loss)
    ignored = ignored_target(loss)

    def losses(outputs: Any, targets: Any, *further: Any) -> Tensor:
        values = unreduced(outputs, targets, *further)
        if values.dim() == 1 and isinstance(targets, Tensor) and targets.shape[:1] == values.shape:
            return values  # the usual case
        records = row_counts(targets)
        if values.dim() > 1:
            _refuse_broadcast(values, outputs, targets)
        if values.dim() == 0 or {len(values)} != records:
            returned = "more or fewer rows than records" if values.dim() else "a single number"
            raise OwnerwiseError(
                f"the loss returned {returned}; expected one entry (or row) per record: do not "
                "average or sum over the batch"
            )
        if values.dim() == 1:
            return values
        flat = values.flatten(1)
        if ignored is None or not isinstance(targets, Tensor) or targets.shape != values.shape:
            return flat.mean(dim=1)
        return flat.sum(dim=1) / (targets != ignored).flatten(1).sum(dim=1).clamp(min=1)

    return losses


def _refuse_broadcast(values: Tensor, outputs: Any, targets: Any) -> None:
    """Reject outputs of shape [B, 1] with targets of shape [B], or vice versa.

    The loss would broadcast both tensors to [B, B].
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or len(values) < 2:
        return
    short, long = sorted((outputs.shape, targets.shape), key=len)
    if len(short) != 1 or long != (*short, 1) or values.shape != 2 * short:
        return
    fix = "y[:, None]" if targets.dim() == 1 else "y.squeeze(1)"
    raise OwnerwiseError(
        f"the outputs have shape {shape_name(outputs.shape)} and the targets have shape "
        f"{shape_name(targets.shape)}, so the loss compares each record with the targets of all "
        f"other records: make the shapes equal, for example with {fix}"
    )


def _without_reduction(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module):
        if hasattr(loss, "reduction"):
            loss = copy.copy(loss)
            vars(loss)["reduction"] = "none"
        return loss
    if "reduction" not in _parameters(loss):
        return loss
    return functools.partial(loss, reduction="none")


def ignored_target(loss: Loss) -> int | None:
    """Return the target value that a loss ignores (`ignore_index`), if any."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "ignore_index", None)
    argument = _parameters(loss).get("ignore_index")
    return argument.default if argument and isinstance(argument.default, int) else None


def _parameters(loss: Loss) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):  # implemented in C
        return {}


def plain_loss(loss: Loss) -> Loss:
    """Return the user's own loss, without any penalty that a release adds (`Release.penalised`)."""
    return loss if isinstance(loss, nn.Module) else getattr(loss, "plain", loss)


def loss_problems(loss: Loss, model: nn.Module) -> Iterator[str]:
    """Yield a problem if the loss has trainable parameters, which the private step would miss."""
    loss = plain_loss(loss)
    if isinstance(loss, nn.Module):
        known = {id(parameter) for parameter in model.parameters()}
        own = [n for n, p in loss.named_parameters() if p.requires_grad and id(p) not in known]
        if own:
            yield (
                f"the loss has trainable parameters ({name_some(own)}), which would be neither "
                "clipped nor noised; move them into the model, or freeze them"
            )
