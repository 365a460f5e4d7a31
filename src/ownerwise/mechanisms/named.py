"""Named losses, weights, clipping rules and releases, with options, for configuration files.

Other packages add to them through the entry-point groups `ownerwise.losses`, `ownerwise.weights`,
`ownerwise.clipping_rules` and `ownerwise.releases`; `package.module:Name` refers to any other
object.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import functional

from ownerwise.mechanisms.clipping import AutoS, ClippingRule, Psac, Standard
from ownerwise.mechanisms.importance import ImportanceSampling
from ownerwise.mechanisms.ino import INO
from ownerwise.mechanisms.losses import Loss
from ownerwise.mechanisms.plugs import Release, Weights
from ownerwise.registry import Registry

LOSSES: Registry[Loss] = Registry(
    "ownerwise.losses",
    {
        "cross_entropy": functional.cross_entropy,
        "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    },
    kind="loss",
    leading=2,
    hidden=("weight", "pos_weight", "size_average", "reduce", "reduction"),
    functions=True,
)
"""Losses: functions of outputs and targets, or classes whose objects are such functions."""

WEIGHTS: Registry[Callable[..., Weights]] = Registry(
    "ownerwise.weights", {"ino": INO}, kind="weights", hidden=("stream",)
)
"""Weights of the records in a batch."""

CLIPPING_RULES: Registry[Callable[..., ClippingRule]] = Registry(
    "ownerwise.clipping_rules",
    {"standard": Standard, "auto_s": AutoS, "psac": Psac, "importance": ImportanceSampling},
    kind="clipping",
    hidden=("stream",),
)
"""Clipping rules."""

RELEASES: Registry[Callable[..., Release]] = Registry(
    "ownerwise.releases", {}, kind="release", hidden=("stream",)
)
"""Additional releases. The library itself provides none by name, because rate constraints need the
columns of the records, which a configuration file does not describe."""
