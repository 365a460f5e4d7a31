"""Data sets by name: the library's own, and those that other packages add."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from ownerwise.data.digits import load_digits
from ownerwise.data.records import DataSet
from ownerwise.errors import OwnerwiseError, known_names
from ownerwise.registry import Registry

LOADERS: Registry[Callable[..., DataSet]] = Registry("ownerwise.datasets", {"digits": load_digits})
"""The loader of each data set. It takes `data_dir` and `download`, then options of its own. Other
packages add loaders by entry points of the group `ownerwise.datasets`."""


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    **options: Any,
) -> DataSet:
    """Return a data set by name.

    Args:
        name: one of `LOADERS`. `digits` comes with scikit-learn and needs no download.
        data_dir: the folder that holds the folders of data sets.
        download: whether the loader may fetch missing files.
        options: of the data set's own loader, such as `scale`.

    Raises:
        OwnerwiseError: an unknown name or option; files that are missing (with what to put where),
            damaged, or not what was expected.

    Example:
        >>> load("digits").classes[:3]
        ('0', '1', '2')
    """
    if name not in LOADERS:
        raise OwnerwiseError(f"no data set {name!r}; {known_names(name, LOADERS)}")
    loader = LOADERS[name]
    known = loader_options(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise OwnerwiseError(
            f"{name} has no option {', '.join(unknown)}; expected {' or '.join(known)}"
        )
    return loader(data_dir, download, **options)


def loader_options(name: str) -> list[str]:
    """Return the options of a data set's own loader."""
    return list(inspect.signature(LOADERS[name]).parameters)[2:]
