"""Poisson batches: every record takes part in a step independently, with its owner's own rate.

Guarantee. In each step record i is drawn with probability q_o(i), independently of
all other records and steps, from the secret stream: amplification by sampling needs batches that
nobody else knows. Nothing is redrawn, capped, dropped or padded; an empty batch is a step like any
other. Public: the rates, the number of steps. Private: which records a batch holds, and how many.

Method. Records are sorted once into octaves, the rates within a factor of two. In an octave with
largest rate p, candidates are found by skipping: the gap to the next one is geometric,
floor(E / -log(1-p)) with E exponential (Devroye, "Non-Uniform Random Variate Generation", 1986,
section X.2). A candidate of rate q is kept with probability q/p (thinning; always, where the octave
has one rate). The binomial count and the uniform subset of a rate class come out of the same draw.
A step costs at most about twice the expected batch plus a few numbers per octave, whether owners
share rates or every record has its own.

Exactness. Uniforms have 64 bits towards both ends of E, quotients are floored exactly, and thinning
compares 53-bit uniforms with q/p >= 1/2. What is left is the rounding of float64: the chance of a
record k places after the last candidate is off by at most about k 2^-52 of itself, which is 1e-12
at a rate of 1 % and 2e-9 for tiny rates among 10^7 records; and rates below 1e-17 begin to feel the
grid of 2^-64.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

from ownerwise.errors import OwnerwiseError
from ownerwise.random import SecretStream, StepStream

if TYPE_CHECKING:
    from ownerwise.plans import Plan

__all__ = ["Batch", "PoissonBatches", "PoissonSampler", "data_problems", "ownerless_problems"]


@dataclass(frozen=True, eq=False)
class Batch:
    """The records of one step. All but `step` is private, also their number: `repr` hides it.

    Attributes:
        step: index of the step in the plan.
        indices: record numbers, ascending, int64 [batch].
        owner_index: position of each record's owner in `plan.owners.ids`, int64 [batch].
        data: the rows: one tensor [batch, ...] per array, or what the collate function made.
        plan_hash: the plan that drew it; None for a batch made by hand.
        private: False if it was drawn with a fixed seed, or made by hand.
    """

    step: int
    indices: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)
    data: Any = field(repr=False)
    plan_hash: str | None = field(default=None, repr=False)
    private: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)


class PoissonSampler:
    """Draws record numbers, each independently with its owner's rate (see the module's text).

    Args:
        rates: sampling rate of each owner, in [0, 1].
        record_owner_index: for each record the position of its owner in `rates`.
    """

    def __init__(self, rates: np.ndarray, record_owner_index: np.ndarray) -> None:
        self.rates = np.asarray(rates, dtype=np.float64)
        self.record_owner_index = np.asarray(record_owner_index)
        wrong = self.rates[~((self.rates >= 0) & (self.rates <= 1))]
        if len(wrong):
            raise OwnerwiseError(f"sampling rates must lie in [0, 1], got {wrong[:5]}")
        if np.any(self.record_owner_index < 0):
            raise OwnerwiseError(
                "record_owner_index has negative entries: every record needs an owner"
            )
        self._octaves = _octaves(self.rates, self.record_owner_index)

    def draw(self, stream: StepStream) -> np.ndarray:
        """The records of one step, ascending, int64 [batch]."""
        drawn = [np.empty(0, dtype=np.int64)]
        for members, ceiling in self._octaves:
            candidates = members[_skip(stream, len(members), ceiling)]
            keep = self.rates[self.record_owner_index[candidates]] / ceiling
            drawn.append(candidates[stream.uniforms(len(candidates)) < keep])
        return np.sort(np.concatenate(drawn))


def _octaves(rates: np.ndarray, owner: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """(records, largest rate) for each binary exponent among the positive rates."""
    exponents, octave = np.unique(np.frexp(rates)[1], return_inverse=True)
    octave = np.where(rates > 0, octave, len(exponents)).astype(np.int16)  # rate 0 goes last
    record_octave = octave[owner]
    order = np.argsort(record_octave, kind="stable")  # a radix sort for 16-bit keys
    if len(order) < 2**31:
        order = order.astype(np.int32)
    ends = np.cumsum(np.bincount(record_octave, minlength=len(exponents) + 1))
    parts = np.split(order, ends[:-1])[: len(exponents)]
    return [
        (members, float(rates[octave == number].max()))
        for number, members in enumerate(parts)
        if len(members)
    ]


def _skip(stream: StepStream, size: int, rate: float) -> np.ndarray:
    """Positions in range(size), each taken independently with probability `rate` in (0, 1]."""
    scale = math.inf if rate == 1 else -math.log1p(-rate)
    mean = size * rate
    block = int(mean + 6 * math.sqrt(mean)) + 8  # nearly always enough; else another follows
    last, parts = -1, []
    while last < size:
        # beyond the last record the gap no longer matters, and must not overflow
        capped = np.minimum(_exponentials(stream, block), (size + 1) * scale)
        positions = last + np.cumsum((capped // scale).astype(np.int64) + 1)
        parts.append(positions[: np.searchsorted(positions, size)])
        last = int(positions[-1])
    return np.concatenate(parts)


def _exponentials(stream: StepStream, count: int) -> np.ndarray:
    """Standard exponentials by inversion of 64-bit uniforms, float64 [count].

    One bit picks the half of [0, 1], 63 bits the distance x in (0, 1/2] from its outer end, so
    that neither small values (tiny rates) nor large ones (the tail) are on a coarse grid.
    """
    words = stream.words(count)
    distance = ((words >> np.uint64(1)) + 0.5) * 2.0**-64
    return -np.where(words & np.uint64(1), np.log(distance), np.log1p(-distance))


class PoissonBatches:
    """The batches of a plan, one for each step: iterate over it.

    Each pass draws the batch of step t from (key, t) alone: how far a pass has come, whether it is
    read by workers, or whether another pass runs beside it changes nothing. With a private stream
    every pass has a key of its own, so that two trainings never share batches; with a fixed seed
    every pass repeats the same batches.

    Args:
        dataset: a tuple of tensors or arrays with one row per record, such as (X, y), or a
            map-style torch Dataset. Not a DataLoader: it would make the batches itself.
        plan: gives the rates, the owners of the records and the number of steps.
        stream: the run's stream (its child "sampling" is used); a private one if not given.
        start: first step, for a resumed run.
        steps: number of steps; to the end of the plan if not given.
        num_workers: processes that fetch the records of a Dataset ahead. They never draw,
            and change neither order nor content (random augmentation is seeded as in a DataLoader).
        collate: makes the batch from a list of samples of a Dataset; torch's default if not given.
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
                f"steps {start} to {start + steps} asked for, but the plan has {plan.steps}: its "
                "budget covers no more. Plan with more steps"
            )
        if problems := ownerless_problems(plan):
            raise OwnerwiseError(problems)
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        self._rows = _rows_of(dataset, len(plan.owners.record_owner_index), collate)
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

    @property
    def rates(self) -> np.ndarray:
        """The rates that are drawn with, per owner: the plan's, unrounded."""
        return self._sampler.rates

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        stream = self._stream.child(f"pass {self._passes if self.private else 0}")
        self._passes += 1
        drawn = ((step, self._sampler.draw(stream.at_step(step))) for step in self._steps)
        if self._num_workers and isinstance(self._rows, _DatasetRows):
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
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(seed),  # else the global one would advance
        )
        for data in loader:
            yield self._batch(*pending.popleft(), data)

    def __repr__(self) -> str:
        return f"PoissonBatches({self._steps}, {self._stream!r})"


class _ArrayRows:
    """Rows of tensors or arrays, by one indexing each."""

    def __init__(self, arrays: tuple[torch.Tensor | np.ndarray, ...]) -> None:
        self._arrays = arrays

    def __getitem__(self, indices: np.ndarray) -> tuple[torch.Tensor, ...]:
        return tuple(
            array[torch.from_numpy(indices).to(array.device)]
            if isinstance(array, torch.Tensor)
            else torch.from_numpy(array[indices])
            for array in self._arrays
        )


class _DatasetRows:
    """Rows of a map-style Dataset, collated; what DataLoader workers hold."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, indices: np.ndarray) -> Any:
        # an empty batch takes its dtypes and trailing shapes, nothing else, from record 0
        wanted = indices.tolist() or [0]
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(wanted)
        else:
            samples = [self._dataset[index] for index in wanted]
        data = self._collate(samples)
        data = tuple(data) if isinstance(data, list) else data
        return data if len(indices) else _without_rows(data)


def _without_rows(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_rows(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        parts = [_without_rows(value) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data[:0] if isinstance(data, torch.Tensor) else data


def _as_it_is(data: Any) -> Any:
    return data


def _rows_of(
    dataset: Any, records: int, collate: Callable[[list[Any]], Any] | None
) -> _ArrayRows | _DatasetRows:
    if problems := data_problems(dataset, records):
        raise OwnerwiseError(problems)
    if type(dataset) is TensorDataset and collate is None:  # a subclass may transform its rows
        dataset = dataset.tensors
    if isinstance(dataset, torch.Tensor | np.ndarray):
        dataset = (dataset,)
    if not isinstance(dataset, tuple):
        return _DatasetRows(dataset, default_collate if collate is None else collate)
    if collate is not None:
        raise OwnerwiseError("collate is for a Dataset: rows of arrays are taken at once")
    return _ArrayRows(dataset)


def ownerless_problems(plan: Plan) -> list[str]:
    """Return why no batches can be drawn: the plan does not know who owns which record."""
    if plan.owners is None:
        return ["the plan knows no owners: load it with Plan.load(path, owners=)"]
    if plan.owners.record_owner_index is None:
        return [
            "the plan's owners have no records attached: give Owners the owner id of each record, "
            "or attach them with owners.with_records(ids) before planning"
        ]
    return []


def data_problems(dataset: Any, records: int) -> list[str]:
    """All reasons why Poisson batches of `records` records cannot be taken from `dataset`."""
    kind = type(dataset).__name__
    if isinstance(dataset, torch.Tensor | np.ndarray):
        return _array_problems("the data", dataset, records)
    if isinstance(dataset, DataLoader) or hasattr(dataset, "batch_sampler"):
        return [
            f"a {kind} makes its own batches, shuffled or in order, and the privacy guarantee "
            "needs Poisson batches: pass loader.dataset, with collate=loader.collate_fn"
        ]
    if isinstance(dataset, Sampler):
        return [f"a {kind} chooses the records itself, but the plan must: pass the dataset alone"]
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "__next__"):
        return [
            f"a {kind} fixes the order of the records; Poisson batches need each record by its "
            "number: pass a map-style Dataset (__getitem__ and __len__)"
        ]
    if isinstance(dataset, tuple):
        named = [(f"array {number} of the data", array) for number, array in enumerate(dataset)]
        problems = [text for name, array in named for text in _array_problems(name, array, records)]
        return problems if dataset else ["the data is an empty tuple: pass (X, y)"]
    by_column = isinstance(dataset, dict) or hasattr(dataset, "iloc")
    if by_column or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return [
            f"records cannot be taken from a {kind} by number: pass (X, y) as tensors or arrays, "
            "or a Dataset with __getitem__ and __len__"
        ]
    return _length_problems(f"the {kind}", len(dataset), records)


def _array_problems(name: str, array: Any, records: int) -> list[str]:
    if not isinstance(array, torch.Tensor | np.ndarray):
        return [f"{name} is a {type(array).__name__}: convert it with numpy.asarray"]
    if isinstance(array, np.ndarray):
        try:
            torch.from_numpy(np.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            return [f"{name} has a dtype ({array.dtype}) that torch lacks: convert it ({error})"]
    return _length_problems(name, array.shape[0] if array.ndim else 0, records)


def _length_problems(name: str, rows: int, records: int) -> list[str]:
    if rows == records:
        return []
    return [
        f"{name} has {rows} rows, but the plan's owners list {records} records: pass the data "
        "whose rows the owner ids were given for, in the same order"
    ]
