"""Plot figures with matplotlib (`pip install 'ownerwise[figures]'`): style, panels, axes and files.

Every figure of the documentation and of the results is drawn in this style, in the colours of the
report. Its title states its message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import require
from ownerwise.files import write_whole
from ownerwise.report.palette import SERIES, palette, series

MARKERS = "osDvP^X"
"""Markers of series, in order, so that no figure relies on colour alone."""


def style() -> dict[str, Any]:
    """Return matplotlib's settings for all figures."""
    colours = palette()
    cycler = require("cycler", "ownerwise[figures]", "drawing figures").cycler
    return {
        "axes.prop_cycle": cycler(color=series()),
        "axes.edgecolor": colours["rule"],
        "axes.labelcolor": colours["muted"],
        "axes.titlecolor": colours["ink"],
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
        "xtick.color": colours["muted"],
        "ytick.color": colours["muted"],
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "text.color": colours["ink"],
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "figure.titlesize": 12,
        "figure.titleweight": "bold",
        "svg.hashsalt": "ownerwise",
    }


def colour(number: int) -> str:
    """Return the colour of series `number`."""
    return series()[number % SERIES]


def new_figure(panels: int, message: str = "", *, size: tuple[float, float] = (4.2, 3.2)) -> Any:
    """Return a figure with up to three panels per row, and its panels.

    Args:
        panels: number of panels.
        message: what the figure shows, in a sentence.
        size: width and height of a panel, in inches.
    """
    matplotlib = require("matplotlib", "ownerwise[figures]", "drawing figures")
    make = require("matplotlib.figure", "ownerwise[figures]", "drawing figures").Figure
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    with matplotlib.rc_context(style()):
        figure = make(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=True)).flatten())
        for axis in axes[panels:]:
            axis.remove()
        if message:
            say(figure, message)
    return figure, axes[:panels]


def say(figure: Any, message: str) -> None:
    """Set the title of a figure, which states its message."""
    figure.suptitle(message, x=0.01, ha="left", color=palette()["ink"], fontsize=12, weight="bold")


def finish(
    figure: Any, axes: list[Any], x: str, y: str, *, legend: bool = True, share: bool = False
) -> Any:
    """Label the axes and return the figure; with `share`, the y-axis is in percent of a share."""
    ink = palette()["ink"]
    for axis in axes:
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.title.set(fontsize=10, weight="bold", color=ink)
        if share:
            axis.set_ylim(-0.02, 1.02)
            axis.yaxis.set_major_formatter("{x:.0%}")
        if legend:
            axis.legend(fontsize=8, frameon=False)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file; the same figure always produces the same bytes."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    options = {"svg": {"metadata": {"Date": None}}, "png": {"metadata": {"Software": None}}}[kind]
    if kind == "png":
        options["dpi"] = 150
    with matplotlib.rc_context(style()):
        write_whole(
            path,
            lambda file: figure.savefig(file, format=kind, bbox_inches="tight", **options),
        )
