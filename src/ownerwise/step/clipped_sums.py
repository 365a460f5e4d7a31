"""Compute the weighted sum of a batch's clipped gradients, to which the step adds noise."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import Batch
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import (
    ChainGradients,
    PerRecordGradients,
    Segments,
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
    proven,
)
from ownerwise.planning import Plan
from ownerwise.processes import DrawsOfShare, Processes, Share
from ownerwise.randomness import StepStream, kept_generators
from ownerwise.step.batch_weights import BatchWeights
from ownerwise.step.micro_batches import MicroBatch
from ownerwise.step.model_passes import ModelPasses, Work
from ownerwise.step.model_separation import is_due
from ownerwise.step.performance import Performance
from ownerwise.step.plug_separation import checked_factors
from ownerwise.step.release_sum import ReleaseSum
from ownerwise.step.rounding import CHARGED_NORM_ERROR, Rounding, loss_roundoff, refuse_imprecise
from ownerwise.step.secret_rows import Rows

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
        self.clipping = clipping
        self.steering = steering
        self.not_private = not_private
        self.peek: Peek | None = None
        self.rounding = Rounding.of(plan, model, weights, release or steering, processes.count)
        self._release_sum = (
            None if release is None else ReleaseSum(release, plan, self.rounding.release_slack)
        )
        self._processes = processes
        self._loss_roundoff = loss_roundoff(model)
        self._exchanged = 0  # number of batches with records in any process
        self._proven = proven(clipping)
        self._smallest_clip = float(plan.clip_norms.min())
        self._of = plan.holders
        self.filter: IndividualFilter | None = None
        if plan.filter is not None:
            self.filter = IndividualFilter(
                plan, Sensitivity(CHARGED_NORM_ERROR, self.rounding.slack)
            )
        self._reduced_clip_norms = self._of.clip_norms / (1 + self.rounding.slack)
        self._batch_weights = (
            None if weights is None else BatchWeights(weights, plan, self._loss_roundoff, processes)
        )
        self.passes = ModelPasses(
            model,
            plan,
            loss,
            peers_matter=not (weights is release is steering is None),
            shift=shift,
            performance=performance,
            processes=processes,
        )

    def __call__(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients for each trainable parameter."""
        if batch.by_owner != (self.plan.sampling == "owner"):
            raise OwnerwiseError(
                f"the plan samples {self.plan.sampling}s, but the batch was not drawn that way: "
                "iterate over PoissonBatches(data, plan)"
            )
        self._keep_peek([], None)
        self.passes.start()
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
                self._release_sum.noised(nothing, randomness, self.passes.device)
            return _zeros(self.model)
        self.passes.find_device()
        with kept_generators(), torch.enable_grad(), uncompiled():
            return self._of_batch(batch, randomness)

    def _of_batch(self, batch: Batch, randomness: Randomness) -> dict[nn.Parameter, Tensor]:
        """Return the sums for a batch that has records.

        The functions that are passed to `processes` run before an exchange. The first of them also
        begins the work.
        """
        begun: list[Work] = []
        processes, passes = self._processes, self.passes
        release, weighting = self._release_sum, self._batch_weights
        apart = processes.apart if is_due(self._exchanged) else nullcontext
        self._exchanged += 1

        def work() -> Work:
            if not begun:
                together = weighting is not None or release is not None
                begun.append(passes.begin(batch, randomness, outputs=together))
            return begun[0]

        def total() -> list[Tensor]:
            assert release is not None
            with apart():
                done = work()
                with torch.no_grad(), passes.products():
                    return [release.of(done.micro_batches, done.rows, randomness.parts)]

        def losses() -> np.ndarray:
            assert weighting is not None
            with apart():
                done = work()
                passes.check_part(done, released)
                with torch.set_grad_enabled(done.single):
                    for micro in done.micro_batches:
                        passes.evaluate(micro, released, randomness)
                return weighting.losses_of(done)

        def sums() -> list[Tensor]:
            with apart():
                found = self._sum_of_work(work(), weights, released, randomness)
            return [found[parameter] for parameter in like]

        released: tuple[Tensor, ...] = ()
        if release is not None:
            shape = [torch.empty(release.shape, dtype=torch.float64)]
            (count,) = processes.summed(total, shape)
            released = (release.noised(count, randomness, passes.device),)
        weights = None
        if weighting is not None:
            of = np.zeros(0) if batch.share is None else batch.share.of
            weights = weighting.of(batch, processes.gathered(losses, of))
        if not processes.several:
            return self._sum_of_work(work(), weights, released, randomness)
        like = _zeros(self.model)

        found = processes.summed(sums, list(like.values()), self.rounding.exchange)
        self._gather_peek(batch)
        return dict(zip(like, found, strict=True))

    def _sum_of_work(
        self,
        work: Work,
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
        self.passes.check_part(work, released)
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
        self.passes.refuse_written_buffers()
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
        records = self.passes.backward(micro, released, randomness)
        losses = micro.losses
        assert losses is not None
        clips = limits[micro.elements]
        factors = self._factors(records, clips, rule, randomness.parts, rows.total)
        if micro.check is not None:
            lengths = functools.partial(_lengths, factors, records, micro.segments)
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
