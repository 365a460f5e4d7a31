"""The weights of a batch, which depend on the losses of all its records."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from ownerwise.batches import Batch
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Weights
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.step.model_passes import Work
from ownerwise.step.model_separation import is_due
from ownerwise.step.rounding import refuse_imprecise


class BatchWeights:
    """Computes the weights of batches, such as INO's.

    Args:
        weights: the weights, bound to the plan.
        plan: the plan.
        loss_roundoff: the relative precision of the model's losses.
        processes: the processes that take the step together.
    """

    def __init__(self, weights: Weights, plan: Plan, loss_roundoff: float, processes: Processes):
        self._weights = weights
        self._plan = plan
        self._loss_roundoff = loss_roundoff
        self._processes = processes
        self._computed = 0  # number of batches

    def losses_of(self, work: Work) -> np.ndarray:
        """Return the losses of this process's elements, float64."""
        rows, micro_batches = work.rows, work.micro_batches
        if rows is None:
            return np.zeros(0)
        found = [micro.losses for micro in micro_batches if micro.losses is not None]
        if self._plan.hardened_rows is None:
            outputs = [tensor for micro in micro_batches for tensor in micro.output_tensors()]
            refuse_imprecise(self._plan, [*outputs, *found], self._loss_roundoff)
        values = [losses.detach().to("cpu", torch.float64).numpy() for losses in found]
        losses = rows.of_records(values[0] if len(values) == 1 else np.concatenate(values))
        if rows.segments is not None:
            # losses of opposite sign would cancel in the mean and magnify their rounding errors
            losses = rows.segments.means(np.maximum(losses, 0.0))
        return losses

    def of(self, batch: Batch, losses: np.ndarray) -> np.ndarray:
        """Return one checked weight per element of the whole batch, from the losses of all."""
        owner_index = batch.all_owners()
        clip_norms = self._plan.holders.clip_norms[owner_index]
        weights = self._weights.weights(losses, clip_norms, owner_index)
        weights = np.asarray(weights, dtype=np.float64)
        if weights.shape != losses.shape or not 0 <= weights.min() <= weights.max() <= 1:
            raise OwnerwiseError(
                f"{type(self._weights).__name__} returned weights of shape {weights.shape}, or "
                f"weights outside [0, 1]; expected shape {losses.shape} and values in [0, 1]"
            )
        self._computed += 1
        if self._processes.several and is_due(self._computed - 1):
            checksum = zlib.crc32(weights.tobytes())
            self._processes.agreed(lambda: ((checksum,), ()), ("the weights of a batch",), 0)
        return weights
