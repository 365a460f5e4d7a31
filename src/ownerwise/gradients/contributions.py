"""What one use of a parameter adds to every record's gradient, held without forming it.

A :class:`Contribution` answers three questions about the per-record gradients ``g_i`` of one use of
one parameter: their squared norms, their weighted sum, and (for tests, and where several uses of
one parameter must be added before the norm is taken) the gradients of some records themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ownerwise.gradients.problems import Refused
from ownerwise.gradients.workspace import Workspace

__all__ = [
    "Contribution",
    "Dense",
    "Policy",
    "Saved",
    "accumulation_dtype",
    "few_rows",
    "lengths",
    "masked",
]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are formed in float32 for half-precision models (pitfall 22), else as is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def masked(tensor: Tensor, bad: Tensor) -> Tensor:
    """A copy with the records in ``bad`` set to exact zero (also where they were inf or nan)."""
    return tensor.masked_fill(bad.reshape(-1, *[1] * (tensor.dim() - 1)), 0)


def lengths(tensor: Tensor, count: int) -> Tensor:
    """``[count]``: the length of everything that a tensor holds of each record."""
    flat = tensor.reshape(count, -1)
    return torch.linalg.vector_norm(flat, dim=1, dtype=accumulation_dtype(tensor.dtype))


def few_rows(factors: Tensor) -> Tensor | None:
    """The rows whose factor is not zero, if leaving the others out saves work, else None.

    Importance sampling gives most records the factor 0; a sum over fewer than half of the rows is
    worth the copy of them.
    """
    if 2 * int(factors.count_nonzero()) >= len(factors):
        return None
    return factors.nonzero().squeeze(1)


@dataclass(slots=True)
class Policy:
    """How much memory may be spent to save time.

    Attributes:
        lean: never hold per-record gradients that are larger than what they are computed from.
        spare_bytes: what may be held beyond that, in total, when not lean.
        chunk_bytes: the working set of one chunk of records; sized to stay in cache.
        workspace: memory that is used again.
        held: what is already held beyond what it replaced.
    """

    lean: bool = False
    spare_bytes: int = 192 << 20
    chunk_bytes: int = 3 << 20
    workspace: Workspace = field(default_factory=Workspace)
    held: int = 0

    def may_hold(self, size: int, instead_of: int) -> bool:
        """Whether ``size`` bytes of gradients may replace ``instead_of`` bytes of activations."""
        extra = size - instead_of
        if extra <= 0:
            return True
        if self.lean or self.held + extra > self.spare_bytes:
            return False
        self.held += extra
        return True


class Saved:
    """An activation that must still be what it was when the layer read it."""

    __slots__ = ("tensor", "version", "where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.tensor = tensor.detach()  # without the graph, which may lead back to who saves it
        self.version = tensor._version
        self.where = where

    def get(self) -> Tensor:
        """The activation; refused if it was changed in place since."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise Refused(
                self.where,
                f"its input was changed in place after the call (version {tensor._version}, "
                f"was {self.version})",
                "use the out-of-place operation on that tensor",
            )
        return tensor


class Contribution(ABC):
    """One use of a parameter of shape ``shape``, for ``count`` records."""

    count: int
    shape: tuple[int, ...]

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """``[count]``: |g_i|^2."""

    @abstractmethod
    def per_record(self, start: int, stop: int) -> Tensor:
        """``[stop - start, *shape]``: g_i of the records in the range."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """``[*shape]``: sum_i factors[i] * g_i."""

    @abstractmethod
    def drop(self, bad: Tensor) -> None:
        """Make g_i exactly zero where ``bad`` is true."""

    def most(self) -> Tensor | None:
        """``[count]``: the most that the lengths of a record's terms in the sum can come to.

        None where the sum is made of the formed gradients: then each has one term, itself. Ask
        after the norms.
        """
        return None


class Dense(Contribution):
    """Per-record gradients that are small enough to be held as they are: ``[count, *shape]``."""

    __slots__ = ("count", "shape", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values.to(accumulation_dtype(values.dtype))
        self.count = values.shape[0]
        self.shape = tuple(values.shape[1:])

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        flat = self.values.reshape(self.count, -1)
        return torch.linalg.vector_norm(flat, dim=1).square_()

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        return self.values[start:stop]

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        return (factors @ self.values.reshape(self.count, -1)).reshape(self.shape)

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.values = masked(self.values, bad)
