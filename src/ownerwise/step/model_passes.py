"""Run the model and the loss on a batch, and check that neither mixes records."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ownerwise.batches import Batch, device_of, moved
from ownerwise.gradients import (
    Attributes,
    Chain,
    ChainGradients,
    PerRecordGradients,
    Tape,
    call_model,
    changed_by_data,
    full_products,
)
from ownerwise.mechanisms import Loss, Randomness, never_mixes, per_record
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.repair import shifted
from ownerwise.step import separation
from ownerwise.step.loss_separation import LossCheck
from ownerwise.step.micro_batches import MicroBatch, Split
from ownerwise.step.model_separation import check_model, check_part, is_due
from ownerwise.step.performance import Performance
from ownerwise.step.secret_rows import Rows, place


@dataclass
class Work:
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


class ModelPasses:
    """Runs the model and the loss on micro-batches, and computes the per-record gradients.

    Args:
        model, plan, loss, performance: as for `PrivateStep`.
        peers_matter: whether a record's contribution depends on more of the outputs than their
            gradients, as with weights, a release or steering.
        shift: what to add to the class outputs before the loss, [classes]; a public constant.
        processes: the processes that take the step together.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        *,
        peers_matter: bool,
        shift: Tensor | None,
        performance: Performance,
        processes: Processes,
    ):
        self.model = model
        self.plain_loss = loss
        self.device: torch.device | None = None  # of the model, as of the last batch
        self._plan = plan
        self._loss = per_record(loss)
        self._in_full = peers_matter and plan.hardened_rows is None
        self._shift = shift
        self._processes = processes
        self._split = Split(model, performance)
        self._tape = Tape(model, lean=performance.lean, even=plan.filter is not None)
        self._batches = 0  # number of batches with at least two records
        self._due = False
        self._buffers: list[tuple[str, Tensor, int]] = []  # as of the last forward pass

    def start(self) -> None:
        """Forget the last batch, which may have ended with an error."""
        self._buffers = []

    def find_device(self) -> None:
        """Find out where the model is."""
        first = next(self.model.parameters(), None)
        if first is None or first.device != self.device:
            self.device = device_of(self.model)

    def begin(self, batch: Batch, randomness: Randomness, *, outputs: bool) -> Work:
        """Check the model, split this process's part of the batch, and run it if necessary.

        The outputs of a single micro-batch are kept for its backward pass. Several micro-batches
        run again one by one, so here they run without gradients, and only if their outputs are
        needed together.

        Args:
            batch: this process's part.
            randomness: the step's random numbers.
            outputs: whether the outputs of all micro-batches are needed.
        """
        if not len(batch):
            return Work(batch)
        data, part = moved(batch.data, self.device), moved(batch.part, self.device)
        if data is not batch.data or part is not batch.part:
            batch = dataclasses.replace(batch, data=data, part=part)
        declared = None if self._plan.filter is None else self._plan.records
        rows = place(batch, self._plan.hardened_rows, randomness.rows, declared)
        self._check_model(batch, rows, randomness)
        work = Work(batch, rows, self._split(rows))
        if work.single or outputs:
            with torch.set_grad_enabled(work.single):
                for micro in work.micro_batches:
                    self.forward(micro, randomness)
        return work

    def forward(self, micro: MicroBatch, randomness: Randomness) -> None:
        """Compute the outputs of a micro-batch, with the same dropout masks in every pass."""
        self.refuse_written_buffers()
        with self.products():
            micro.chain = Chain.of(self.model, micro.inputs)
            if micro.chain is not None:
                outputs = micro.chain.forward(micro.inputs)
            else:
                # processes must not share masks
                number, processes = micro.number, self._processes
                randomness.layers.enter(number * processes.count + processes.rank)
                attributes = Attributes(self.model)
                with self._tape:
                    outputs = call_model(self.model, micro.inputs)
                attributes.drop_data()
                self._buffers = [(name, b, b._version) for name, b in self.model.named_buffers()]
            micro.outputs = outputs if self._shift is None else shifted(outputs, self._shift)

    def evaluate(
        self, micro: MicroBatch, released: tuple[Tensor, ...], randomness: Randomness
    ) -> Tensor:
        """Compute a micro-batch's losses, and begin to check them if gradients will be computed."""
        with self.products():
            if torch.is_grad_enabled():
                micro.check = self._loss_check(micro, released, randomness)
            micro.losses = losses = self._loss(micro.outputs, micro.targets, *released)
        return losses

    def backward(
        self, micro: MicroBatch, released: tuple[Tensor, ...], randomness: Randomness
    ) -> PerRecordGradients | ChainGradients:
        """Return the per-record gradients of a micro-batch; run what has not been run yet."""
        if micro.outputs is None:
            self.forward(micro, randomness)
        losses = micro.losses
        if losses is None:
            losses = self.evaluate(micro, released, randomness)
        if micro.chain is None:
            return self._tape.backward(losses, micro.segments)
        also = None if micro.check is None else micro.check.joint(losses)
        return micro.chain.backward(losses, micro.segments, also=also)

    def check_part(self, work: Work, released: tuple[Tensor, ...]) -> None:
        """Check once per step whether collating records together has changed them."""
        if work.part_is_checked or work.rows is None:
            return
        work.part_is_checked = True
        with torch.set_grad_enabled(work.single), self.products():
            check_part(
                self.model, self._loss, work.batch, released,
                fixed_shapes=self._plan.hardened_rows is not None,
            )  # fmt: skip

    def refuse_written_buffers(self) -> None:
        """Raise an error if a loss, rule or release wrote to a buffer after the forward pass."""
        before, self._buffers = self._buffers, []
        for name, buffer, version in before:
            if buffer._version != version or self.model.get_buffer(name) is not buffer:
                raise changed_by_data(name, "the loss, the clipping rule or the release")

    def products(self) -> AbstractContextManager:
        """Return the context for outputs and losses.

        The slack for the order of records, and for a release or steering, assumes that other
        records change only the last bits of a record's results. A less precise kernel for large
        batches alone would change more.
        """
        if not self._in_full:
            return nullcontext()
        return full_products(torch.device("cpu") if self.device is None else self.device)

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
            self.plain_loss, self._loss, micro.outputs, micro.targets, len(micro),
            released, randomness.parts, thorough=self._due, segments=micro.segments,
        )  # fmt: skip
