"""Plugs whose guarantee is proved in this package."""

from __future__ import annotations

from ownerwise.mechanisms.clipping import AutoS, Psac, Standard
from ownerwise.mechanisms.constraints.rate_constraints import RateConstraints
from ownerwise.mechanisms.importance import ImportanceSampling
from ownerwise.mechanisms.plugs import Plug

__all__ = ["proven"]

_PROVEN = (Standard, AutoS, Psac, ImportanceSampling, RateConstraints)


def proven(plug: Plug) -> bool:
    """Return whether this package proves that a clipping rule or release treats records separately.

    This is true only of this package's own classes, not of subclasses. Any other rule or release
    is checked by the step in every batch.
    """
    return type(plug) in _PROVEN
