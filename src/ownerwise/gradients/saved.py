"""Activations that a rule uses again in the backward pass."""

from __future__ import annotations

from torch import Tensor

from ownerwise.gradients.problems import Refused

__all__ = ["Saved"]


class Saved:
    """A tensor that must not change between the call that reads it and the backward pass."""

    __slots__ = ("tensor", "version", "where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.tensor = tensor.detach()  # without its graph, which may refer back to this object
        self.version = tensor._version
        self.where = where

    def get(self) -> Tensor:
        """Return the tensor, or raise an error if it has since been changed in place."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise Refused(
                self.where,
                f"its input was changed in place after the call (version {tensor._version}, "
                f"previously {self.version})",
                "use the out-of-place version of the operation that changed it",
            )
        return tensor
