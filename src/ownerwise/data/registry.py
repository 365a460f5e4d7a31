"""Data sets by name: the library's own, and those that other packages add."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ownerwise.data.digits import load_digits
from ownerwise.data.records import DataSet
from ownerwise.registry import Registry

LOADERS: Registry[Callable[..., DataSet]] = Registry(
    "ownerwise.datasets", {"digits": load_digits}, kind="data set", leading=2
)
"""The loader for each data set. Loaders take `data_dir`, `download` and their own options. Other
packages can add loaders through the entry-point group `ownerwise.datasets`."""


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    **options: Any,
) -> DataSet:
    """Return a data set by name.

    Args:
        name: one of `LOADERS`, or `package.module:function` for a loader of your own. `digits`
            comes with scikit-learn and needs no download.
        data_dir: the folder that contains a subfolder for each data set.
        download: whether the loader may fetch missing files.
        options: passed to the data set's loader, such as `scale`.

    Raises:
        OwnerwiseError: if a name or option is unknown, or if files are missing (the message says
            which files to put where), corrupted or not as expected.

    Example:
        >>> load("digits").classes[:3]
        ('0', '1', '2')
    """
    return LOADERS.make({"name": name, **options}, data_dir, download)
