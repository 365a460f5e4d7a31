"""Plot figures with matplotlib (`pip install 'ownerwise[figures]'`): panels, axes and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import require
from ownerwise.files import write_whole


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    """Return a figure with up to three panels per row, together with its panels."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    make = require("matplotlib.figure", "ownerwise[figures]", "drawing figures").Figure
    figure = make(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=True)).flatten())
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def finish(
    figure: Any, axes: list[Any], x: str, y: str, *, legend: bool = True, share: bool = False
) -> Any:
    """Label the axes and return the figure; with `share`, the y-axis ranges from 0 to 1."""
    for axis in axes:
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
        if share:
            axis.set_ylim(-0.02, 1.02)
        if legend:
            axis.legend(fontsize=7)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file; the same figure always produces the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ownerwise"}):
        write_whole(
            path,
            lambda file: figure.savefig(
                file, format="svg", bbox_inches="tight", metadata={"Date": None}
            ),
        )
