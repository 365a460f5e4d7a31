"""Check at every step that the loss treats every record independently of the others.

Clipping bounds a record's own gradient. It bounds the record's influence only if the contributions
of other records do not depend on that record. A loss divided by the largest loss in its batch, for
instance, lets one record change the sum by hundreds of times the clip norm.

At every step, each user-defined function is therefore called a second time, on a secret random part
of the micro-batch. The loss (values and gradients with respect to the outputs), the clipping rule
and the release's contributions (`plug_separation`) must give the same results as on the whole
micro-batch. Only the functions run again, not the model, so this costs little. Torch's own losses
that by definition treat records separately are exempt (`losses.never_mixes`).

Formal guarantee: let B be the number of records in the batch and C the smallest clip norm. A
function passes if no record in the part has a contribution that changes by more than 0.01 C / B,
measured in the gradient with respect to the outputs. Mixing below this threshold changes the sum by
at most about 0.01 C. Mixing above this threshold is detected with probability at least 1/4 per step
if one record depends on another (the part must contain the first but not the second), and with
probability 1/2 if all records depend on a single one. If a record has many outputs, fewer records
are compared.

Rounding: 0.01 / B is below the precision of float32 for large batches, and always below that of
bfloat16. If the results differ, both are therefore recomputed and compared in float64, so
legitimate functions pass at any batch size. The results in the original precision must also
agree, to within 256 times the machine epsilon. This rules out functions such as (x + k) - k, where
k is the largest number in the batch: the result equals x in float64, but not in lower precision. If
a function cannot run in float64, its results may differ by up to 16 times the machine epsilon of
their own dtype.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError
from ownerwise.gradients.calls import map_tensors, tensors_in
from ownerwise.mechanisms import Loss, per_record
from ownerwise.randomness import StepStream

ROOM = 0.01
"""Maximum permitted change in the sum from mixing records, in units of the smallest clip norm."""

_MOST_NUMBERS = 1 << 14  # approximate number of outputs compared in one micro-batch
_FEWEST_RECORDS = 2
ROUNDINGS = 16  # for functions that cannot run in float64
MOST_ROUNDINGS = 256  # for functions that agree in float64
active = True  # not an option: switched off only to measure its cost

TREAT_APART = (
    "so its influence cannot be bounded: compute each record's {} from that record alone (no mean, "
    "sum, count or maximum over the batch, no random numbers, and nothing kept between calls)"
)


def choose(rows: int, numbers: int, stream: StepStream) -> Tensor:
    """Choose at most about half of the rows, secretly and at random; return their sorted indices.

    Args:
        rows: number of records in the micro-batch; if there is only one, it is always chosen.
        numbers: how many numbers the function takes or returns for the whole micro-batch.
        stream: this step's secret random numbers for this purpose.
    """
    if rows == 1:
        return torch.zeros(1, dtype=torch.long)
    most = max(_FEWEST_RECORDS, _MOST_NUMBERS * rows // max(numbers, 1))
    if rows >= 8 and most >= rows // 2:
        (chosen,) = stream.coins(rows).nonzero()
        if 1 < len(chosen) < rows:
            return torch.from_numpy(chosen)
    count = min(most, (rows + 1) // 2)
    if count > rows // 8:
        return torch.from_numpy(np.sort(np.argsort(stream.words(rows))[:count]))
    return torch.from_numpy(np.unique(stream.integers(rows, count)))


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
    ):
        self._loss = loss
        self._losses = losses
        self._whole = outputs, targets, released
        self._rows = rows
        self._outputs = tensors = _tensors(outputs)
        self._trains = [tensor.requires_grad for tensor in tensors]
        index = choose(self._rows, sum(t.numel() for t in tensors), stream)
        self._parts = [index]
        if thorough:
            others = np.setdiff1d(np.arange(self._rows), index.numpy())
            self._parts += [torch.from_numpy(others)] if len(others) else []
        self._taken_parts = [  # copies: the loss may write into its arguments
            (self._taken(outputs, index), self._taken(targets, index), released)
            for index in self._parts
        ]
        self._gradients: list[Tensor | None] = [None] * len(tensors)
        self._first = self._evaluate(losses, *self._taken_parts[0])
        self._joint = False
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf:  # the last backward pass counts
                tensor.register_hook(functools.partial(self._gradients.__setitem__, number))

    def _taken(self, values: Any, index: Tensor) -> Any:
        """Return the rows at `index` of every tensor that has one row per record."""

        def take(tensor: Tensor) -> Tensor:
            if not tensor.dim() or len(tensor) != self._rows:
                return tensor.detach()
            return tensor.detach().index_select(0, index.to(tensor.device))

        return take(values) if isinstance(values, Tensor) else map_tensors(take, values)

    def joint(self, losses: Tensor) -> Tensor | None:
        """Return the part's losses, if their backward pass can run with that of `losses`.

        The caller must then run it: one pass instead of two saves time where networks are small.
        """
        self._joint = losses.requires_grad and self._first[0].requires_grad
        return self._first[0] if self._joint else None

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
        values, tensors = self._first
        if self._joint:
            gradients = [tensor.grad for tensor in tensors]
        else:
            gradients = self._gradients_of(values, tensors)
        found = [(values.detach(), gradients)]
        found += [self._run(self._losses, *part) for part in self._taken_parts[1:]]
        for index, part, alone in zip(self._parts, self._taken_parts, found, strict=True):
            self._compare(index, part, alone, losses, lengths, clip_norm, ROOM / records)

    def _compare(
        self,
        index: Tensor,
        taken: tuple[Any, Any, Any],
        alone: tuple[Tensor, list[Tensor | None]],
        losses: Tensor,
        lengths: Callable[[], Tensor],
        clip_norm: float,
        share: float,
    ) -> None:
        index = index.to(losses.device)
        values, gradients = alone
        within = losses.detach().index_select(0, index)
        of_whole = [
            self._of_part(tensor.grad if tensor.is_leaf else gradient, index)
            for tensor, gradient in zip(self._outputs, self._gradients, strict=True)
        ]
        if torch.equal(values, within) and _all_equal(gradients, of_whole):
            return
        whole, part = (within, _joined(of_whole)), (values, _joined(gradients))
        per_length = self._per_length(whole[1], lengths()[index].double(), clip_norm)
        if _agree(whole, part, per_length, share * clip_norm, share):
            return
        roundoff = torch.finfo(losses.dtype).eps
        rounded = max(share, MOST_ROUNDINGS * roundoff)
        # run again: if the model uses an output elsewhere, its gradient includes those uses
        everyone = torch.arange(self._rows)
        again = self._run(self._losses, *(self._taken(e, everyone) for e in self._whole))[1]
        apart = within, _joined([self._of_part(g, index) for g in again])
        same = _agree(apart, part, per_length, rounded * clip_norm, rounded)
        try:
            whole, part = self._in_float64(index, taken)
        except Exception:  # fall back to the loss's own precision
            share = max(share, ROUNDINGS * roundoff)
        if not same or not _agree(whole, part, per_length, share * clip_norm, share):
            raise OwnerwiseError(
                "the loss of a record changes with the other records in its batch, "
                + TREAT_APART.format("loss")
            )

    def _in_float64(
        self, index: Tensor, taken: tuple[Any, Any, Any]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the part's losses and gradients, computed with and without the other records."""
        losses = per_record(_in_double(self._loss))
        everyone = torch.arange(self._rows)
        whole = [map_tensors(to_double, self._taken(each, everyone)) for each in self._whole]
        values, gradients = self._run(losses, *whole)
        part = self._run(losses, *map_tensors(to_double, taken))
        within = values[index], _joined([self._of_part(g, index) for g in gradients])
        return within, (part[0], _joined(part[1]))

    def _run(
        self, losses: Loss, outputs: Any, targets: Any, released: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the losses, and their gradients with respect to the outputs."""
        values, tensors = self._evaluate(losses, outputs, targets, released)
        return values.detach(), self._gradients_of(values, tensors)

    def _evaluate(
        self, losses: Loss, outputs: Any, targets: Any, released: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the losses and the tensors of the outputs, before any backward pass."""
        tensors = _tensors(outputs)
        for tensor, trains in zip(tensors, self._trains, strict=True):
            tensor.requires_grad_(trains)
        with torch.enable_grad():
            return losses(outputs, targets, *released), tensors

    def _gradients_of(self, values: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        if not leaves or not values.requires_grad:
            return [None] * len(tensors)
        ones = torch.ones_like(values)
        found = iter(torch.autograd.grad(values, leaves, ones, allow_unused=True))
        return [next(found) if trains else None for trains in self._trains]

    def _of_part(self, gradient: Tensor | None, index: Tensor) -> Tensor | None:
        if gradient is None or len(gradient) != self._rows:
            return None
        return gradient.index_select(0, index)

    def _per_length(self, gradients: Tensor, lengths: Tensor, clip_norm: float) -> Tensor:
        """Divide the norm of each record's clipped gradient by the norm of its output gradient.

        Records without a gradient are assigned the largest value among the other records.
        """
        sizes = torch.linalg.vector_norm(gradients.nan_to_num(0.0, 0.0, 0.0), dim=1)
        per_length = torch.where(sizes > 0, lengths / sizes, 0.0).nan_to_num(0.0, 0.0, 0.0)
        largest = float(per_length.max())
        return torch.where(per_length > 0, per_length, largest if largest else clip_norm)


def _tensors(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else tensors_in(values)


def _all_equal(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


def _joined(gradients: list[Tensor | None]) -> Tensor:
    """Return one row per record with all of its gradients, float64 [rows, numbers]."""
    columns = [g.double().flatten(1) for g in gradients if g is not None]
    return torch.cat(columns, dim=1) if columns else torch.zeros(1, 1, dtype=torch.float64)


def _agree(
    whole: tuple[Tensor, Tensor],
    part: tuple[Tensor, Tensor],
    per_length: Tensor,
    room: float,
    share: float,
) -> bool:
    """Return True if the part has the same losses and gradients as in the whole micro-batch."""
    (values, gradients), (others, other_gradients) = whole, part
    if gradients.shape != other_gradients.shape:
        return False
    scale = per_length.to(gradients)[:, None]
    scale = scale.clamp(max=torch.finfo(torch.float64).max ** 0.5)
    values, others = values.double()[:, None], others.double()[:, None]
    sizes = values.abs().nan_to_num(0.0, 0.0, 0.0) + 1e-3
    return rows_agree(gradients * scale, other_gradients * scale, room) and rows_agree(
        values / sizes, others / sizes, share
    )


def rows_agree(first: Tensor, second: Tensor, room: float | Tensor) -> bool:
    """Return True if no row differs by more than `room`. Two non-finite rows count as equal."""
    if first.shape != second.shape:
        return False
    first, second = first.double().flatten(1), second.double().flatten(1)
    distances = torch.linalg.vector_norm(first - second, dim=1)
    bad = ~torch.isfinite(first).all(dim=1) & ~torch.isfinite(second).all(dim=1)
    return bool(((distances <= room) | bad).all())


def to_double(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float64 and any other tensor unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _in_double(loss: Loss) -> Loss:
    """Return the loss with its own constants, such as class weights, in float64."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, functools.partial):
        given, named = map_tensors(to_double, (loss.args, loss.keywords))
        return functools.partial(_in_double(loss.func), *given, **named)
    return loss
