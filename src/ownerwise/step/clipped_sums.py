"""Compute the weighted sum of a batch's clipped gradients, to which the step adds noise."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import Batch, device_of, moved
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import (
    Attributes,
    Chain,
    ChainGradients,
    PerRecordGradients,
    Segments,
    Tape,
    call_model,
    changed_by_data,
    full_products,
    uncompiled,
)
from ownerwise.mechanisms import (
    ClippingRule,
    IndividualFilter,
    Loss,
    Peek,
    Randomness,
    Release,
    Sensitivity,
    Steering,
    Weights,
    never_mixes,
    per_record,
    proven,
)
from ownerwise.planning import Plan
from ownerwise.processes import DrawsOfShare, Processes, Share
from ownerwise.randomness import StepStream, kept_generators
from ownerwise.repair import shifted
from ownerwise.step import separation
from ownerwise.step.loss_separation import LossCheck
from ownerwise.step.micro_batches import MicroBatch, Split
from ownerwise.step.model_separation import check_model, check_part, is_due
from ownerwise.step.performance import Performance
from ownerwise.step.plug_separation import checked_factors
from ownerwise.step.release_sum import ReleaseSum
from ownerwise.step.rounding import CHARGED_NORM_ERROR, Rounding, loss_roundoff, refuse_imprecise
from ownerwise.step.secret_rows import Rows, place

_FLOAT32_FLOOR = 1e-8  # user-defined rules see smaller float32 norms as this value


class ClippedSums:
    """Sums the clipped gradients of a batch, in micro-batches if memory requires it.

    There is one forward pass. If the batch is split and weights or a release need the whole batch,
    an additional forward-only pass comes first.

    A hardened plan fixes the number of rows: records are placed in secret random rows, and the
    other rows are empty. Removing a record then does not change a single bit of any other record's
    output, loss or norm.

    If several processes share the batch (`processes.Share`), each computes its own elements. The
    sum of a release, the losses for weights, and the weighted sums are exchanged, each once per
    step; everything that follows from them is computed alike in all processes.

    Sensitivity: a record of owner o changes the sum by at most `plan.clip_norms[o]` times the
    steering's clip scale, regardless of the other records. The sum is NOT private until noise is
    added.

    Args:
        model, plan, loss, clipping, performance: as for `PrivateStep`.
        weights, release: as for `PrivateStep`, already bound to the plan.
        steering: the clipping rule's steering, if any.
        shift: what to add to the class outputs before the loss, [classes]; a public constant.
        not_private: whether to keep the losses, norms and factors of the last batch in `peek`.
        processes: the processes that take the step together.
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
        shift: Tensor | None = None,
        performance: Performance,
        not_private: bool,
        processes: Processes,
    ):
        self.model = model
        self.plan = plan
        self.loss = per_record(loss)
        self.plain_loss = loss
        self.clipping = clipping
        self.weights = weights
        self.release = release
        self.steering = steering
        self._shift = shift
        self.not_private = not_private
        self.peek: Peek | None = None
        self._split = Split(model, performance)
        self.rounding = Rounding.of(plan, model, weights, release or steering, processes.count)
        self._release_sum = (
            None if release is None else ReleaseSum(release, plan, self.rounding.release_slack)
        )
        self._processes = processes
        self._loss_roundoff = loss_roundoff(model)
        self._device: torch.device | None = None  # of the model, as of the last batch
        self._batches = 0  # number of batches with at least two records
        self._weighted = 0  # number of batches that were weighted
        self._exchanged = 0  # number of batches with records in any process
        self._due = False
        self._proven = proven(clipping)
        self._smallest_clip = float(plan.clip_norms.min())
        self._of = plan.holders
        self.filter: IndividualFilter | None = None
        if plan.filter is not None:
            self.filter = IndividualFilter(
                plan, Sensitivity(CHARGED_NORM_ERROR, self.rounding.slack)
            )
        self._reduced_clip_norms = self._of.clip_norms / (1 + self.rounding.slack)
        self._tape = Tape(model, lean=performance.lean, even=self.filter is not None)
        self._buffers: list[tuple[str, Tensor, int]] = []  # as of the last forward pass

    def __call__(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients for each trainable parameter."""
        if batch.by_owner != (self.plan.sampling == "owner"):
            raise OwnerwiseError(
                f"the plan samples {self.plan.sampling}s, but the batch was not drawn that way: "
                "iterate over PoissonBatches(data, plan)"
            )
        self._keep_peek([], None)
        self._buffers = []
        if self.filter is not None:
            self.filter.begin()
        empty = batch.records == 0
        rows_available = self.plan.hardened_rows
        overflows = rows_available is not None and batch.records > rows_available
        overflows &= not batch.by_owner  # each owner has rows of their own
        # An overflowing batch counts as empty, so the step adds only noise. Part of every delta is
        # reserved for the probability of an overflow (`planning.batch_bounds.delta_reserve`).
        if empty or overflows:
            if self._release_sum is not None:
                nothing = torch.zeros(self._release_sum.shape, dtype=torch.float64)
                self._release_sum.noised(nothing, randomness, self._device)
            return _zeros(self.model)
        self._device = device_of(self.model)
        with kept_generators(), torch.enable_grad(), uncompiled():
            return self._of_batch(batch, randomness)

    def _of_batch(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the sums for a batch that has records.

        The functions that are passed to `processes` run before an exchange. The first of them also
        begins the work.
        """
        begun: list[_Work] = []
        processes, release = self._processes, self._release_sum
        apart = processes.apart if is_due(self._exchanged) else nullcontext
        self._exchanged += 1

        def work() -> _Work:
            if not begun:
                begun.append(self._begin(batch, randomness))
            return begun[0]

        def total() -> list[Tensor]:
            assert release is not None
            with apart():
                done = work()
                with torch.no_grad(), self._products():
                    return [release.of(done.micro_batches, done.rows, randomness.parts)]

        def losses() -> np.ndarray:
            with apart():
                return self._losses(work(), released, randomness)

        def sums() -> list[Tensor]:
            with apart():
                found = self._sum_of_work(work(), weights, released, randomness)
            return [found[parameter] for parameter in like]

        released: tuple[Tensor, ...] = ()
        if release is not None:
            shape = [torch.empty(release.shape, dtype=torch.float64)]
            (count,) = processes.summed(total, shape)
            released = (release.noised(count, randomness, self._device),)
        weights = None
        if self.weights is not None:
            of = np.zeros(0) if batch.share is None else batch.share.of
            weights = self._weights_of(batch, processes.gathered(losses, of))
        if not processes.several:
            return self._sum_of_work(work(), weights, released, randomness)
        like = _zeros(self.model)

        found = processes.summed(sums, list(like.values()), self.rounding.exchange)
        self._gather_peek(batch)
        return dict(zip(like, found, strict=True))

    def _begin(self, batch: Batch, randomness: Randomness) -> _Work:
        """Check the model, split this process's part of the batch, and run it if necessary.

        The outputs of a single micro-batch are kept for its backward pass. Several micro-batches
        run again one by one, so here they run without gradients, and only if needed.
        """
        if not len(batch):
            return _Work(batch)
        data, part = moved(batch.data, self._device), moved(batch.part, self._device)
        if data is not batch.data or part is not batch.part:
            batch = dataclasses.replace(batch, data=data, part=part)
        declared = None if self.filter is None else self.plan.records
        rows = place(batch, self.plan.hardened_rows, randomness.rows, declared)
        self._check_model(batch, rows, randomness)
        work = _Work(batch, rows, self._split(rows))
        if work.single or self.weights is not None or self.release is not None:
            with torch.set_grad_enabled(work.single), self._products():
                for micro in work.micro_batches:
                    self._forward(micro, randomness)
        return work

    def _losses(
        self, work: _Work, released: tuple[Tensor, ...], randomness: Randomness
    ) -> np.ndarray:
        """Return the losses of this process's elements, float64."""
        with torch.set_grad_enabled(work.single), self._products():
            self._check_part(work, released)
            for micro in work.micro_batches:
                self._evaluate(micro, released, randomness)
        return self._losses_of_elements(work)

    def _check_part(self, work: _Work, released: tuple[Tensor, ...]) -> None:
        """Check once per step whether collating records together has changed them."""
        if work.part_is_checked or work.rows is None:
            return
        work.part_is_checked = True
        check_part(
            self.model, self.loss, work.batch, released,
            fixed_shapes=self.plan.hardened_rows is not None,
        )  # fmt: skip

    def _sum_of_work(
        self,
        work: _Work,
        weights: np.ndarray | None,
        released: tuple[Tensor, ...],
        randomness: Randomness,
    ) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of this process's part of the batch.

        Args:
            work: the work.
            weights: the weights of all elements of the whole batch.
            released: extra arguments for the loss.
            randomness: the step's random numbers.
        """
        rows, share = work.rows, work.batch.share
        if rows is None:
            return _zeros(self.model)
        with torch.set_grad_enabled(work.single), self._products():
            self._check_part(work, released)
        if not work.single:
            for micro in work.micro_batches:
                micro.outputs = micro.losses = None
        limits = self._limits(rows)
        if weights is not None:
            own = weights if share is None else weights[share.own]
            weights = rows.spread(own, empty=0.0)
        draws = None if share is None else _draws_of(share, rows, randomness)
        members = self._members(work.batch, rows)
        totals: dict[nn.Parameter, Tensor] = {}
        for micro in work.micro_batches:
            rule: Any = randomness.rule if draws is None else draws.of(micro.elements)
            sums = self._sum_of_micro_batch(
                micro, rows, limits, weights, released, randomness, rule, members
            )
            totals = sums if work.single else _added(totals, sums)
        self._refuse_written_buffers()
        self._keep_peek(work.micro_batches, rows)
        return totals

    def _sum_of_micro_batch(
        self,
        micro: MicroBatch,
        rows: Rows,
        limits: np.ndarray,
        weights: np.ndarray | None,
        released: tuple[Tensor, ...],
        randomness: Randomness,
        rule: StepStream | None,
        members: np.ndarray | None,
    ) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients of one micro-batch."""
        with self._products():
            if micro.outputs is None:
                self._forward(micro, randomness)
            if micro.losses is None:
                self._evaluate(micro, released, randomness)
        losses, segments = micro.losses, micro.segments
        assert losses is not None
        if micro.chain is None:
            records = self._tape.backward(losses, segments)
        else:
            also = None if micro.check is None else micro.check.joint(losses)
            records = micro.chain.backward(losses, segments, also=also)
        clips = limits[micro.elements]
        factors = self._factors(records, clips, rule, randomness.parts, rows.total)
        if micro.check is not None:
            lengths = functools.partial(_lengths, factors, records, segments)
            smallest = self._smallest_clip * self._clip_scale
            micro.check.compare(losses, lengths, smallest, rows.total)
        there = None
        if rows.occupied is not None:
            there = torch.as_tensor(rows.occupied[micro.elements]).to(factors)
            factors = factors * there
        if members is not None:
            factors = self._admitted(members[micro.elements], records.norms, factors)
        if self.steering is not None:
            self._observe(micro, records.norms, clips, factors, there)
        if weights is not None:
            factors = factors * torch.from_numpy(weights[micro.elements]).to(factors)
        if self.not_private:
            micro.seen = losses.detach(), records.norms, factors
        micro.outputs = micro.losses = micro.chain = micro.check = None  # frees memory
        return self._sum(records, factors, rows, micro.elements)

    def _members(self, batch: Batch, rows: Rows) -> np.ndarray | None:
        """Return the filter's number for each element, or -1 for an empty one."""
        if self.filter is None:
            return None
        if batch.by_owner:
            assert rows.occupied is not None
            return np.where(rows.occupied > 0, rows.owner_index, -1)
        return rows.spread(batch.indices.astype(np.int64), empty=-1)

    def _admitted(self, members: np.ndarray, norms: Tensor, factors: Tensor) -> Tensor:
        """Return the factors, with 0 for records whose budgets do not pay for the step."""
        assert self.filter is not None
        there = members >= 0
        lengths = (norms.double() * factors.double()).nan_to_num(nan=0.0).cpu().numpy()
        admitted = np.zeros(len(members))
        admitted[there] = self.filter.admit(members[there], lengths[there])
        return factors * torch.from_numpy(admitted).to(factors)

    def _observe(
        self,
        micro: MicroBatch,
        norms: Tensor,
        clips: np.ndarray,
        factors: Tensor,
        there: Tensor | None,
    ) -> None:
        """Let the steering add up what the records of a micro-batch contribute to its number."""
        assert self.steering is not None
        assert micro.losses is not None
        if self.plan.adaptive_clip_norm is not None and self.plan.hardened_rows is None:
            refuse_imprecise(
                self.plan, [*micro.output_tensors(), micro.losses], self._loss_roundoff
            )
        limits = torch.as_tensor(clips, dtype=norms.dtype, device=norms.device)
        if there is not None:
            norms, limits, factors = (each[there > 0] for each in (norms, limits, factors))
        self.steering.observe(norms, limits, factors)

    def _products(self) -> AbstractContextManager:
        """Return the context for outputs and losses.

        The slack for the order of records, and for a release or steering, assumes that other
        records change only the last bits of a record's results. A less precise kernel for large
        batches alone would change more.
        """
        uncovered = self.weights is None and self.release is None and self.steering is None
        if uncovered or self.plan.hardened_rows is not None:
            return nullcontext()
        return full_products(torch.device("cpu") if self._device is None else self._device)

    @property
    def _clip_scale(self) -> float:
        return 1.0 if self.steering is None else self.steering.clip_scale

    def _limits(self, rows: Rows) -> np.ndarray:
        """Return each element's clip norm, reduced by the slack."""
        limits = self._reduced_clip_norms[rows.owner_index]
        if self._clip_scale != 1.0:
            limits *= self._clip_scale
        return rows.spread(limits, empty=1.0)

    def _sum(
        self,
        records: PerRecordGradients | ChainGradients,
        factors: Tensor,
        rows: Rows,
        places: slice,
    ) -> dict[nn.Parameter, Tensor]:
        """Return the sum of gradients times factors.

        If there are clip-norm classes, each class is summed separately.
        """
        if self.rounding.classes is None:
            return records.weighted_sum(factors, in_blocks=self.rounding.in_blocks)
        classes = rows.spread(self.rounding.classes[rows.owner_index], empty=-1)[places]
        totals: dict[nn.Parameter, Tensor] = {}
        for number in range(int(self.rounding.classes.max()) + 1):
            if not (classes == number).any():
                continue
            members = torch.as_tensor(classes == number, device=factors.device)
            totals = _added(totals, records.weighted_sum(factors * members))
        return totals or _added({}, _zeros(self.model))

    def _forward(self, micro: MicroBatch, randomness: Randomness) -> None:
        """Compute the outputs of a micro-batch, with the same dropout masks in every pass."""
        self._refuse_written_buffers()
        micro.chain = Chain.of(self.model, micro.inputs)
        if micro.chain is not None:
            outputs = micro.chain.forward(micro.inputs)
        else:
            # processes must not share masks
            randomness.layers.enter(micro.number * self._processes.count + self._processes.rank)
            attributes = Attributes(self.model)
            with self._tape:
                outputs = call_model(self.model, micro.inputs)
            attributes.drop_data()
            self._buffers = [(name, b, b._version) for name, b in self.model.named_buffers()]
        micro.outputs = outputs if self._shift is None else shifted(outputs, self._shift)

    def _evaluate(
        self, micro: MicroBatch, released: tuple[Tensor, ...], randomness: Randomness
    ) -> None:
        """Compute a micro-batch's losses, and begin to check them if gradients will be computed."""
        if torch.is_grad_enabled():
            micro.check = self._loss_check(micro, released, randomness)
        micro.losses = self.loss(micro.outputs, micro.targets, *released)

    def _refuse_written_buffers(self) -> None:
        """Raise an error if a loss, rule or release wrote to a buffer after the forward pass."""
        before, self._buffers = self._buffers, []
        for name, buffer, version in before:
            if buffer._version != version or self.model.get_buffer(name) is not buffer:
                raise changed_by_data(name, "the loss, the clipping rule or the release")

    def _check_model(self, batch: Batch, rows: Rows, randomness: Randomness) -> None:
        """Reject a model that mixes records, before this batch can change its state."""
        self._due = len(batch) > 1 and is_due(self._batches)
        self._batches += len(batch) > 1
        if self._due and Chain.of(self.model, rows.inputs) is None:  # chains never mix records
            check_model(self.model, self._tape, batch, randomness.parts)

    def _loss_check(
        self, micro: MicroBatch, released: tuple[Tensor, ...], randomness: Randomness
    ) -> LossCheck | None:
        """Return the loss check for a micro-batch, or None for a loss that cannot mix records."""
        if not separation.active:
            return None
        if not released and never_mixes(self.plain_loss, micro.outputs, micro.targets):
            return None
        return LossCheck(
            self.plain_loss, self.loss, micro.outputs, micro.targets, len(micro),
            released, randomness.parts, thorough=self._due, segments=micro.segments,
        )  # fmt: skip

    def _losses_of_elements(self, work: _Work) -> np.ndarray:
        rows, micro_batches = work.rows, work.micro_batches
        if rows is None:
            return np.zeros(0)
        found = [micro.losses for micro in micro_batches if micro.losses is not None]
        if self.plan.hardened_rows is None:
            outputs = [tensor for micro in micro_batches for tensor in micro.output_tensors()]
            refuse_imprecise(self.plan, [*outputs, *found], self._loss_roundoff)
        values = [losses.detach().to("cpu", torch.float64).numpy() for losses in found]
        losses = rows.of_records(values[0] if len(values) == 1 else np.concatenate(values))
        if rows.segments is not None:
            # losses of opposite sign would cancel in the mean and magnify their rounding errors
            losses = rows.segments.means(np.maximum(losses, 0.0))
        return losses

    def _weights_of(self, batch: Batch, losses: np.ndarray) -> np.ndarray:
        """Return one checked weight per element of the whole batch, from the losses of all."""
        assert self.weights is not None
        owner_index = batch.all_owners()
        clip_norms = self._of.clip_norms[owner_index]
        weights = self.weights.weights(losses, clip_norms, owner_index)
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != losses.shape or not 0 <= weights.min() <= weights.max() <= 1:
            raise OwnerwiseError(
                f"{type(self.weights).__name__} returned weights of shape {weights.shape}, or "
                f"weights outside [0, 1]; expected shape {losses.shape} and values in [0, 1]"
            )
        self._weighted += 1
        if self._processes.several and is_due(self._weighted - 1):
            checksum = zlib.crc32(weights.tobytes())
            self._processes.agreed(lambda: ((checksum,), ()), ("the weights of a batch",), 0)
        return weights

    def _factors(
        self,
        gradients: PerRecordGradients | ChainGradients,
        clip_norms: np.ndarray,
        stream: StepStream | None,
        parts: StepStream,
        records: int,
    ) -> Tensor:
        """Return the clipping rule's factors, with 0 for records whose gradient is not finite."""
        norms = gradients.norms
        clips = torch.as_tensor(clip_norms, dtype=norms.dtype, device=norms.device)
        finite = None
        if not gradients.finite:
            finite = torch.isfinite(norms)
            norms = torch.where(finite, norms, torch.ones_like(norms))
        if self._proven:
            factors = self.clipping.factors(norms, clips, stream)
        else:
            factors = checked_factors(self.clipping, norms, clips, records, stream, parts)
            if norms.dtype != torch.float64:  # squares underflow: a gradient may have norm 0
                norms = norms.clamp(min=_FLOAT32_FLOOR)
            if not ((factors * norms).abs() <= clips * (1 + 1e-5)).all():
                raise OwnerwiseError(
                    f"{type(self.clipping).__name__} lets a record exceed its clip norm: the plan "
                    "assumes factor * norm <= clip norm"
                )
        return factors if finite is None else factors * finite

    def _keep_peek(self, micro_batches: list[MicroBatch], rows: Rows | None) -> None:
        """Keep the losses, norms and factors if `not_private` is set."""
        self.peek = None
        if self.not_private:
            losses = norms = factors = np.zeros(0)
            if rows is not None:
                losses, norms, factors = (
                    rows.of_records(torch.cat(column).double().cpu().numpy())
                    for column in zip(*(micro.seen for micro in micro_batches), strict=True)
                )
                losses = losses if rows.segments is None else rows.segments.means(losses)
            owner_index = np.zeros(0, dtype=np.int64) if rows is None else rows.owner_index
            active = None if self.filter is None else self.filter.active
            self.peek = Peek(losses, norms, factors, owner_index, active)

    def _gather_peek(self, batch: Batch) -> None:
        """Let every process keep the details of the whole batch, if `not_private` is set."""
        if self.peek is not None and batch.share is not None:
            peek, share = self.peek, batch.share
            losses, norms, factors = (
                self._processes.gathered(functools.partial(np.asarray, column), share.of)
                for column in (peek.losses, peek.norms, peek.factors)
            )
            self.peek = Peek(losses, norms, factors, share.owner_index, peek.active)


@dataclass
class _Work:
    """What a step has computed so far from this process's part of a batch.

    Attributes:
        batch: the part, on the model's device.
        rows: its rows; None if it has no records.
        micro_batches: the rows, in parts that fit in memory.
        part_is_checked: whether the records that were collated separately have been compared.
    """

    batch: Batch
    rows: Rows | None = None
    micro_batches: list[MicroBatch] = field(default_factory=list)
    part_is_checked: bool = False

    @property
    def single(self) -> bool:
        """Whether there is a single micro-batch, so its outputs are kept."""
        return len(self.micro_batches) == 1


def _draws_of(share: Share, rows: Rows, randomness: Randomness) -> DrawsOfShare | None:
    """Return the numbers that a randomised rule draws for the elements of a share."""
    if randomness.rule is None:
        return None
    if rows.where is None:
        return DrawsOfShare(randomness.rule, share.own, len(share))
    processes = share.processes  # every row has numbers, even an empty one
    own = np.arange(processes.rank, rows.total, processes.count)
    return DrawsOfShare(randomness.rule, own, rows.total)


def _lengths(
    factors: Tensor, records: PerRecordGradients | ChainGradients, segments: Segments | None
) -> Tensor:
    """Return the length of each row's part of the sum.

    The rows of an owner may be far longer than their sum, so their own lengths count.
    """
    if segments is None:
        return factors * records.norms
    return segments.expand(factors) * records.row_lengths().to(factors)


def _added(
    totals: dict[nn.Parameter, Tensor], sums: dict[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Add the two sums in float64, but not in place, because they may share memory."""
    added = dict(totals)
    for parameter, total in sums.items():
        before = totals.get(parameter)
        added[parameter] = total.double() if before is None else before + total
    return added


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
