"""What the processes of a group tell each other: numbers, sums, and errors.

Every method that exchanges something must be called by all processes, in the same order. The work
that a process does before an exchange is passed to the method as a function: if it raises an error
in one process, all processes raise it, and none waits for the others in vain. A process alone only
does the work.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.processes.apart import Apart

Result = TypeVar("Result")

AWAKE = 0.01
"""For how many seconds a process stays awake while it waits for the others."""

_give_way = getattr(os, "sched_yield", functools.partial(time.sleep, 0))  # not on Windows


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together.

    Attributes:
        rank: number of this process, from 0.
        count: number of processes; 1 without a process group.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Processes:
        """Return torch.distributed's default group, or this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return self.count > 1

    def apart(self) -> AbstractContextManager[object]:
        """Return a context in which several processes refuse to exchange anything."""
        return Apart() if self.several else nullcontext()

    def refuse_another_group(self) -> None:
        """Raise an error if the group in which the run began has ended, or another has begun."""
        if (now := Processes.here()) != self:
            raise OwnerwiseError(
                f"the process group of this run has changed: this was process {self.rank} of "
                f"{self.count} when it began, and now it is process {now.rank} of {now.count}. "
                "Initialise the group before the run and keep it until the end; to use another "
                "number of processes, resume from a checkpoint"
            )

    def together(self, work: Callable[[], Result]) -> Result:
        """Return the result of the work in this process, if it succeeded in all of them."""
        if not self.several:
            return work()
        results: list[Result] = []

        def done() -> tuple[Sequence[int], Sequence[int]]:
            results.append(work())
            return (), ()

        self.agreed(done, (), 0)
        return results[0]

    def agreed(
        self,
        work: Callable[[], tuple[Sequence[int], Sequence[int]]],
        names: Sequence[str],
        flags: int,
    ) -> list[int]:
        """Return the largest of each flag over all processes, if they agree on all numbers.

        Args:
            work: returns the numbers that must be the same in all processes, and the flags.
            names: what the numbers are, for messages.
            flags: how many flags there are.
        """
        if not self.several:
            return list(work()[1])
        self.refuse_another_group()
        error: BaseException | None = None
        same: Sequence[int] = (0,) * len(names)
        found: Sequence[int] = (0,) * flags
        try:
            same, found = work()
        except BaseException as caught:
            error = caught
        own = [int(error is not None), *found, *same, *(-number for number in same)]
        told = torch.tensor(own, dtype=torch.int64, device=_device())
        _finish(dist.all_reduce(told, op=dist.ReduceOp.MAX, async_op=True))
        failed, *most = told.tolist()
        if failed:
            self._raise(error)
        largest, smallest = most[flags : flags + len(names)], most[flags + len(names) :]
        if differing := [
            name for name, high, low in zip(names, largest, smallest, strict=True) if high != -low
        ]:
            raise _everywhere(
                OwnerwiseError(
                    f"the {self.count} processes differ in {', '.join(differing)}: run the same "
                    "script with the same data, plan and settings in all of them"
                )
            )
        return most[:flags]

    def gathered(self, work: Callable[[], np.ndarray], of: np.ndarray) -> np.ndarray:
        """Return one number per element of a batch, float64, from the processes that hold them.

        Args:
            work: returns the numbers of this process's elements, in order.
            of: the process of each element.
        """
        if not self.several:
            return work()
        self.refuse_another_group()
        sizes = np.bincount(of, minlength=self.count)
        own = np.zeros(int(sizes.max(initial=0)) + 1)
        error: BaseException | None = None
        try:
            own[1 : 1 + sizes[self.rank]] = work()
        except BaseException as caught:
            error, own[0] = caught, 1.0
        sent = torch.from_numpy(own).to(_device())
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        _finish(dist.all_gather(parts, sent, async_op=True))
        columns = [part.cpu().numpy() for part in parts]
        if any(column[0] for column in columns):
            self._raise(error)
        whole = np.empty(len(of))
        for rank, column in enumerate(columns):
            whole[of == rank] = column[1 : 1 + sizes[rank]]
        return whole

    def summed(
        self,
        work: Callable[[], Sequence[Tensor]],
        like: Sequence[Tensor],
        dtype: torch.dtype = torch.float64,
    ) -> Sequence[Tensor]:
        """Return the sums of the processes' tensors, the same bits in every process.

        Args:
            work: returns the tensors of this process.
            like: tensors of the same shapes.
            dtype: the dtype in which the tensors are sent and added.
        """
        if not self.several:
            return work()
        self.refuse_another_group()
        sizes = [tensor.numel() for tensor in like]
        buffer = torch.zeros(sum(sizes) + 1, dtype=dtype, device=_device(like[0].device))
        *pieces, failed = buffer.split([*sizes, 1])
        error: BaseException | None = None
        try:
            for piece, tensor in zip(pieces, work(), strict=True):
                piece.copy_(tensor.detach().reshape(-1))
        except BaseException as caught:
            error = caught
            failed.fill_(1.0)
        _finish(dist.all_reduce(buffer, async_op=True))
        if failed.item():
            self._raise(error)
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Do the work in the first process alone, and return its result in all of them."""
        if not self.several:
            return work()
        result = self.together(lambda: work() if self.first else None)
        sent = [result]
        dist.broadcast_object_list(sent, src=0)
        return sent[0]  # pyright: ignore[reportReturnType]

    def all_of(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        values = [value] * self.count
        if self.several:
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.agreed(lambda: ((), (int(flag),)), (), 1)[0])

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with those of the first process."""
        if self.several:
            for tensor in tensors:
                sent = tensor.detach().to(_device()).contiguous()
                dist.broadcast(sent, src=0)
                with torch.no_grad():
                    tensor.copy_(sent)

    def _raise(self, error: BaseException | None) -> NoReturn:
        """Raise the errors of all processes in every process."""
        told = self.all_of(None if error is None else _told(error))
        if error is not None and not isinstance(error, OwnerwiseError):
            raise error
        found = [(rank, each) for rank, each in enumerate(told) if each is not None]
        kind, problems = OwnerwiseError, []
        for rank, (other, texts) in found:
            if other is None:
                texts = [f"process {rank} stopped with a {texts[0]}, which it describes itself"]
            elif not problems:
                kind = other
            problems += texts
        raise _everywhere(kind(list(dict.fromkeys(problems)))) from error


ALONE = Processes()
"""This process, if it trains alone."""


def _told(error: BaseException) -> tuple[type[OwnerwiseError] | None, list[str]]:
    if isinstance(error, OwnerwiseError):
        return type(error), list(error.problems)
    return None, [type(error).__name__]


def _everywhere(error: OwnerwiseError) -> OwnerwiseError:
    """Mark an error that all processes raise, so that only the first one prints it."""
    error.everywhere = True
    return error


def _finish(work: dist.Work | None) -> None:
    """Wait until an exchange is finished, or raise its error.

    A sleeping process is woken several times in one exchange, which takes up to two milliseconds in
    all. So stay awake at first, but let others have the core.
    """
    assert work is not None  # this process is in the group
    end = time.perf_counter() + AWAKE
    while not work.is_completed() and time.perf_counter() < end:
        _give_way()
    work.wait()


def _device(near: torch.device | None = None) -> torch.device:
    """Return where tensors must be to be sent: on the CPU if possible, unless they are on a GPU."""
    backends = str(dist.get_backend_config())
    if near is not None and near.type == "cuda" and "cuda:nccl" in backends:
        return near
    if "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
