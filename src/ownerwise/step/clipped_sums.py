"""From a batch to the weighted sum of its clipped gradients: all of a step before the noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.batches import (
    Batch,
    take,
)
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import Chain, ChainRecords, Records, Tape
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
from ownerwise.planning import (
    Plan,
)
from ownerwise.randomness import (
    LayerRandomness,
    StepStream,
    kept_generators,
)
from ownerwise.step.checks import inputs_and_targets
from ownerwise.step.micro_batches import block_size, blocks, bytes_per_record, filled, slices


class ClippedSums:
    """Sums clipped gradients of a batch, cut into micro-batches where memory asks for it.

    One forward pass, unless the batch is cut and weights or a release need all of it: then a first
    pass is forward only.

    The last bits of a record's loss depend on how many records are computed at once. Weights put
    records in order by it, so with weights all is computed in blocks of one public size, the last
    one filled up with copies that have the factor 0: no record can turn the order of others around.

    Sensitivity: a record of owner o moves the sum by at most `plan.clip_norms[o]`, times the scale
    of the rule's steering, for any other records. The sum is NOT private before noise is added.

    Args:
        model, plan, loss, clipping, micro_batch_size, memory_target, lean: as for `PrivateStep`.
        weights, release: likewise, bound to the plan.
        steering: of the clipping rule, if it steers.
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
        # asked once: such questions of a protocol are slow
        self._summed = release if isinstance(release, SummedRelease) else None
        self._adaptive = release if isinstance(release, AdaptiveRelease) else None
        self.steering = steering
        self.micro_batch_size = micro_batch_size
        self.memory_target = memory_target
        self.not_private = not_private
        self.peek: Peek | None = None
        self._bytes_per_record: float | None = None
        self._expected = float(plan.sampling_rates @ plan.records)
        self._squares = float(plan.sampling_rates**2 @ plan.records)
        self._separation_checked = False
        self._tape = Tape(model, lean=lean)
        self._chain: Chain | None = None  # the pass under way, where the tape is not needed
        self._loss_separate = False

    def __call__(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients of the parameters that are trained."""
        self._look([], batch.owner_index)
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
            at_once = len(parts) == 1
            outputs: list[Any] = []
            if at_once or self.weights is not None or self.release is not None:
                with torch.set_grad_enabled(at_once):
                    outputs = [
                        self._forward(filled(inputs, part, size), number, randomness)
                        for number, part in enumerate(parts)
                    ]
            released = self._released(outputs, targets, parts, batch.owner_index, randomness)
            self._check_separation(inputs, targets, released, len(batch))
            losses: list[Tensor] = []
            weights = None
            if at_once or self.weights is not None:
                losses = [
                    self.loss(output, filled(targets, part, size), *released)
                    for output, part in zip(outputs, parts, strict=True)
                ]
            if self.weights is not None:
                own = [one[: _length(part)] for one, part in zip(losses, parts, strict=True)]
                weights = self._weigh(torch.cat(own), batch.owner_index, clip_norms)
            for number, part in enumerate(parts):
                if not at_once:
                    output = self._forward(filled(inputs, part, size), number, randomness)
                    losses = [self.loss(output, filled(targets, part, size), *released)]
                records = self._backward(losses[0], _length(part))
                norms = records.norms[: _length(part)]
                factors = self._factors(norms, limits[part], randomness.rule)
                if self.steering is not None:
                    self.steering.see(factors)
                if weights is not None:
                    factors = factors * torch.as_tensor(weights[part]).to(factors)
                filling = len(records) - len(factors)
                used = functional.pad(factors, (0, filling)) if filling else factors
                sums = records.weighted_sum(used)
                totals = {p: totals[p] + total for p, total in sums.items()} if totals else sums
                seen.append((losses[0].detach()[: len(norms)], norms, factors))
                del records  # and the activations it holds, before the next forward pass
        self._look(seen, batch.owner_index)
        return totals

    def _forward(self, rows: Any, number: int, randomness: Randomness) -> Any:
        """Run one micro-batch; the same number draws the same dropout masks in every pass."""
        self._chain = Chain.of(self.model, rows)
        if self._chain is not None:
            return self._chain.forward(rows)
        randomness.layers.enter(number)
        with self._tape:
            return self.model(rows)

    def _backward(self, losses: Tensor, count: int) -> Records | ChainRecords:
        """Return the per-record gradients of the micro-batch that was run last.

        The first `count` rows are records of their own, the others copies.
        """
        if self._chain is None:
            return self._tape.backward(losses)
        records = self._chain.backward(losses, separate=self._loss_separate)
        self._chain = None
        if not self._loss_separate:  # a single record, or one that is not finite, shows nothing
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
        """Return the noised release as the loss's further argument, or nothing."""
        release = self.release
        if release is None:
            return ()
        shares = self.plan.release_shares
        shares = None if shares is None else shares[owner_index]
        with torch.no_grad():
            pairs = [
                (take(output, slice(_length(part))), take(targets, part))
                for output, part in zip(outputs, parts, strict=True)
            ]
            if self._summed is not None:
                total = torch.zeros(release.shape, dtype=torch.float64)
                for (output, target), part in zip(pairs, parts, strict=True):
                    own = None if shares is None else torch.as_tensor(shares[part])
                    total += self._summed.total(output, target, own).to(total)
            else:
                total = sum_of_unit_rows(
                    [release.contributions(output, target) for output, target in pairs],
                    parts,
                    release.shape,
                    shares,
                    absolute=self.plan.release_noise == "laplace",
                )
            noised = randomness.release(total)
            return (noised if self._adaptive is None else self._adaptive.process(noised),)

    def _check_separation(
        self, inputs: Any, targets: Any, released: tuple[Tensor, ...], records: int
    ) -> None:
        """Refuse, once a run, what no gradient shows: records whose loss the others change."""
        if self._separation_checked or records < 2:
            return

        layers = LayerRandomness()

        def losses(rows: list[int]) -> Tensor:
            layers.enter(0)
            return self.loss(self.model(take(inputs, rows)), take(targets, rows), *released)

        check_separation(losses, records, self.model)
        self._separation_checked = True

    def _weigh(self, losses: Tensor, owner_index: np.ndarray, clip_norms: np.ndarray) -> np.ndarray:
        """Return the weights of the logical batch, checked."""
        assert self.weights is not None
        values = losses.detach().to(torch.float64).cpu().numpy()
        scores = self.weights.score(values, owner_index)
        weights = np.asarray(self.weights.weights(scores, clip_norms), dtype=np.float64)
        if weights.shape != values.shape or not ((weights >= 0) & (weights <= 1)).all():
            raise OwnerwiseError(
                f"{type(self.weights).__name__} returned weights of shape {weights.shape} that do "
                f"not all lie in [0, 1]; expected {values.shape} in [0, 1]"
            )
        return weights

    def _factors(
        self, norms: Tensor, clip_norms: np.ndarray, rule_stream: StepStream | None
    ) -> Tensor:
        """Return the clipping rule's factors; a record whose gradient is not finite gets zero."""
        clips = torch.as_tensor(clip_norms, dtype=norms.dtype, device=norms.device)
        finite = None
        if not math.isfinite(float(norms.sum())):  # one call in the common case
            finite = torch.isfinite(norms)
            norms = torch.where(finite, norms, torch.ones_like(norms))
        factors = self.clipping.factors(norms, clips, rule_stream)
        if not self.clipping.proven and not ((factors * norms).abs() <= clips * (1 + 1e-5)).all():
            raise OwnerwiseError(
                f"{type(self.clipping).__name__} lets a record exceed its clip norm: factor * norm "
                "<= clip norm is what the plan accounts for"
            )
        return factors if finite is None else factors * finite

    def _parts(self, inputs: Any, records: int) -> tuple[list[slice], int | None]:
        """Return the micro-batches, and to how many rows each is filled up, if it is."""
        limit = self._micro_batch_size(inputs, records)
        if self.weights is None:
            return list(slices(records, limit)), None
        share = 1.0 if self.steering is None else self.steering.share
        expected = share * self._expected
        variance = max(0.0, expected - share**2 * self._squares)
        size = block_size(expected, math.sqrt(variance), limit)
        return list(blocks(records, size)), size

    def _micro_batch_size(self, inputs: Any, records: int) -> int:
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        if self._bytes_per_record is None:
            self._bytes_per_record = bytes_per_record(self.model, inputs, records)
        return max(1, int(self.memory_target // max(1.0, self._bytes_per_record)))

    def _look(
        self,
        seen: list[tuple[Tensor, Tensor, Tensor]],
        owner_index: np.ndarray,
    ) -> None:
        """Keep what the step saw, if that was asked for."""
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
