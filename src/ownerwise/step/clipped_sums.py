"""Compute the weighted sum of a batch's clipped gradients, to which the step adds noise."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import Batch, take
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import (
    Attributes,
    Chain,
    ChainGradients,
    PerRecordGradients,
    Tape,
    changed_by_data,
)
from ownerwise.gradients.calls import tensors_in
from ownerwise.mechanisms import (
    ClippingRule,
    Loss,
    Peek,
    Randomness,
    Release,
    Steering,
    Weights,
    never_mixes,
    per_record,
    proven,
    sum_of_unit_rows,
)
from ownerwise.planning import Plan
from ownerwise.randomness import kept_generators
from ownerwise.step import separation
from ownerwise.step.micro_batches import bytes_per_record, slices
from ownerwise.step.model_separation import check_model, check_part, is_due
from ownerwise.step.plug_separation import checked_contributions, checked_factors
from ownerwise.step.rounding import Rounding, loss_roundoff, refuse_imprecise
from ownerwise.step.secret_rows import Rows, place

_SMALLEST_RESOLVED = 1e-8  # user-defined rules see smaller float32 norms as this value


class ClippedSums:
    """Sums the clipped gradients of a batch, in micro-batches if memory requires it.

    There is one forward pass. If the batch is split and weights or a release need the whole batch,
    an additional forward-only pass comes first.

    A hardened plan fixes the number of rows: records are placed in secret random rows, and the
    other rows are empty. Removing a record then does not change a single bit of any other record's
    output, loss or norm.

    Sensitivity: a record of owner o changes the sum by at most `plan.clip_norms[o]` times the
    steering's clip scale, regardless of the other records. The sum is NOT private until noise is
    added.

    Args:
        model, plan, loss, clipping, micro_batch_size, memory_target, lean: as for `PrivateStep`.
        weights, release: as for `PrivateStep`, already bound to the plan.
        steering: the clipping rule's steering, if any.
        not_private: whether to keep the losses, norms and factors of the last batch in `peek`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        clipping: ClippingRule,
        *,
        weights: Weights | None,
        release: Release | None,
        steering: Steering | None,
        micro_batch_size: int | None,
        memory_target: int,
        lean: bool,
        not_private: bool,
    ):
        self.model = model
        self.plan = plan
        self.loss = per_record(loss)
        self._plain_loss = loss
        self.clipping = clipping
        self.weights = weights
        self.release = release
        self.steering = steering
        self.micro_batch_size = micro_batch_size
        self.memory_target = memory_target
        self.not_private = not_private
        self.peek: Peek | None = None
        self._bytes_per_record: float | None = None
        self.rounding = Rounding.of(plan, model, weights, release)
        self._loss_roundoff = loss_roundoff(model)
        self._batches = 0  # number of batches with at least two records
        self._due = False
        self._proven = proven(clipping)
        self._smallest_clip = float(plan.clip_norms.min())
        self._tape = Tape(model, lean=lean)
        self._buffers: list[tuple[str, Tensor, int]] = []  # as of the last forward pass
        self._chain: Chain | None = None  # the current pass, if it needs no autograd tape

    def __call__(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients for each trainable parameter."""
        self._keep_peek([], None)
        self._buffers = []
        if not 0 < len(batch) <= (self.plan.hardened_rows or len(batch)):
            self._released([], None, [], np.zeros(0), randomness)
            return _zeros(self.model)
        rows = place(batch, self.plan.hardened_rows, randomness.rows)
        inputs, targets = rows.inputs, rows.targets
        clip_norms = self.plan.clip_norms[batch.owner_index]
        scale = 1.0 if self.steering is None else self.steering.clip_scale
        limits = rows.spread(clip_norms * (scale / (1 + self.rounding.slack)), empty=1.0)
        totals: dict[nn.Parameter, Tensor] = {}
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        with kept_generators(), torch.enable_grad():
            self._check_model(batch, inputs, randomness)
            parts = list(slices(len(rows), self._micro_batch_size(inputs, len(rows))))
            single = len(parts) == 1
            outputs: list[Any] = []
            if single or self.weights is not None or self.release is not None:
                with torch.set_grad_enabled(single):
                    outputs = [
                        self._forward(take(inputs, part), number, randomness)
                        for number, part in enumerate(parts)
                    ]
            released = self._released(outputs, targets, parts, self._scales(rows), randomness)
            check_part(
                self.model, self.loss, batch, released,
                fixed_shapes=self.plan.hardened_rows is not None,
            )  # fmt: skip
            losses: list[Tensor] = []
            weights = check = None
            if single:
                check = self._loss_check(outputs[0], targets, len(rows), released, randomness)
            if single or self.weights is not None:
                losses = [
                    self.loss(output, take(targets, part), *released)
                    for output, part in zip(outputs, parts, strict=True)
                ]
            if self.weights is not None:
                if self.plan.hardened_rows is None:
                    refuse_imprecise([*tensors_in(outputs), *losses], self._loss_roundoff)
                values = rows.of_records(torch.cat(losses).detach().double().cpu().numpy())
                weights = self._batch_weights(values, batch.owner_index, clip_norms)
                weights = rows.spread(weights, empty=0.0)
            for number, part in enumerate(parts):
                if not single:
                    output = self._forward(take(inputs, part), number, randomness)
                    target = take(targets, part)
                    size = part.stop - part.start
                    check = self._loss_check(output, target, size, released, randomness)
                    losses = [self.loss(output, target, *released)]
                records = self._backward(losses[0])
                factors = self._factors(records.norms, limits[part], randomness, len(rows))
                if check is not None:
                    lengths = functools.partial(torch.mul, factors, records.norms)
                    check.compare(losses[0], lengths, self._smallest_clip * scale, len(rows))
                if rows.occupied is not None:
                    factors = factors * torch.as_tensor(rows.occupied[part]).to(factors)
                if self.steering is not None:
                    self.steering.observe(factors)
                if weights is not None:
                    factors = factors * torch.as_tensor(weights[part]).to(factors)
                sums = self._sum(records, factors, rows, part)
                if single:
                    totals = sums
                else:  # not in place: sums may share memory
                    for parameter, total in sums.items():
                        before = totals.get(parameter)
                        totals[parameter] = total.double() if before is None else before + total
                seen.append((losses[0].detach(), records.norms, factors))
                del records  # frees its activations before the next forward pass
            self._refuse_written_buffers()
        self._keep_peek(seen, rows)
        return totals

    def _sum(
        self, records: PerRecordGradients | ChainGradients, factors: Tensor, rows: Rows, part: slice
    ) -> dict[nn.Parameter, Tensor]:
        """Return the sum of gradients times factors.

        If there are clip-norm classes, each class is summed separately.
        """
        if self.rounding.classes is None:
            return records.weighted_sum(factors, in_blocks=self.rounding.in_blocks)
        classes = rows.spread(self.rounding.classes[rows.owner_index], empty=-1)[part]
        totals: dict[nn.Parameter, Tensor] = {}
        for number in range(int(self.rounding.classes.max()) + 1):
            if not (classes == number).any():
                continue
            members = torch.as_tensor(classes == number, device=factors.device)
            for parameter, total in records.weighted_sum(factors * members).items():
                before = totals.get(parameter)
                totals[parameter] = total.double() if before is None else before + total
        return totals or {p: total.double() for p, total in _zeros(self.model).items()}

    def _forward(self, rows: Any, number: int, randomness: Randomness) -> Any:
        """Run micro-batch `number`, with the same dropout masks in every pass."""
        self._refuse_written_buffers()
        self._chain = Chain.of(self.model, rows)
        if self._chain is not None:
            return self._chain.forward(rows, in_blocks=self.rounding.in_blocks)
        randomness.layers.enter(number)
        attributes = Attributes(self.model)
        with self._tape:
            outputs = self.model(rows)
        attributes.drop_data()
        self._buffers = [(name, b, b._version) for name, b in self.model.named_buffers()]
        return outputs

    def _refuse_written_buffers(self) -> None:
        """Raise an error if a loss, rule or release wrote to a buffer after the forward pass."""
        before, self._buffers = self._buffers, []
        for name, buffer, version in before:
            if buffer._version != version or self.model.get_buffer(name) is not buffer:
                raise changed_by_data(name, "the loss, the clipping rule or the release")

    def _backward(self, losses: Tensor) -> PerRecordGradients | ChainGradients:
        """Return the per-record gradients of the last micro-batch."""
        if self._chain is None:
            return self._tape.backward(losses)
        records = self._chain.backward(losses)
        self._chain = None
        return records

    def _released(
        self,
        outputs: list[Any],
        targets: Any,
        parts: list[slice],
        scales: np.ndarray | None,
        randomness: Randomness,
    ) -> tuple[Tensor, ...]:
        """Return a tuple of extra arguments for the loss: the noised release, if there is one."""
        release = self.release
        if release is None:
            return ()
        with torch.no_grad():
            pairs = [
                (output, take(targets, part)) for output, part in zip(outputs, parts, strict=True)
            ]
            absolute = self.plan.release_noise == "laplace"
            if proven(release):
                found = [release.contributions(output, target) for output, target in pairs]
            else:
                shares = self.plan.release_shares
                share = separation.ROOM * (1.0 if shares is None else float(shares.min()))
                sizes = [part.stop - part.start for part in parts]
                share /= max(1, sum(sizes))
                found = [
                    checked_contributions(
                        release, output, target, size, share, randomness.parts, absolute=absolute
                    )
                    for (output, target), size in zip(pairs, sizes, strict=True)
                ]
            total = sum_of_unit_rows(found, parts, release.shape, scales, absolute=absolute)
            noised = randomness.release(total / (1 + self.rounding.release_slack))
            return (release.process(noised),)

    def _scales(self, rows: Rows) -> np.ndarray | None:
        """Return the factor for each row's contribution to a release; None if all factors are 1."""
        scales = self.plan.release_shares
        if scales is None:
            return rows.occupied
        return rows.spread(scales[rows.owner_index], empty=0.0)

    def _check_model(self, batch: Batch, inputs: Any, randomness: Randomness) -> None:
        """Reject a model that mixes records, before this batch can change its state."""
        self._due = len(batch) > 1 and is_due(self._batches)
        self._batches += len(batch) > 1
        if self._due and Chain.of(self.model, inputs) is None:  # the layers of a chain never mix
            check_model(self.model, batch, randomness.parts)

    def _loss_check(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        released: tuple[Tensor, ...],
        randomness: Randomness,
    ) -> separation.LossCheck | None:
        """Return the loss check for a micro-batch, or None for a loss that cannot mix records."""
        if not separation.active:
            return None
        if not released and never_mixes(self._plain_loss, outputs, targets):
            return None
        return separation.LossCheck(
            self._plain_loss, self.loss, outputs, targets, rows, released, randomness.parts,
            thorough=self._due,
        )  # fmt: skip

    def _batch_weights(
        self, losses: np.ndarray, owner_index: np.ndarray, clip_norms: np.ndarray
    ) -> np.ndarray:
        """Return one checked weight per record in the logical batch."""
        assert self.weights is not None
        weights = self.weights.weights(losses, clip_norms, owner_index)
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != losses.shape or not 0 <= weights.min() <= weights.max() <= 1:
            raise OwnerwiseError(
                f"{type(self.weights).__name__} returned weights of shape {weights.shape}, or "
                f"weights outside [0, 1]; expected shape {losses.shape} and values in [0, 1]"
            )
        return weights

    def _factors(
        self, norms: Tensor, clip_norms: np.ndarray, randomness: Randomness, records: int
    ) -> Tensor:
        """Return the clipping rule's factors, with 0 for records whose gradient is not finite."""
        clips = torch.as_tensor(clip_norms, dtype=norms.dtype, device=norms.device)
        finite = None
        if not math.isfinite(float(norms.sum())):  # one call in the common case
            finite = torch.isfinite(norms)
            norms = torch.where(finite, norms, torch.ones_like(norms))
        if self._proven:
            factors = self.clipping.factors(norms, clips, randomness.rule)
        else:
            factors = checked_factors(
                self.clipping, norms, clips, records, randomness.rule, randomness.parts
            )
            if norms.dtype != torch.float64:  # squares underflow: a gradient may have norm 0
                norms = norms.clamp(min=_SMALLEST_RESOLVED)
            if not ((factors * norms).abs() <= clips * (1 + 1e-5)).all():
                raise OwnerwiseError(
                    f"{type(self.clipping).__name__} lets a record exceed its clip norm: the plan "
                    "assumes factor * norm <= clip norm"
                )
        return factors if finite is None else factors * finite

    def _micro_batch_size(self, inputs: Any, records: int) -> int:
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        if self._bytes_per_record is None:
            self._bytes_per_record = bytes_per_record(self.model, inputs, records)
        return max(1, int(self.memory_target // max(1.0, self._bytes_per_record)))

    def _keep_peek(self, seen: list[tuple[Tensor, Tensor, Tensor]], rows: Rows | None) -> None:
        """Keep the losses, norms and factors if `not_private` is set."""
        self.peek = None
        if self.not_private:
            losses = norms = factors = np.zeros(0)
            if rows is not None:
                losses, norms, factors = (
                    rows.of_records(torch.cat(column).double().cpu().numpy())
                    for column in zip(*seen, strict=True)
                )
            owner_index = np.zeros(0, dtype=np.int64) if rows is None else rows.owner_index
            self.peek = Peek(losses, norms, factors, owner_index)


def _zeros(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    return {
        parameter: torch.zeros_like(
            parameter,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
            requires_grad=False,
        )
        for parameter in model.parameters()
        if parameter.requires_grad
    }
