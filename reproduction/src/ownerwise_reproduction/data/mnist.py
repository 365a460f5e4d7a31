"""MNIST and Fashion-MNIST: four files in the IDX format, plain or gzipped."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from ownerwise.data.reading import Unusable, read_bytes, reading
from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction.data.pixels import describe, scale_grey
from ownerwise_reproduction.data.sources import Download, Part, Source, locate

_UNSIGNED_BYTES = 8

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


_FILES = (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
"""File name stem and number of dimensions of each file."""


def _parts(sites: tuple[str, ...], digests: tuple[str, ...]) -> tuple[Part, ...]:
    parts = []
    for (stem, dimensions), sha256 in zip(_FILES, digests, strict=True):
        name = f"{stem}-idx{dimensions}-ubyte"
        urls = tuple(f"{site}/{name}.gz" for site in sites)
        names = (name, f"{name}.gz", f"{stem}.idx{dimensions}-ubyte")
        parts.append(Part(names, (Download(f"{name}.gz", urls, sha256),)))
    return tuple(parts)


MNIST = Source(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    _parts(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    folders=("MNIST/raw", "MNIST"),
    own_names=False,
)
FASHION_MNIST = Source(
    "fashion_mnist",
    "https://github.com/zalandoresearch/fashion-mnist",
    _parts(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        ),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    system="fashion-mnist",
    own_names=False,
)


def load_mnist(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    scale: str = "unit",
    channels: int = 1,
) -> DataSet:
    """Return MNIST in its official split: 60000 + 10000 greyscale images (28x28) of digits 0 to 9.

    `scale` is "unit" (0 to 1), "signed" (-1 to 1) or "published" (see `pixels.PUBLISHED`). With
    `channels` 3, the grey values are repeated (see `scale_grey`).
    """
    return _load(MNIST, tuple("0123456789"), data_dir, download, scale, channels)


def load_fashion_mnist(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "unit"
) -> DataSet:
    """Return Fashion-MNIST: 60000 + 10000 greyscale images (28x28) of ten kinds of clothing.

    `scale` works in the same way as for MNIST. The files in Debian's package
    dataset-fashion-mnist are found automatically.
    """
    return _load(FASHION_MNIST, FASHION_CLASSES, data_dir, download, scale)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the unsigned bytes in an IDX file with the given number of dimensions."""
    with reading(path, "IDX"):
        content = read_bytes(path)
        start = 4 + 4 * dimensions
        if content[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)) or len(content) < start:
            raise Unusable(
                f"it starts with {content[:4].hex(' ')}, expected 00 00 08 {dimensions:02x}"
            )
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
        if len(content) - start != math.prod(shape):
            raise Unusable(f"{len(content) - start} bytes do not match the shape {shape}")
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _load(
    source: Source,
    classes: tuple[str, ...],
    data_dir: str | os.PathLike | None,
    download: bool,
    scale: str,
    channels: int = 1,
) -> DataSet:
    paths = locate(source, data_dir, download)
    parts = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        pixels, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if len(pixels) != len(labels):
            raise OwnerwiseError(
                f"{images_path} contains {len(pixels)} images, but {labels_path} "
                f"contains {len(labels)} labels; expected equal numbers: download both again"
            )
        images = scale_grey(pixels, source.name, scale, channels)
        parts.append(Records(images, labels.astype(np.int64)))
    train, test = parts
    return DataSet(source.name, train, test, classes, form=describe(train.inputs, scale))
