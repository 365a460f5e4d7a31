"""Read the picture files listed in a table, such as a file of attributes for a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from ownerwise.data.pixels import scale_images
from ownerwise.data.reading import reading
from ownerwise.errors import OwnerwiseError, Problems, name_some, require


@dataclass(frozen=True)
class Pictures:
    """How to read the picture files (PNG, JPEG, ...) whose names are in a column of a table.

    Attributes:
        folder: the folder with the files; by default the table's folder.
        size: (height, width) to resize every picture to; None if all already have the same size.
        channels: 3 for colour, 1 for greyscale.
        scale: "unit" (0 to 1) or "signed" (-1 to 1).
    """

    folder: str | PathLike | None = None
    size: Sequence[int] | None = None
    channels: int = 3
    scale: str = "unit"

    def __post_init__(self):
        problems = Problems()
        if self.channels not in (1, 3):
            problems.add(f"channels={self.channels}: expected 3 (colour) or 1 (greyscale)")
        if self.size is not None and (
            len(self.size) != 2 or not all(isinstance(s, int) and s > 0 for s in self.size)
        ):
            problems.add(f"size={self.size}: expected (height, width) in pixels, or None")
        problems.raise_()

    def read(self, names: Sequence[str], table: Path) -> np.ndarray:
        """Return the pictures, float32 [records, channels, height, width], in the table's order."""
        folder = table.parent if self.folder is None else table.parent / self.folder
        missing = [at for at, name in enumerate(names) if not (folder / str(name)).is_file()]
        if missing:
            raise OwnerwiseError(
                f"the file that {table.name} names in {name_some(missing, 'record {}'.format)} is "
                f"not in {folder}; expected one file for each row"
            )
        pixels = [self._read_one(folder / str(name), at) for at, name in enumerate(names)]
        if len({picture.shape[1:] for picture in pixels}) > 1:
            raise OwnerwiseError(
                f"{folder}: the pictures have different sizes; expected the same size for all: "
                "pass size=(height, width)"
            )
        return scale_images(np.stack(pixels), "pictures", self.scale)

    def _read_one(self, path: Path, at: int) -> np.ndarray:
        image = require("PIL.Image", "ownerwise[image]", "reading pictures")
        with reading(f"the file of record {at}", "a picture"), image.open(path) as opened:
            picture = opened.convert("RGB" if self.channels == 3 else "L")
            if self.size is not None:
                height, width = self.size
                picture = picture.resize((width, height), image.Resampling.BILINEAR)
            pixels = np.asarray(picture)
        return pixels.reshape(*pixels.shape[:2], self.channels).transpose(2, 0, 1)
