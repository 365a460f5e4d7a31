"""The weighted sum of a batch's clipped gradients: everything in a step before the noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.batches import Batch, take
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import Chain, ChainGradients, PerRecordGradients, Tape
from ownerwise.mechanisms import (
    AdaptiveRelease,
    ClippingRule,
    Loss,
    Peek,
    Randomness,
    Release,
    Steering,
    SummedRelease,
    Weights,
    check_separation,
    per_record,
    sum_of_unit_rows,
)
from ownerwise.planning import Plan
from ownerwise.randomness import LayerRandomness, StepStream, kept_generators
from ownerwise.step.checks import inputs_and_targets
from ownerwise.step.micro_batches import block_size, blocks, bytes_per_record, padded, slices


class ClippedSums:
    """Sums the clipped gradients of a batch, in micro-batches where memory requires it.

    There is one forward pass. If the batch is split and weights or a release need the whole batch,
    a forward-only pass comes first.

    The last bits of a record's loss depend on how many records are computed at once. Weights order
    records by loss, so with weights everything is computed in blocks of one public size, and the
    last block is padded with copies whose factor is 0. No record can then reorder the others.

    Sensitivity: a record of owner o changes the sum by at most `plan.clip_norms[o]` times the
    steering's clip scale, whatever the other records are. The sum is NOT private until noise is
    added.

    Args:
        model, plan, loss, clipping, micro_batch_size, memory_target, lean: as for `PrivateStep`.
        weights, release: as for `PrivateStep`, already bound to the plan.
        steering: the clipping rule's steering, if it has one.
        not_private: keep losses, norms and factors of the last batch in `peek`.
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
        self.clipping = clipping
        self.weights = weights
        self.release = release
        # checked once, because isinstance is slow on protocols
        self._summed = release if isinstance(release, SummedRelease) else None
        self._adaptive = release if isinstance(release, AdaptiveRelease) else None
        self.steering = steering
        self.micro_batch_size = micro_batch_size
        self.memory_target = memory_target
        self.not_private = not_private
        self.peek: Peek | None = None
        self._bytes_per_record: float | None = None
        self._expected_records = float(plan.sampling_rates @ plan.records)
        self._squared_rates = float(plan.sampling_rates**2 @ plan.records)
        self._separation_checked = False
        self._tape = Tape(model, lean=lean)
        self._chain: Chain | None = None  # the current pass, if it needs no tape
        self._loss_separate = False

    def __call__(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients for each trainable parameter."""
        self._keep_peek([], batch.owner_index)
        if not len(batch):
            self._released([], None, [], batch.owner_index, randomness)
            return _zeros(self.model)
        inputs, targets = inputs_and_targets(batch)
        clip_norms = self.plan.clip_norms[batch.owner_index]
        limits = clip_norms if self.steering is None else clip_norms * self.steering.clip_scale
        totals: dict[nn.Parameter, Tensor] = {}
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        with kept_generators(), torch.enable_grad():
            parts, size = self._parts(inputs, len(batch))
            single = len(parts) == 1
            outputs: list[Any] = []
            if single or self.weights is not None or self.release is not None:
                with torch.set_grad_enabled(single):
                    outputs = [
                        self._forward(padded(inputs, part, size), number, randomness)
                        for number, part in enumerate(parts)
                    ]
            released = self._released(outputs, targets, parts, batch.owner_index, randomness)
            self._check_separation(inputs, targets, released, len(batch))
            losses: list[Tensor] = []
            weights = None
            if single or self.weights is not None:
                losses = [
                    self.loss(output, padded(targets, part, size), *released)
                    for output, part in zip(outputs, parts, strict=True)
                ]
            if self.weights is not None:
                unpadded = [
                    values[: _length(part)] for values, part in zip(losses, parts, strict=True)
                ]
                weights = self._batch_weights(torch.cat(unpadded), batch.owner_index, clip_norms)
            for number, part in enumerate(parts):
                if not single:
                    output = self._forward(padded(inputs, part, size), number, randomness)
                    losses = [self.loss(output, padded(targets, part, size), *released)]
                records = self._backward(losses[0], _length(part))
                norms = records.norms[: _length(part)]
                factors = self._factors(norms, limits[part], randomness.rule)
                if self.steering is not None:
                    self.steering.observe(factors)
                if weights is not None:
                    factors = factors * torch.as_tensor(weights[part]).to(factors)
                padding = len(records) - len(factors)
                with_padding = functional.pad(factors, (0, padding)) if padding else factors
                sums = records.weighted_sum(with_padding)
                totals = {p: totals[p] + total for p, total in sums.items()} if totals else sums
                seen.append((losses[0].detach()[: len(norms)], norms, factors))
                del records  # frees its activations before the next forward pass
        self._keep_peek(seen, batch.owner_index)
        return totals

    def _forward(self, rows: Any, number: int, randomness: Randomness) -> Any:
        """Run one micro-batch; each number draws the same dropout masks in every pass."""
        self._chain = Chain.of(self.model, rows)
        if self._chain is not None:
            return self._chain.forward(rows)
        randomness.layers.enter(number)
        with self._tape:
            return self.model(rows)

    def _backward(self, losses: Tensor, count: int) -> PerRecordGradients | ChainGradients:
        """Return the per-record gradients of the last micro-batch.

        The first `count` rows are records, the rest is padding.
        """
        if self._chain is None:
            return self._tape.backward(losses)
        records = self._chain.backward(losses, separate=self._loss_separate)
        self._chain = None
        if not self._loss_separate:  # one record, or a non-finite one, proves nothing
            self._loss_separate = count > 1 and bool(torch.isfinite(records.norms).all())
        return records

    def _released(
        self,
        outputs: list[Any],
        targets: Any,
        parts: list[slice],
        owner_index: np.ndarray,
        randomness: Randomness,
    ) -> tuple[Tensor, ...]:
        """Return the noised release as an extra argument of the loss, or an empty tuple."""
        release = self.release
        if release is None:
            return ()
        scales = self.plan.release_shares
        scales = None if scales is None else scales[owner_index]
        with torch.no_grad():
            pairs = [
                (take(output, slice(_length(part))), take(targets, part))
                for output, part in zip(outputs, parts, strict=True)
            ]
            if self._summed is not None:
                total = torch.zeros(release.shape, dtype=torch.float64)
                for (output, target), part in zip(pairs, parts, strict=True):
                    of_part = None if scales is None else torch.as_tensor(scales[part])
                    total += self._summed.total(output, target, of_part).to(total)
            else:
                total = sum_of_unit_rows(
                    [release.contributions(output, target) for output, target in pairs],
                    parts,
                    release.shape,
                    scales,
                    absolute=self.plan.release_noise == "laplace",
                )
            noised = randomness.release(total)
            return (noised if self._adaptive is None else self._adaptive.process(noised),)

    def _check_separation(
        self, inputs: Any, targets: Any, released: tuple[Tensor, ...], records: int
    ) -> None:
        """Refuse, once per run, a loss in which records influence each other."""
        if self._separation_checked or records < 2:
            return
        layers = LayerRandomness()

        def losses(rows: list[int]) -> Tensor:
            layers.enter(0)
            return self.loss(self.model(take(inputs, rows)), take(targets, rows), *released)

        check_separation(losses, records, self.model)
        self._separation_checked = True

    def _batch_weights(
        self, losses: Tensor, owner_index: np.ndarray, clip_norms: np.ndarray
    ) -> np.ndarray:
        """Return one checked weight per record of the logical batch."""
        assert self.weights is not None
        values = losses.detach().to(torch.float64).cpu().numpy()
        scores = self.weights.score(values, owner_index)
        weights = np.asarray(self.weights.weights(scores, clip_norms), dtype=np.float64)
        if weights.shape != values.shape or not ((weights >= 0) & (weights <= 1)).all():
            raise OwnerwiseError(
                f"{type(self.weights).__name__} returned weights of shape {weights.shape}, or some "
                f"outside [0, 1]; expected shape {values.shape} and values in [0, 1]"
            )
        return weights

    def _factors(
        self, norms: Tensor, clip_norms: np.ndarray, rule_stream: StepStream | None
    ) -> Tensor:
        """Return the clipping rule's factors, 0 for records whose gradient is not finite."""
        clips = torch.as_tensor(clip_norms, dtype=norms.dtype, device=norms.device)
        finite = None
        if not math.isfinite(float(norms.sum())):  # one call in the common case
            finite = torch.isfinite(norms)
            norms = torch.where(finite, norms, torch.ones_like(norms))
        factors = self.clipping.factors(norms, clips, rule_stream)
        if not self.clipping.proven and not ((factors * norms).abs() <= clips * (1 + 1e-5)).all():
            raise OwnerwiseError(
                f"{type(self.clipping).__name__} lets a record exceed its clip norm: the plan "
                "accounts for factor * norm <= clip norm"
            )
        return factors if finite is None else factors * finite

    def _parts(self, inputs: Any, records: int) -> tuple[list[slice], int | None]:
        """Return the micro-batches, and the number of rows to pad each to, if any."""
        limit = self._micro_batch_size(inputs, records)
        if self.weights is None:
            return list(slices(records, limit)), None
        kept = 1.0 if self.steering is None else self.steering.keep_probability
        expected = kept * self._expected_records
        variance = max(0.0, expected - kept**2 * self._squared_rates)
        size = block_size(expected, math.sqrt(variance), limit)
        return list(blocks(records, size)), size

    def _micro_batch_size(self, inputs: Any, records: int) -> int:
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        if self._bytes_per_record is None:
            self._bytes_per_record = bytes_per_record(self.model, inputs, records)
        return max(1, int(self.memory_target // max(1.0, self._bytes_per_record)))

    def _keep_peek(
        self, seen: list[tuple[Tensor, Tensor, Tensor]], owner_index: np.ndarray
    ) -> None:
        """Keep losses, norms and factors if `not_private` is set."""
        self.peek = None
        if self.not_private:
            empty = np.zeros(0)
            losses, norms, factors = (
                (torch.cat(column).double().cpu().numpy() for column in zip(*seen, strict=True))
                if seen
                else (empty, empty, empty)
            )
            self.peek = Peek(losses, norms, factors, owner_index)


def _length(part: slice) -> int:
    return part.stop - part.start


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
