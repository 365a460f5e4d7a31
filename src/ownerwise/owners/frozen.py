"""Arrays that cannot be written to."""

from __future__ import annotations

from typing import Any

import numpy as np


def frozen(values: Any) -> np.ndarray:
    """Return the values as an array backed by immutable bytes, copying only if necessary.

    A read-only flag alone can be cleared (`setflags`) and does not prevent writes through the base
    array of a view. An array backed by `bytes` has no writeable base.
    """
    array = np.asarray(values)
    memory = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if isinstance(memory, bytes) and not array.flags.writeable:
        return array
    return np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)
