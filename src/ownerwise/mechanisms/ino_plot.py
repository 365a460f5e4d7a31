"""Pictures of tail and batch importance, as in Figures 3 and 4 of the INO-SGD paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ownerwise.errors import require

if TYPE_CHECKING:
    from ownerwise.mechanisms.ino import INO

_LINE, _FILL = "#0b6e99", "#9cc9dd"


def plot(ino: INO, scores: np.ndarray | None, clip_norms: np.ndarray | None) -> Any:
    """Return a figure: the tail function, and beside it a batch's importance and weights."""
    with_batch = scores is not None and clip_norms is not None
    make = require("matplotlib.figure", "ownerwise[figures]", "drawing weights").Figure
    figure = make(figsize=(9.5 if with_batch else 4.5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if with_batch else 1, squeeze=False)[0]
    _plot_tail(axes[0], ino)
    if with_batch:
        _plot_batch(axes[1], ino, np.asarray(scores, float), np.asarray(clip_norms, float))
    for panel in axes:
        panel.set_ylim(0, 1.05)
        panel.set_ylabel("importance")
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _plot_tail(panel: Any, ino: INO) -> None:
    x = np.linspace(0, 1, 1001)
    panel.plot(x, ino.tail_function.rising(1 - x), color=_LINE, linewidth=2)
    panel.set_xlabel("position in the tail, from its start to its end")
    panel.set_title("tail importance", fontsize=10)


def _plot_batch(panel: Any, ino: INO, scores: np.ndarray, clip_norms: np.ndarray) -> None:
    weights = ino.weights(scores, clip_norms)
    order = np.argsort(-scores, kind="stable")
    widths = clip_norms[order]
    ends = np.cumsum(widths)
    panel.bar(
        ends - widths, weights[order], widths, align="edge", color=_FILL, edgecolor="white",
        label="weight of a record",
    )  # fmt: skip
    c = np.linspace(0, ends[-1], 2001)
    length = ino.tail_length or 0.0
    inside = np.clip((ends[-1] - c) / length, 0, 1) if length else np.ones_like(c)
    height = np.where(ends[-1] - c >= length, 1.0, ino.tail_function.rising(inside))
    panel.plot(c, height, color=_LINE, linewidth=2, label="batch importance")
    panel.set_xlabel("clip norm summed up, highest score first")
    panel.set_title("batch importance", fontsize=10)
    panel.legend(frameon=False, fontsize=8, loc="lower left")
