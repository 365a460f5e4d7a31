"""Plans on disk: a small JSON file, and the per-owner arrays in a columnar file next to it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ownerwise.accounting import ACCOUNTANTS, FILTERS, NOISES, SHAPES
from ownerwise.errors import OwnerwiseError, PlanError
from ownerwise.files import (
    ANYTHING,
    DIGEST,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    Kind,
    fields,
    list_of,
    of_kind,
    one_of,
    or_null,
    parse_json,
    read_json,
    write_json,
    write_whole,
)
from ownerwise.owners import UNITS, Shared
from ownerwise.planning.adaptive_clip_norm import AdaptiveClipNorm
from ownerwise.planning.tuning import Tuning, rival_names

FORMAT = 1
"""Version of the plan file format. Increase it if the stored or hashed values change."""

ARRAYS = ("sampling_rates", "clip_norms", "targets", "deltas", "records")
"""Per-owner arrays of a plan, in the order in which they are hashed."""

SHARES = ("release_shares", "closing_shares", "closing_pulls", "filter_limits")
"""Additional arrays, in plans that account for a release, at every step or after training, whose
sensitivity differs between owners, and in plans with individual accounting."""

SHARED = ("shared_members", "shared_sizes", "shared_records")
"""Arrays in plans for records with several owners; see `owners.Shared`."""

_SEGMENT: Kind = of_kind(
    "[steps, factor], both positive",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and not list(list_of(POSITIVE)(value, ""))
        and isinstance(value[0], int)
    ),
)
_RIVAL = fields(
    {"schedule": list_of(_SEGMENT), "accountant": one_of(*ACCOUNTANTS)},
    {
        "release_std": POSITIVE,
        "closing_std": POSITIVE,
        "closing_count": WHOLE,
        "opening_std": POSITIVE,
        "opening_together": FLAG,
    },
)
_TUNING = fields(
    {"law": one_of(*SHAPES), "runs": POSITIVE, "rivals": list_of(_RIVAL)},
    {"most": WHOLE, "score_std": POSITIVE, "score_records": WHOLE},
)
_HEADER = fields(
    {
        "hash": DIGEST,
        "arrays": TEXT,
        "method": TEXT,
        "accountant": one_of(*ACCOUNTANTS),
        "clip_norm": POSITIVE,
        "noise_std": POSITIVE,
        "schedule": list_of(_SEGMENT),
        "expected_batch_size": POSITIVE,
        "mixture": or_null(NUMBER),
        "release_std": or_null(POSITIVE),
        "owners": WHOLE,
        "owners_fingerprint": TEXT,
    },
    {
        "release_noise": one_of(*NOISES),
        "hardened_rows": WHOLE,
        "closing_std": POSITIVE,
        "closing_count": WHOLE,
        "opening_std": POSITIVE,
        "unit": one_of(*UNITS),
        "sampling": one_of(*UNITS),
        "records_per_owner": or_null(WHOLE),
        "tuning": _TUNING,
        "filter": one_of(*FILTERS),
        "clip_to_remaining": FLAG,
        "adaptive_clip_norm": fields(dict.fromkeys(AdaptiveClipNorm().as_dict(), POSITIVE)),
    },
)


def columns(source: Any) -> tuple[str, ...]:
    """Return the names of the per-owner arrays that a plan has."""
    return (*ARRAYS, *(name for name in SHARES if getattr(source, name) is not None))


def shared_arrays(shared: Shared | None) -> dict[str, np.ndarray]:
    """Return the sets of owners who share records, as stored."""
    return {} if shared is None else dict(zip(SHARED, shared.arrays().values(), strict=True))


def shared_of(arrays: Mapping[str, np.ndarray]) -> Shared | None:
    """Return the stored sets of owners who share records, if there are any."""
    return Shared(*(arrays[name] for name in SHARED)) if SHARED[0] in arrays else None


def other_arrays(plan: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a plan that are not `columns`, as stored."""
    tuned = {} if plan.tuning is None else plan.tuning.arrays()
    return shared_arrays(plan.shared) | tuned


def tuning_of(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Tuning | None:
    """Return the search that a stored plan accounts for, or None."""
    stored = header.get("tuning")
    return None if stored is None else Tuning.of(stored, arrays)


def adaptive_clip_norm_of(header: Mapping[str, Any]) -> AdaptiveClipNorm | None:
    """Return how the clip norm of a stored plan adapts, or None if it is fixed."""
    stored = header.get("adaptive_clip_norm")
    return None if stored is None else AdaptiveClipNorm(**stored)


def arrays_path(path: str | os.PathLike) -> Path:
    """Return the path of the arrays that belong to the plan at `path`."""
    return Path(path).with_suffix(".safetensors")


def save(header: dict[str, Any], source: Any, path: str | os.PathLike, content_hash: str) -> None:
    """Write both files atomically: first the arrays, then the JSON file that names them."""
    arrays = {name: getattr(source, name) for name in columns(source)}
    arrays |= other_arrays(source)
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    write_whole(arrays_path(path), lambda file: save_file(arrays, file))
    write_json(path, {**header, "arrays": arrays_path(path).name, "hash": content_hash})


def content_hash(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Return the hash of everything that a plan specifies."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    known = (*ARRAYS, *SHARES, *SHARED)
    for name in (*known, *sorted(set(arrays) - set(known))):
        if name in arrays:
            digest.update(name.encode())
            digest.update(np.asarray(arrays[name]).astype("<f8").tobytes())
    return digest.hexdigest()


def load(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of a plan, or raise a PlanError that says what is wrong."""
    try:
        stored = read_json(
            path,
            fields({"format": ANYTHING}),
            f"no plan at {path}; make one with `ownerwise plan ... --out`",
        )
        if stored["format"] == FORMAT:
            parse_json(json.dumps(stored), _HEADER, str(path))
    except OwnerwiseError as error:
        meant = [f"{path} is not a plan: expected a JSON file written by Plan.save"]
        raise PlanError(error.problems + (meant if Path(path).exists() else [])) from None
    version = stored["format"]
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        raise PlanError(
            f"{path} has plan format {version}, but this version of ownerwise reads format "
            f"{FORMAT}: {'upgrade ownerwise' if newer else 'make the plan again'}"
        )
    stored_hash, _ = stored.pop("hash"), stored.pop("arrays")
    rivals = len(stored.get("tuning", {}).get("rivals", ()))
    arrays = _read_arrays(path, stored["owners"], rivals)
    if content_hash(stored, arrays) != stored_hash:
        raise PlanError(f"{path} was changed after it was saved: its content hash differs")
    return stored, arrays


def _read_arrays(path: str | os.PathLike, owners: int, rivals: int) -> dict[str, np.ndarray]:
    place = arrays_path(path)
    try:
        arrays = load_file(place)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError):
        raise PlanError(
            f"the plan's per-owner file {place.name} is missing or corrupted; it must be in the "
            f"same folder as {Path(path).name}"
        ) from None
    present = set(arrays) & set(SHARED)
    expected = {*ARRAYS, *rival_names(rivals)}
    complete = set(arrays) - set(SHARES) - present == expected and len(present) in (0, 3)
    per_owner = [values for name, values in arrays.items() if name not in SHARED]
    shapes = {values.shape for values in per_owner}
    if not complete or shapes != {(owners,)} or any(arrays[name].ndim != 1 for name in present):
        raise PlanError(
            f"{place.name} does not contain the columns {', '.join(ARRAYS)} for {owners} owners"
        )
    numbers = all(array.dtype.kind in "iuf" for array in arrays.values())
    numbers &= all(arrays[name].dtype.kind in "iu" for name in present)
    if not numbers or not all(np.isfinite(array).all() for array in arrays.values()):
        raise PlanError(f"{place.name} is corrupted: expected finite numbers")
    return arrays
