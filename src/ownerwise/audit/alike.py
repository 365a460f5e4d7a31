"""Several processes that make one audit together: the same settings, coins, data and result."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.batches import checksum
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream


def begin_alike(
    processes: Processes, plan: Plan, stream: SecretStream, settings: Mapping[str, Any]
) -> None:
    """Let all processes draw the same coins, or raise an error if they audit different things.

    Args:
        processes: the processes; all of them must call this, before the stream is used.
        plan: the plan to audit.
        stream: the audit's stream.
        settings: everything else that must be the same, by its name in messages.
    """

    def numbers() -> list[int]:
        return [_number(value) for value in (plan.hash, *settings.values())]

    processes.agreed(lambda: (numbers(), ()), ("the plan", *settings), 0)
    stream.share(processes)


def refuse_unlike(processes: Processes, name: str, values: np.ndarray) -> None:
    """Raise an error unless all processes have the same values, bit for bit."""
    own = checksum([torch.from_numpy(values)]) if processes.several else 0
    processes.agreed(lambda: ((own,), ()), (name,), 0)


def _number(value: Any) -> int:
    """Return a checksum of a value, or of a tuple of tensors."""
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
        return checksum(value)
    return zlib.crc32(repr(value).encode())
