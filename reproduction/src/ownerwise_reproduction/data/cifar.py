"""CIFAR-10 and CIFAR-100, read from Python batches in a folder (plain, .gz, .xz) or an archive.

The batches are pickles, and a pickle can run arbitrary code when it is loaded. This module reads
them with an unpickler that accepts only the three names needed for a pixel array and replaces them
with inert classes. The unpickler rejects every other name that a file refers to, and calls no numpy
code.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.data.reading import Unusable, read_bytes, reading
from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction.data.pixels import describe, scale_images
from ownerwise_reproduction.data.sources import Download, Part, Source, locate

PIXELS = (3, 32, 32)  # red, green, blue planes

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
    crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
CIFAR100_CLASSES = tuple(_CLASSES.split())
_CATEGORIES = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
    medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1
    vehicles_2"""
CIFAR100_CATEGORIES = tuple(_CATEGORIES.split())
FISH = ("aquarium_fish", "flatfish", "ray", "shark", "trout")
VEHICLES = ("bicycle", "bus", "motorcycle", "pickup_truck", "train")
"""The CIFAR-100 classes in the categories `fish` and `vehicles_1`."""

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


def _source(name: str, folder: str, archive: str, sha256: str) -> Source:
    download = Download(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), sha256)
    return Source(name, _PAGE, (Part((folder, archive, f"{folder}.tar.xz"), (download,)),))


CIFAR10 = _source(
    "cifar10",
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
CIFAR100 = _source(
    "cifar100",
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
)


def load_cifar10(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "unit"
) -> DataSet:
    """Return CIFAR-10 in its official split: 50000 + 10000 colour images (32x32) in ten classes.

    `scale` is "unit" (0 to 1), "signed" (-1 to 1) or "published" (see `pixels.PUBLISHED`).
    """
    (path,) = locate(CIFAR10, data_dir, download)
    files = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    parts = _read_parts(path, CIFAR10, files, ("labels",), scale)
    train, test = (Records(images, labels["labels"]) for images, labels in parts)
    return DataSet("cifar10", train, test, CIFAR10_CLASSES, form=describe(train.inputs, scale))


def load_cifar100(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "unit"
) -> DataSet:
    """Return CIFAR-100 in its official split: 50000 + 10000 colour images (32x32) in 100 classes.

    The column `category` contains the name of the group of five classes to which a record's class
    belongs. `scale` works in the same way as for CIFAR-10.
    """
    (path,) = locate(CIFAR100, data_dir, download)
    files = {"train": ["train"], "test": ["test"]}
    names = np.array(CIFAR100_CATEGORIES)
    train, test = (
        Records(images, labels["fine_labels"], {"category": names[labels["coarse_labels"]]})
        for images, labels in _read_parts(
            path, CIFAR100, files, ("fine_labels", "coarse_labels"), scale
        )
    )
    return DataSet("cifar100", train, test, CIFAR100_CLASSES, form=describe(train.inputs, scale))


def read_batch(content: bytes, label_names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return `data`, uint8 [records, 3, 32, 32], and the requested labels from a pickled batch.

    Raises:
        ValueError: if the pickle contains or refers to anything but an array of bytes.
    """
    batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    pixels = batch[b"data"]
    if not isinstance(pixels, _Array):
        raise Unusable("its `data` is not an array")
    arrays = {"data": pixels.to_numpy().reshape(-1, *PIXELS)}
    for name in label_names:
        arrays[name] = np.array(batch[name.encode()], dtype=np.int64)
        if len(arrays[name]) != len(arrays["data"]):
            raise Unusable(f"{len(arrays[name])} {name} for {len(arrays['data'])} images")
    return arrays


class _Array:
    """Replaces numpy.ndarray while a batch is unpickled; it stores the state and runs no code."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray:
        _, shape, kind, by_columns, raw = self.state
        if getattr(kind, "name", None) not in (b"u1", "u1") or not isinstance(raw, bytes):
            raise Unusable("its `data` is not an array of unsigned bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns else "C")


class _Kind:
    """Replaces numpy.dtype while a batch is unpickled."""

    def __init__(self, name: bytes = b"", *_: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and similar settings, which are irrelevant for single bytes."""


class _Unpickler(pickle.Unpickler):
    _STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self._STAND_INS[module_name, global_name]
        except KeyError:
            raise Unusable(
                f"it refers to {module_name}.{global_name}, which an image batch does not "
                "need; it was not run"
            ) from None


def _read_parts(
    path: Path,
    source: Source,
    files: dict[str, list[str]],
    label_names: tuple[str, ...],
    scale: str,
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Return the scaled images and the labels of the training and test parts."""
    wanted = [name for names in files.values() for name in names]
    batches = {}
    for name, content in _contents(path, wanted).items():
        with reading(path / name, "a batch of CIFAR images"):
            batches[name] = read_batch(content, label_names)
    parts = []
    for names in files.values():
        pixels = np.concatenate([batches[name]["data"] for name in names])
        labels = {
            key: np.concatenate([batches[name][key] for name in names]) for key in label_names
        }
        parts.append((scale_images(pixels, source.name, scale), labels))
    return parts


def _contents(path: Path, wanted: list[str]) -> dict[str, bytes]:
    """Return the contents of the requested files in a folder or archive."""
    contents = {}
    if path.is_dir():
        for name in wanted:
            places = (path / f"{name}{ending}" for ending in ("", ".xz", ".gz"))
            place = next((place for place in places if place.is_file()), None)
            if place is not None:
                with reading(place, "a batch of CIFAR images"):
                    contents[name] = read_bytes(place)
    else:
        with reading(path, "an archive of CIFAR batches"), tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member) if name in wanted else None
                if file is not None:
                    contents[name] = file.read()
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise OwnerwiseError(
            f"{path} does not contain {', '.join(missing)}; expected {', '.join(wanted)}: "
            f"download it again from {_PAGE}"
        )
    return contents
