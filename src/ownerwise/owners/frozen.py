"""Arrays that cannot be written to."""

from __future__ import annotations

from typing import Any

import numpy as np


def frozen(values: Any) -> np.ndarray:
    """Return the values as an array over immutable bytes, without a copy if they already are one.

    A read-only flag alone can be cleared (`setflags`) and does not prevent writes through the base
    array of a view. An array over `bytes` has no writeable base.
    """
    array = np.asarray(values)
    memory = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if isinstance(memory, bytes) and not array.flags.writeable:
        return array
    return np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)
