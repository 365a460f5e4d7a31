"""The digits that come with scikit-learn: a data set that needs no download."""

from __future__ import annotations

import os

import numpy as np

from ownerwise.data.pixels import describe, scale_images
from ownerwise.data.records import DataSet, Records
from ownerwise.data.splits import positional_split
from ownerwise.errors import require

CLASSES = tuple("0123456789")
_BRIGHTEST = 16


def load_digits(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "unit"
) -> DataSet:
    """Return the 1797 greyscale 8x8 images of the digits 0 to 9 that come with scikit-learn.

    Nothing is read from `data_dir` or downloaded. There is no official split, so every fifth record
    of each class, in the order of the source, becomes a test record. The file is public and never
    changes, so this split is part of the data set, and neighbouring data sets differ in one
    training record. `scale` is "unit" or "signed".
    """
    bundled = require("sklearn.datasets", "ownerwise[sklearn]", "the data set digits").load_digits()
    images = scale_images(bundled.images[:, None], "digits", scale, brightest=_BRIGHTEST)
    records = Records(images, bundled.target.astype(np.int64))
    test = positional_split(records.targets)
    train, test = records.take(~test), records.take(test)
    return DataSet("digits", train, test, CLASSES, form=describe(train.inputs, scale))
