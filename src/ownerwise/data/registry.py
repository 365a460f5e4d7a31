"""Data sets by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from ownerwise.data.cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from ownerwise.data.clinic import (
    CTG,
    HEART,
    PARKINSONS,
    TELEMONITORING,
    load_ctg,
    load_heart,
    load_parkinsons,
    load_parkinsons_telemonitoring,
)
from ownerwise.data.mnist import FASHION_MNIST, MNIST, load_fashion_mnist, load_mnist
from ownerwise.data.people import ADULT, CREDIT, load_adult, load_credit_default
from ownerwise.data.records import DataSet
from ownerwise.data.small_images import PNEUMONIA, SVHN, load_digits, load_pneumoniamnist, load_svhn
from ownerwise.data.texts import IMDB, SURNAMES, load_imdb, load_surnames
from ownerwise.errors import OwnerwiseError, known_names

LOADERS: dict[str, Callable[..., DataSet]] = {
    "adult": load_adult,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "credit_default": load_credit_default,
    "ctg": load_ctg,
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
    "heart": load_heart,
    "imdb": load_imdb,
    "mnist": load_mnist,
    "parkinsons": load_parkinsons,
    "parkinsons_telemonitoring": load_parkinsons_telemonitoring,
    "pneumoniamnist": load_pneumoniamnist,
    "surnames": load_surnames,
    "svhn": load_svhn,
}
NAMES = tuple(LOADERS)
"""The data sets that `load` knows. `digits` needs no download."""

SOURCES = {
    source.name: source
    for source in (
        *(ADULT, CIFAR10, CIFAR100, CREDIT, CTG, FASHION_MNIST, HEART, IMDB),
        *(MNIST, PARKINSONS, PNEUMONIA, SURNAMES, SVHN, TELEMONITORING),
    )
}
"""The files of every data set; `digits` comes with scikit-learn."""


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    **options: Any,
) -> DataSet:
    """Return a data set by its name.

    Args:
        name: one of `NAMES`.
        data_dir: the folder that holds the folders of data sets; by default the one that the
            environment variable OWNERWISE_DATA names. What is not there is looked for in the
            cache.
        download: whether to fetch what is found nowhere, into the cache.
        options: of the data set's own loader (`load_mnist`, ...), such as `scale`.

    Raises:
        OwnerwiseError: an unknown name or option; files that are missing (with what to put where),
            damaged, or not what was expected.

    Example:
        >>> load("digits").classes[:3]
        ('0', '1', '2')
    """
    if name not in LOADERS:
        raise OwnerwiseError(f"no data set {name!r}; {known_names(name, NAMES)}")
    loader = LOADERS[name]
    known = list(inspect.signature(loader).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise OwnerwiseError(
            f"{name} has no option {', '.join(unknown)}; expected {' or '.join(known)}"
        )
    return loader(data_dir, download, **options)
