"""Plans on disk: a small JSON, and the per-owner arrays in a columnar file beside it."""

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

ARRAYS = ("sampling_rates", "clip_norms", "targets", "deltas", "records")
"""Per-owner arrays of a plan, in the order in which they are hashed."""

RELEASE_SHARES = "release_shares"
"""A further array of plans that pay for a release to which owners add different shares."""


def columns(source: Any) -> tuple[str, ...]:
    """Return the names of the per-owner arrays that a plan has."""
    return ARRAYS if getattr(source, RELEASE_SHARES) is None else (*ARRAYS, RELEASE_SHARES)


def arrays_path(path: str | os.PathLike) -> Path:
    """Return where the arrays of the plan at `path` lie."""
    return Path(path).with_suffix(".safetensors")


def save(header: dict[str, Any], source: Any, path: str | os.PathLike, content: str) -> None:
    """Write both files whole or not at all: first the arrays, then the JSON that names them."""
    arrays = {name: np.ascontiguousarray(getattr(source, name)) for name in columns(source)}
    write_whole(arrays_path(path), lambda file: save_file(arrays, file))
    write_json(path, {**header, "arrays": arrays_path(path).name, "hash": content})


def load(
    path: str | os.PathLike, expected_format: int
) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """Return (header, arrays, stored hash), or say what is wrong with the files."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        stored_hash, _ = stored.pop("hash"), stored.pop("arrays")
        version = stored["format"]
    except FileNotFoundError:
        raise PlanError(f"no plan at {path}; make one with `ownerwise plan ... --out`") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(f"{path} is not a plan: expected the JSON that Plan.save writes") from None
    if version != expected_format:
        raise PlanError(
            f"{path} has plan format {version}; this version reads format {expected_format}"
        )
    place = arrays_path(path)
    try:
        arrays = load_file(place)
    except (FileNotFoundError, SafetensorError):
        raise PlanError(
            f"the plan's per-owner file {place.name} is missing or damaged; it belongs beside "
            f"{Path(path).name}"
        ) from None
    known = set(arrays) - {RELEASE_SHARES} == set(ARRAYS)
    if not known or len({array.shape for array in arrays.values()}) != 1:
        raise PlanError(f"{place.name} does not hold the columns {', '.join(ARRAYS)}")
    return stored, arrays, stored_hash
