"""Poisson batches: every record is drawn independently, at its owner's sampling rate.

Guarantee. In each step, record i is drawn with probability q_o(i), independently of all other
records and steps, from the secret stream: amplification by sampling requires that nobody else knows
the batches. Nothing is redrawn, capped, dropped or padded; an empty batch is a step like any other.
Public: the sampling rates and the number of steps. Private: a batch's records and their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ownerwise.batches.rows import DatasetRows, ownerless_problems, rows_of
from ownerwise.batches.sampler import PoissonSampler
from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import SecretStream

if TYPE_CHECKING:
    from ownerwise.planning import Plan


@dataclass(frozen=True, eq=False)
class Batch:
    """The records of one step. All but `step` is private, even their number, and hidden by `repr`.

    Attributes:
        step: index of the step in the plan.
        indices: record numbers, ascending, int64 [batch].
        owner_index: index of each record's owner in `plan.owners.ids`, int64 [batch].
        data: the rows: one tensor [batch, ...] per array, or the collate function's result.
        plan_hash: hash of the plan that drew it; None for a batch made by hand.
        private: False if it was drawn with a fixed seed or made by hand.
    """

    step: int
    indices: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)
    data: Any = field(repr=False)
    plan_hash: str | None = field(default=None, repr=False)
    private: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)


class PoissonBatches:
    """An iterable over a plan's batches, one per step.

    Each pass draws the batch for step t from (key, t) alone. The position of the pass, worker
    processes and other passes running at the same time make no difference. With a private stream
    every pass has its own key, so two training runs never share batches; with a fixed seed every
    pass repeats the same batches.

    Args:
        dataset: a tuple of tensors or arrays with one row per record, such as (X, y), or a
            map-style torch Dataset. Not a DataLoader, which forms its own batches.
        plan: provides the sampling rates, the owners of the records and the number of steps.
        stream: the run's stream (its child "sampling" is used); a private one if not given.
        start: first step, for a resumed run.
        steps: number of steps; all remaining steps of the plan if not given.
        num_workers: processes that prefetch the records of a Dataset. They never draw batches
            and change neither order nor content (random augmentation is seeded as in a DataLoader).
        collate: combines a list of a Dataset's samples into a batch; torch's default if not given.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        stream: SecretStream | None = None,
        start: int = 0,
        steps: int | None = None,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        steps = plan.steps - start if steps is None else steps
        if start < 0 or steps < 0 or start + steps > plan.steps:
            raise OwnerwiseError(
                f"got steps {start} to {start + steps}, but the plan has only {plan.steps}, which "
                "is all the budgets cover. Make a plan with more steps"
            )
        if problems := ownerless_problems(plan):
            raise OwnerwiseError(problems)
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        self._rows = rows_of(dataset, len(plan.owners.record_owner_index), collate)
        self._sampler = PoissonSampler(plan.sampling_rates, plan.owners.record_owner_index)
        self._stream = (SecretStream() if stream is None else stream).child("sampling")
        self._steps = range(start, start + steps)
        self._plan_hash = plan.hash
        self._num_workers = num_workers
        self._passes = 0

    @property
    def private(self) -> bool:
        """False if the batches come from a fixed seed."""
        return self._stream.private

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        stream = self._stream.child(f"pass {self._passes if self.private else 0}")
        self._passes += 1
        drawn = ((step, self._sampler.draw(stream.at_step(step))) for step in self._steps)
        if self._num_workers and isinstance(self._rows, DatasetRows):
            return self._fetched_by_workers(drawn, stream.child("worker seeds"))
        return (self._batch(step, indices, self._rows[indices]) for step, indices in drawn)

    def _batch(self, step: int, indices: np.ndarray, data: Any) -> Batch:
        owner_index = self._sampler.record_owner_index[indices].astype(np.int64)
        return Batch(step, indices, owner_index, data, self._plan_hash, self.private)

    def _fetched_by_workers(
        self, drawn: Iterator[tuple[int, np.ndarray]], seeds: SecretStream
    ) -> Iterator[Batch]:
        pending: deque[tuple[int, np.ndarray]] = deque()

        def requests() -> Iterator[np.ndarray]:  # runs in this process, some steps ahead
            for request in drawn:
                pending.append(request)
                yield request[1]

        seed = int(seeds.at_step(self._steps.start).integers(2**63, 1)[0])
        loader = DataLoader(
            self._rows,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=requests(),  # pyright: ignore[reportArgumentType]
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(seed),  # do not advance the global one
        )
        for data in loader:
            yield self._batch(*pending.popleft(), data)

    def __repr__(self) -> str:
        return f"PoissonBatches({self._steps}, {self._stream!r})"


def _unchanged(data: Any) -> Any:
    return data
