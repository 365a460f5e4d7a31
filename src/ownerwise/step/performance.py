"""Options that affect only speed and memory, separate from everything that a plan accounts for.

These options change neither the guarantee nor the result, except for the last bits of sums and the
dropout masks, which depend on how a batch is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_TARGET = 2 << 30
"""Default memory for the activations of one micro-batch: 2 GiB."""


@dataclass(frozen=True)
class Performance:
    """Options of the private step that change only its speed and memory.

    Args:
        micro_batch_size: number of records computed together; derived from `memory_target` by
            default.
        memory_target: bytes available for the activations of one micro-batch.
        lean: whether to save memory at the cost of speed.

    Example:
        >>> Performance(micro_batch_size=64)
        Performance(micro_batch_size=64, memory_target=2147483648, lean=False)
    """

    micro_batch_size: int | None = None
    memory_target: int = MEMORY_TARGET
    lean: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a problem for every option that is out of range."""
        sizes = {"micro_batch_size": self.micro_batch_size, "memory_target": self.memory_target}
        for name, value in sizes.items():
            if value is None and name == "micro_batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield f"{name}={value!r}: expected a whole number of at least 1"
        if not isinstance(self.lean, bool):
            yield f"lean={self.lean!r}: expected True or False"
