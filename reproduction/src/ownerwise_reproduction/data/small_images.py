"""Other data sets of small images: SVHN and PneumoniaMNIST."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from scipy.io import loadmat

from ownerwise.data.reading import Unusable, read_arrays, reading
from ownerwise.data.records import DataSet, Records
from ownerwise_reproduction.data.pixels import describe, scale_grey, scale_images
from ownerwise_reproduction.data.sources import Download, Part, Source, locate

_SVHN_PAGE = "http://ufldl.stanford.edu/housenumbers"
DIGITS = tuple("0123456789")


def _svhn_part(name: str, sha256: str) -> Part:
    return Part((name,), (Download(name, (f"{_SVHN_PAGE}/{name}",), sha256),))


SVHN = Source(
    "svhn",
    _SVHN_PAGE,
    (
        _svhn_part(
            "train_32x32.mat", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"
        ),
        _svhn_part(
            "test_32x32.mat", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"
        ),
    ),
    folders=("SVHN",),
)

_PNEUMONIA_PAGE = "https://zenodo.org/records/10519652"
PNEUMONIA = Source(
    "pneumoniamnist",
    _PNEUMONIA_PAGE,
    (
        Part(
            ("pneumoniamnist.npz",),
            (
                Download(
                    "pneumoniamnist.npz",
                    (f"{_PNEUMONIA_PAGE}/files/pneumoniamnist.npz?download=1",),
                    "e1792d3f03751cb101e99f19a63b3c1941436c988665f47853417b05be250cd8",
                ),
            ),
        ),
    ),
    folders=(".medmnist", "medmnist"),
)


def load_svhn(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "unit"
) -> DataSet:
    """Return SVHN in its official split: 73257 + 26032 colour images (32x32) of house numbers.

    The digit 0, which has label 10 in the files, is class 0. `scale` is "unit" (0 to 1), "signed"
    (-1 to 1) or "published" (see `pixels.PUBLISHED`).
    """
    parts = [_read_svhn(path, scale) for path in locate(SVHN, data_dir, download)]
    train, test = parts
    return DataSet("svhn", train, test, DIGITS, form=describe(train.inputs, scale))


_ARRAYS = ("images", "labels")


def load_pneumoniamnist(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    scale: str = "unit",
    channels: int = 1,
) -> DataSet:
    """Return PneumoniaMNIST: 4708 + 524 + 624 greyscale chest X-rays (28x28), normal or pneumonia.

    The images are split into the official training, validation and test sets. `scale` is "unit"
    (0 to 1) or "signed" (-1 to 1, the usual choice for this set). With `channels` 3, the grey
    values are repeated (see `scale_grey`).
    """
    (path,) = locate(PNEUMONIA, data_dir, download)
    arrays = read_arrays(path)
    with reading(path, "the arrays of PneumoniaMNIST"):
        names = [f"{part}_{kind}" for part in ("train", "val", "test") for kind in _ARRAYS]
        if missing := [name for name in names if name not in arrays]:
            raise Unusable(f"no array {', '.join(missing)}")
        train, validation, test = (
            _grey_records(arrays[f"{part}_images"], arrays[f"{part}_labels"], scale, channels)
            for part in ("train", "val", "test")
        )
    return DataSet(
        "pneumoniamnist",
        train,
        test,
        ("normal", "pneumonia"),
        validation=validation,
        form=describe(train.inputs, scale),
    )


def _read_svhn(path: Path, scale: str) -> Records:
    with reading(path, "the MATLAB arrays X and y of SVHN"):
        arrays = loadmat(path, variable_names=["X", "y"])
        pixels, labels = arrays["X"], arrays["y"].ravel()
        if pixels.shape != (32, 32, 3, len(labels)) or pixels.dtype != np.uint8:
            raise Unusable(f"X is {pixels.dtype} {list(pixels.shape)} for {len(labels)} labels")
        if labels.min() < 1 or labels.max() > 10:
            raise Unusable(f"labels from {labels.min()} to {labels.max()}, expected 1 to 10")
    pixels = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return Records(scale_images(pixels, "svhn", scale), labels.astype(np.int64) % 10)


def _grey_records(pixels: np.ndarray, labels: np.ndarray, scale: str, channels: int) -> Records:
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise Unusable(f"images are {pixels.dtype} {list(pixels.shape)}")
    images = scale_grey(pixels, "pneumoniamnist", scale, channels)
    return Records(images, labels.ravel().astype(np.int64))
