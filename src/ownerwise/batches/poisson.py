"""Poisson batches: every record is drawn independently, at its owner's sampling rate.

Guarantee. At each step, record i is drawn with probability q_o(i), independently of all other
records and steps. If the plan samples owners, each owner is drawn in this way instead, and takes
part with at most `plan.records_per_owner` randomly chosen records. The draws come from the secret
stream, because privacy amplification by sampling requires the batches to be secret. Batches are
never redrawn, capped, dropped or padded; an empty batch still counts as a step. The sampling rates
and the number of steps are public; the records in a batch and their number are private.

Several processes (torch.distributed) draw the same batches from the same key, and each fetches only
the records of its own share (`processes.Share`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ownerwise.batches.alike import shared_rows
from ownerwise.batches.devices import Device, device_problems, moved_ahead
from ownerwise.batches.rows import (
    ArrayRows,
    Collate,
    NamedArrays,
    Part,
    ownerless_problems,
    surplus_problems,
)
from ownerwise.batches.sampler import OwnerSampler, PoissonSampler
from ownerwise.batches.trees import take
from ownerwise.errors import OwnerwiseError
from ownerwise.marks import marks_of
from ownerwise.owners import frozen
from ownerwise.planning import Plan
from ownerwise.processes import Processes, Share
from ownerwise.randomness import SecretStream, StepStream, random_order

Drawn = tuple[int, np.ndarray, Share | None]
"""The step, this process's record numbers, and its share if there are several processes."""
Fetched = tuple[Drawn, Any, Part | None]
"""What was drawn, the rows, and the records that were also collated separately."""

_RECORDS_PER_PART = 64  # one in this many records of a batch is also collated separately


@dataclass(frozen=True, eq=False)
class Batch:
    """The records of one step.

    Everything except `step` is private, even the number of records, and is hidden by `repr`.

    Only `PoissonBatches` creates private batches. A batch made by hand and any copy of a batch
    (`dataclasses.replace`, `copy`, `pickle`) are NOT private, because they might not contain the
    records that were drawn. Transform records in the Dataset or its collate function; in-place
    writes to `data` are not detected.

    Attributes:
        step: index of the step in the plan.
        indices: record numbers, int64 [batch]; in ascending order, or owner by owner.
        owner_index: index of each record's owner in `plan.owners.ids`, int64 [batch]; for a record
            with several owners, the index of their set in `plan.holders`.
        data: the rows, as one tensor [batch, ...] per array or as the collate function's result.
        plan_hash: hash of the plan that the batch was drawn with; None for a batch made by hand.
        private: False if the batch was drawn with a fixed seed, comes from data marked as not
            private (see `marks`), was copied, or was made by hand.
        by_owner: whether owners were drawn, rather than records. All rows of an owner are then next
            to each other and form one element of the step's sum.
        part: some of the batch's records, collated separately; None if separate collation does
            not change their rows. If there is a part, the step checks that no record depends on
            the others.
        share: which part of a whole batch this is, if several processes train together; None for
            a whole batch. All other attributes describe this process's records only.
    """

    step: int
    indices: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)
    data: Any = field(repr=False)
    plan_hash: str | None = field(default=None, repr=False)
    part: Part | None = field(default=None, repr=False)
    by_owner: bool = field(default=False, repr=False, kw_only=True)
    share: Share | None = field(default=None, repr=False, kw_only=True)
    private: bool = field(default=False, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for copies and pickles, which are not private."""
        positional = [part.name for part in fields(self) if part.init and not part.kw_only]
        make = partial(type(self), by_owner=self.by_owner, share=self.share)
        return make, tuple(getattr(self, name) for name in positional)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def records(self) -> int:
        """Number of records in the whole batch, of all processes."""
        return len(self) if self.share is None else self.share.records

    def elements(self) -> tuple[np.ndarray, Tensor]:
        """Return the owner of each element (record, or drawn owner), and its number of rows."""
        return _elements(self.owner_index, self.by_owner)

    def all_owners(self) -> np.ndarray:
        """Return the owner of each element of the whole batch, of all processes."""
        return self.elements()[0] if self.share is None else self.share.owner_index

    def count_elements(self) -> int:
        """Return the number of elements in the whole batch, of all processes."""
        return len(self.elements()[0]) if self.share is None else len(self.share)

    def kept(self, which: np.ndarray) -> Batch:
        """Return the batch without some elements.

        Args:
            which: whether each element of the whole batch is kept.
        """
        share = self.share
        own = which if share is None else which[share.own]
        kept = np.flatnonzero(np.repeat(own, self.elements()[1].numpy()))
        return replace(
            self,
            indices=self.indices[kept],
            owner_index=self.owner_index[kept],
            data=take(self.data, kept.tolist()),
            share=None if share is None else share.kept(which),
        )


class PoissonBatches:
    """An iterable over a plan's batches, one per step.

    The batch for step t depends only on the key of the pass and on t. Worker processes, earlier
    steps and concurrent passes do not affect it. With a private stream, every pass has its own key,
    so two training runs never share batches. With a fixed seed, every pass repeats the same
    batches.

    Args:
        dataset: a tuple of tensors or arrays with one row per record, such as (X, y), or a
            map-style torch Dataset. X may be a dict of arrays, which the step passes to the model
            as keywords. A DataLoader is rejected because it forms its own batches.
        plan: the plan, which provides the sampling rates, the owners and the number of steps; it is
            verified here unless it has already been verified. If it samples records, no owner may
            have more of them than declared.
        stream: the run's stream (its child "sampling" is used); by default a new private stream.
        start: index of the first step, for a resumed run.
        steps: number of steps; by default all remaining steps of the plan.
        num_workers: number of processes that prefetch the records of a Dataset. These processes
            never draw batches and do not affect the batches' order or content (random augmentation
            is seeded as in a DataLoader).
        collate: combines a list of samples into a batch; by default torch's `default_collate`.
        device: where the batches' tensors go; to a GPU, they are copied ahead of time. By default,
            they stay where they are, and the step moves them to the model's device.
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
        collate: Collate | None = None,
        device: Device | None = None,
    ) -> None:
        plan = Plan.verified(plan)  # not the method of a subclass
        steps = plan.steps - start if steps is None else steps
        if start < 0 or steps < 0 or start + steps > plan.steps:
            raise OwnerwiseError(
                f"got steps {start} to {start + steps}, but the plan has only {plan.steps} steps, "
                "and the budgets do not cover more. Make a plan with more steps"
            )
        if problems := [
            *ownerless_problems(plan), *surplus_problems(plan), *device_problems(device)
        ]:  # fmt: skip
            raise OwnerwiseError(problems)
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        self._processes = Processes.here()
        dataset = NamedArrays.of(dataset)
        self._rows = shared_rows(self._processes, dataset, plan, collate)
        rates, owner_index = plan.holders.sampling_rates, plan.owners.record_owner_index
        self._by_owner = plan.sampling == "owner"
        self._sampler = (
            OwnerSampler(rates, owner_index, plan.records_per_owner)
            if self._by_owner
            else PoissonSampler(rates, owner_index)
        )
        stream = SecretStream() if stream is None else stream
        stream.share(self._processes)
        self._stream = stream.child("sampling")
        self._hardened_rows = plan.hardened_rows
        self._steps = range(start, start + steps)
        self._plan_hash = plan.hash
        self._num_workers = num_workers
        self._device = None if device is None else torch.zeros(0, device=device).device
        self._passes = 0
        self._marked = bool(marks_of(dataset))

    @property
    def private(self) -> bool:
        """False if the batches are drawn with a fixed seed."""
        return self._stream.private

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        stream = self._stream.child(f"pass {self._passes if self.private else 0}")
        self._passes += 1
        loaded = moved_ahead(self._loaded(stream), self._device)
        return (self._batch(*fetched) for fetched in loaded)

    def _loaded(self, stream: SecretStream) -> Iterator[Fetched]:
        """Draw the batches of a pass, and load their records."""
        drawn = self._drawn(stream)
        rows = self._rows
        if isinstance(rows, ArrayRows):
            return ((of, rows[of[1]], None) for of in drawn)
        parts = stream.child("parts") if rows.foreign else None
        if self._num_workers:
            rank = self._processes.rank
            seeds = stream.child(f"worker seeds {rank}" if rank else "worker seeds")
            return self._fetched_by_workers(drawn, parts, seeds)
        return ((of, *rows[of[1], _positions(of[0], len(of[1]), parts)]) for of in drawn)

    def _drawn(self, stream: SecretStream) -> Iterator[Drawn]:
        """Draw the record numbers of a pass, and find those of this process."""
        places = None if self._hardened_rows is None else stream.child("places")
        for step in self._steps:
            indices = self._sampler.draw(stream.at_step(step))
            if not self._processes.several:
                yield step, indices, None
                continue
            share = self._share(indices, None if places is None else places.at_step(step))
            yield step, indices[share.own_records], share

    def _share(self, indices: np.ndarray, places: StepStream | None) -> Share:
        """Return this process's share of a batch.

        In a hardened plan, each record gets a secret row here, which decides its process.
        """
        owner_index = self._sampler.record_owner_index[indices].astype(np.int64)
        owners, sizes = _elements(owner_index, self._by_owner)
        rows, most = None, self._hardened_rows
        if places is not None and most is not None and not self._by_owner and len(indices) <= most:
            rows = random_order(places, most)[: len(indices)]
        return Share.divided(self._processes, indices, owners, sizes.numpy(), rows)

    def _batch(self, drawn: Drawn, data: Any, part: Part | None) -> Batch:
        step, indices, share = drawn
        owner_index = self._sampler.record_owner_index[indices].astype(np.int64)
        batch = Batch(
            step,
            indices,
            frozen(owner_index),
            data,
            self._plan_hash,
            part,
            by_owner=self._by_owner,
            share=share,
        )
        object.__setattr__(batch, "private", self.private and not self._marked)
        return batch

    def _fetched_by_workers(
        self,
        drawn: Iterator[Drawn],
        parts: SecretStream | None,
        seeds: SecretStream,
    ) -> Iterator[Fetched]:
        pending: deque[Drawn] = deque()

        def requests() -> Iterator[tuple[np.ndarray, np.ndarray]]:  # runs here, ahead of time
            for of in drawn:
                pending.append(of)
                yield of[1], _positions(of[0], len(of[1]), parts)

        seed = int(seeds.at_step(self._steps.start).integers(2**63, 1)[0])
        loader = DataLoader(
            self._rows,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=requests(),  # pyright: ignore[reportArgumentType]
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(seed),  # the global one must not advance
        )
        for data, part in loader:
            yield pending.popleft(), data, part

    def __repr__(self) -> str:
        return f"PoissonBatches({self._steps}, {self._stream!r})"


def _elements(owner_index: np.ndarray, by_owner: bool) -> tuple[np.ndarray, Tensor]:
    """Return the owner of each element (record, or drawn owner), and its number of rows."""
    if not by_owner:
        return owner_index, torch.ones(len(owner_index), dtype=torch.int64)
    index = torch.tensor(owner_index)  # a copy: the array may be frozen
    owners, sizes = torch.unique_consecutive(index, return_counts=True)
    if len(set(owners.tolist())) < len(owners):
        raise OwnerwiseError(
            "the rows of an owner are not next to each other in the batch, so they would count "
            "as several owners: iterate over PoissonBatches(data, plan)"
        )
    return owners.numpy(), sizes


def _positions(step: int, records: int, stream: SecretStream | None) -> np.ndarray:
    """Return the secret positions of the records that are also collated separately."""
    if stream is None or not records:
        return np.zeros(0, dtype=np.int64)
    count = max(1, records // _RECORDS_PER_PART)
    return np.unique(stream.at_step(step).integers(records, count))


def _unchanged(data: Any) -> Any:
    return data
