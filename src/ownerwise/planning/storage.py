"""Plans on disk: a small JSON file, and the per-owner arrays in a columnar file beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ownerwise.errors import PlanError
from ownerwise.files import write_json, write_whole

FORMAT = 1
"""Version of the plan file format. Increase it if the stored or hashed values change."""

ARRAYS = ("sampling_rates", "clip_norms", "targets", "deltas", "records")
"""Per-owner arrays of a plan, in the order in which they are hashed."""

RELEASE_SHARES = "release_shares"
"""One more array, in plans that pay for a release to which owners contribute unequally."""


def columns(source: Any) -> tuple[str, ...]:
    """Return the names of the per-owner arrays that a plan has."""
    return ARRAYS if getattr(source, RELEASE_SHARES) is None else (*ARRAYS, RELEASE_SHARES)


def arrays_path(path: str | os.PathLike) -> Path:
    """Return the path of the arrays that belong to the plan at `path`."""
    return Path(path).with_suffix(".safetensors")


def save(header: dict[str, Any], source: Any, path: str | os.PathLike, content_hash: str) -> None:
    """Write both files atomically: first the arrays, then the JSON file that names them."""
    arrays = {name: np.ascontiguousarray(getattr(source, name)) for name in columns(source)}
    write_whole(arrays_path(path), lambda file: save_file(arrays, file))
    write_json(path, {**header, "arrays": arrays_path(path).name, "hash": content_hash})


def load(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """Return (header, arrays, stored hash), or raise a PlanError that says what is wrong."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        stored_hash, _ = stored.pop("hash"), stored.pop("arrays")
        version = stored["format"]
    except FileNotFoundError:
        raise PlanError(f"no plan at {path}; make one with `ownerwise plan ... --out`") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(f"{path} is not a plan: expected the JSON that Plan.save writes") from None
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        raise PlanError(
            f"{path} has plan format {version}, but this version of ownerwise reads format "
            f"{FORMAT}: {'upgrade ownerwise' if newer else 'make the plan again'}"
        )
    place = arrays_path(path)
    try:
        arrays = load_file(place)
    except (FileNotFoundError, SafetensorError):
        raise PlanError(
            f"the plan's per-owner file {place.name} is missing or damaged; it belongs beside "
            f"{Path(path).name}"
        ) from None
    complete = set(arrays) - {RELEASE_SHARES} == set(ARRAYS)
    if not complete or len({array.shape for array in arrays.values()}) != 1:
        raise PlanError(f"{place.name} does not hold the columns {', '.join(ARRAYS)}")
    return stored, arrays, stored_hash
