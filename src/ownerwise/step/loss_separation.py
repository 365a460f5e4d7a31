"""Check at every step that the loss treats every record separately (see `step.separation`).

Only the loss runs again, not the model, so this costs little.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import Segments
from ownerwise.gradients.calls import tensors_in
from ownerwise.gradients.separation import agree_in_float64, in_float64, rows_agree, rows_at
from ownerwise.mechanisms import Loss, per_record
from ownerwise.randomness import StepStream
from ownerwise.step.separation import MOST_ROUNDINGS, ROOM, ROUNDINGS, TREAT_APART, choose, others

# outputs, targets, what was released, and the factor for each loss in the backward pass
Arguments = tuple[Any, Any, tuple[Tensor, ...], Tensor | None]
Results = tuple[Tensor, list[Tensor | None]]  # losses, and the gradient for each output tensor


class LossCheck:
    """Compares losses computed on a part of a micro-batch with losses computed on all of it.

    Create the check before the loss is called, and call `compare` after the backward pass. The loss
    is called on the part first: otherwise, a loss that remembers the largest loss so far would
    treat the part in the same way as the whole micro-batch.

    Args:
        loss: the user's loss, with its reduction.
        losses: the same loss as a function that returns one number per record.
        outputs, targets: outputs and targets of the micro-batch.
        rows: number of records in the micro-batch.
        released: extra arguments for the loss.
        stream: secret random numbers used to choose the part.
        thorough: whether to also compare the other records, as a second part.
        segments: the rows of each element; None if every row is an element.
    """

    def __init__(
        self,
        loss: Loss,
        losses: Loss,
        outputs: Any,
        targets: Any,
        rows: int,
        released: tuple[Tensor, ...],
        stream: StepStream,
        *,
        thorough: bool,
        segments: Segments | None = None,
    ):
        self._loss = loss
        self._losses = losses
        shares = None if segments is None else segments.shares
        self._whole: Arguments = outputs, targets, released, shares
        self._rows = rows
        self._outputs = tensors = _tensors(outputs)
        self._trains = [tensor.requires_grad for tensor in tensors]
        first = choose(rows, sum(t.numel() for t in tensors), stream)
        indices = [first, others(rows, first)] if thorough else [first]
        self._parts = [(index, self._at(index)) for index in indices if len(index)]
        self._first = self._evaluate(losses, self._parts[0][1])
        self._joint = False
        self._gradients: list[Tensor | None] = [None] * len(tensors)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf:  # the last backward pass counts
                tensor.register_hook(functools.partial(self._gradients.__setitem__, number))

    def joint(self, losses: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the part's losses and factors if they can be backpropagated with `losses`.

        The caller must then do so; for small networks, running one pass instead of two saves time.
        """
        values = self._first[0]
        self._joint = losses.requires_grad and values.requires_grad
        return (values, self._factors(values, self._parts[0][1])) if self._joint else None

    def compare(
        self, losses: Tensor, lengths: Callable[[], Tensor], clip_norm: float, records: int
    ) -> None:
        """Reject the loss if it treats a record differently in the part and in the micro-batch.

        Args:
            losses: losses of the micro-batch.
            lengths: function that returns the norm of each record's clipped gradient, [rows].
            clip_norm: the smallest clip norm.
            records: number of records in the whole batch.
        """
        if self._joint:
            values, tensors = self._first
            part: Results = values.detach(), [tensor.grad for tensor in tensors]
        else:
            part = self._sent_back(*self._first, self._parts[0][1])
        for number, (index, arguments) in enumerate(self._parts):
            if number:
                part = self._run(self._losses, arguments)
            if not self._agree(index, arguments, part, losses, lengths, clip_norm, ROOM / records):
                raise OwnerwiseError(
                    "the loss of a record changes with the other records in its batch, "
                    + TREAT_APART.format("loss")
                )

    def _agree(
        self,
        index: Tensor,
        arguments: Arguments,
        part: Results,
        losses: Tensor,
        lengths: Callable[[], Tensor],
        clip_norm: float,
        share: float,
    ) -> bool:
        index = index.to(losses.device)
        gradients = [
            tensor.grad if tensor.is_leaf else gradient
            for tensor, gradient in zip(self._outputs, self._gradients, strict=True)
        ]
        whole = self._rows_of((losses.detach(), gradients), index)
        if torch.equal(part[0], whole[0]) and _all_equal(part[1], whole[1]):
            return True
        per_length = _per_length(_joined(whole[1]), lengths()[index].double(), clip_norm)

        def agree(whole: Results, part: Results, share: float) -> bool:
            return _results_agree(whole, part, per_length, share * clip_norm, share)

        def exact() -> tuple[Results, Results]:
            losses = per_record(_in_double(self._loss))
            everything = self._run(losses, in_float64(self._at(torch.arange(self._rows))))
            return self._rows_of(everything, index), self._run(losses, in_float64(arguments))

        if agree(whole, part, share):
            return True
        # run again: if the model uses an output elsewhere, its gradient includes those uses
        again = self._run(self._losses, self._at(torch.arange(self._rows)))[1]
        whole = self._rows_of((losses.detach(), again), index)
        roundoff = torch.finfo(losses.dtype).eps
        return agree_in_float64(
            agree, (whole, part), exact, share,
            rounded=MOST_ROUNDINGS * roundoff, fallback=ROUNDINGS * roundoff,
        )  # fmt: skip

    def _at(self, index: Tensor) -> Arguments:
        """Return copies of the rows at `index`, because the loss may write into its arguments."""
        outputs, targets, released, shares = self._whole
        rows = self._rows
        shares = None if shares is None else shares[index]
        return rows_at(outputs, index, rows), rows_at(targets, index, rows), released, shares

    def _rows_of(self, results: Results, index: Tensor) -> Results:
        values, gradients = results
        return values.index_select(0, index), [
            None if g is None or len(g) != self._rows else g.index_select(0, index)
            for g in gradients
        ]

    def _run(self, losses: Loss, arguments: Arguments) -> Results:
        """Return the losses, and their gradients with respect to the outputs."""
        return self._sent_back(*self._evaluate(losses, arguments), arguments)

    def _evaluate(self, losses: Loss, arguments: Arguments) -> tuple[Tensor, list[Tensor]]:
        """Return the losses and the tensors of the outputs, before any backward pass."""
        outputs, targets, released, _ = arguments
        tensors = _tensors(outputs)
        for tensor, trains in zip(tensors, self._trains, strict=True):
            tensor.requires_grad_(trains)
        with torch.enable_grad():
            return losses(outputs, targets, *released), tensors

    def _sent_back(self, values: Tensor, tensors: list[Tensor], arguments: Arguments) -> Results:
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        if not leaves or not values.requires_grad:
            return values.detach(), [None] * len(tensors)
        factors = self._factors(values, arguments)
        found = iter(torch.autograd.grad(values, leaves, factors, allow_unused=True))
        return values.detach(), [next(found) if trains else None for trains in self._trains]

    def _factors(self, values: Tensor, arguments: Arguments) -> Tensor:
        """Return the factor for each loss in the backward pass."""
        shares = arguments[3]
        return torch.ones_like(values) if shares is None else shares.to(values)


def _tensors(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else tensors_in(values)


def _all_equal(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


def _joined(gradients: list[Tensor | None]) -> Tensor:
    """Return one row per record with all of its gradients, float64 [rows, numbers]."""
    columns = [g.double()[:, None].flatten(1) for g in gradients if g is not None]
    return torch.cat(columns, dim=1) if columns else torch.zeros(1, 1, dtype=torch.float64)


def _per_length(gradients: Tensor, lengths: Tensor, clip_norm: float) -> Tensor:
    """Divide the norm of each record's clipped gradient by the norm of its output gradient.

    Records without a gradient are assigned the largest value among the other records.
    """
    sizes = torch.linalg.vector_norm(gradients.nan_to_num(0.0, 0.0, 0.0), dim=1)
    per_length = torch.where(sizes > 0, lengths / sizes, 0.0).nan_to_num(0.0, 0.0, 0.0)
    largest = float(per_length.max())
    return torch.where(per_length > 0, per_length, largest if largest else clip_norm)


def _results_agree(
    whole: Results, part: Results, per_length: Tensor, room: float, share: float
) -> bool:
    """Return True if the part has the same losses and gradients as in the whole micro-batch."""
    gradients, other_gradients = _joined(whole[1]), _joined(part[1])
    if gradients.shape != other_gradients.shape:
        return False
    scale = per_length.to(gradients)[:, None]
    scale = scale.clamp(max=torch.finfo(torch.float64).max ** 0.5)
    values, other_values = whole[0].double()[:, None], part[0].double()[:, None]
    sizes = values.abs().nan_to_num(0.0, 0.0, 0.0) + 1e-3
    return rows_agree(gradients * scale, other_gradients * scale, room) and rows_agree(
        values / sizes, other_values / sizes, share
    )


def _in_double(loss: Loss) -> Loss:
    """Return the loss with its own constants, such as class weights, in float64."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, functools.partial):
        given, named = in_float64((loss.args, loss.keywords))
        return functools.partial(_in_double(loss.func), *given, **named)
    return loss
