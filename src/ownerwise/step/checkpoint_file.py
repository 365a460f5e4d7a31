"""The file of a checkpoint: a header and tensors, each covered by a hash, and how they are read.

A checkpoint is one safetensors file with the model, the optimizer and a JSON header (format
version, run, plan hash, step counts). One SHA-256 hash covers the header, and the header contains
another one for the tensors. Each file is written atomically, and the two newest are kept: if the
newest is corrupted, the previous one is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.files import (
    ANYTHING,
    DIGEST,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    WHOLE,
    fields,
    list_of,
    mapping_of,
    or_null,
    parse_json,
    write_whole,
    writing,
)

FORMAT = 2
"""Increase this number when the layout changes; upgrade or reject older files in `check_format`.

Format 1 (version 0.1.0) counted steps in `steps.json`, without an identity for the run."""

_HEADER = "ownerwise"
_HASH = "sha256"
_GENERATIONS = 2

_COMMON = {
    "format": WHOLE,
    "plan": DIGEST,
    "updates": WHOLE,
    "steps_spent": WHOLE,
    "seed": or_null(INTEGER),
    "optimizer": fields(
        {
            "state": mapping_of(mapping_of(ANYTHING)),
            "param_groups": list_of(fields({"params": list_of(WHOLE)})),
        }
    ),
    "held": list_of(ANYTHING),
}
_FORMATS = {
    1: fields(_COMMON, {"private": FLAG, "plugs": mapping_of(ANYTHING)}),
    FORMAT: fields(
        {
            **_COMMON,
            "private": FLAG,
            "plugs": mapping_of(ANYTHING),
            "run": TEXT,
            "account": list_of(ANYTHING, 2),
            "tensors": DIGEST,
        },
        {
            "plug_settings": mapping_of(mapping_of(ANYTHING)),
            "subtracted": list_of(NUMBER),
            "spends": DIGEST,
        },
    ),
}


def write(
    folder: str | os.PathLike, updates: int, header: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint into `folder`, delete all but the two newest, and return its path."""
    contents = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    header = {"format": FORMAT, **header, "tensors": tensors_hash(hashlib.sha256(), contents)}
    path = Path(folder) / f"checkpoint-{updates:08d}.safetensors"
    text = json.dumps(header)
    metadata = {_HEADER: text, _HASH: hashlib.sha256(text.encode()).hexdigest()}
    write_whole(path, lambda file: save_file(contents, file, metadata=metadata))
    with writing(folder):
        for older in stored(folder)[_GENERATIONS:]:
            older.unlink()
    return path


def stored(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(Path(folder).glob("checkpoint-*.safetensors"), reverse=True)


def latest(folder: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint in a folder, or None."""
    return next(iter(stored(folder)), None)


def newest_header(folder: str | os.PathLike, problems: Problems) -> dict[str, Any] | None:
    """Return the header of the newest checkpoint that is not corrupted; None if there is none.

    Error messages about newer, corrupted checkpoints are added to `problems`. If all checkpoints
    are corrupted, an error is raised.
    """
    found = stored(folder)
    for path in found:
        try:
            return _read_header(path)
        except OwnerwiseError as error:
            if path == found[-1]:
                raise
            problems += error.problems
    return None


def tensors_hash(digest: Any, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest, updated with the names, kinds and bytes of all tensors."""
    for name, kind in sorted(kinds(tensors).items()):
        digest.update(f"{name} {kind}".encode())
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def newest(folder: str | os.PathLike) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return the path, header and tensors of the newest checkpoint that is not corrupted."""
    found = stored(folder)
    for path in found:
        try:
            return path, *_read(path)
        except OwnerwiseError as error:
            if path == found[-1]:
                raise
            warnings.warn(
                f"{error}; resuming from the older {found[found.index(path) + 1].name}. The steps "
                "since then remain spent",
                stacklevel=2,
            )
    raise OwnerwiseError(f"no checkpoint in {folder}")


def _read_header(path: Path) -> dict[str, Any]:
    """Return a checkpoint's header, without reading the tensors unless it has format 1."""
    with _opened(path) as file:
        text, stored_hash = _metadata(path, file)
    header = _parsed(path, text)
    if header["format"] == 1:
        return _read(path)[0]
    _compare(path, hashlib.sha256(text.encode()).hexdigest(), stored_hash)
    return header


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _opened(path) as file:
        text, stored_hash = _metadata(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = _parsed(path, text)
    digest = hashlib.sha256(text.encode())
    if header["format"] == 1:
        _compare(path, tensors_hash(digest, tensors), stored_hash)
    else:
        _compare(path, digest.hexdigest(), stored_hash)
        _compare(path, tensors_hash(hashlib.sha256(), tensors), header["tensors"])
    return header, tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise OwnerwiseError(f"no checkpoint at {path}") from None
    except OwnerwiseError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError):
        raise OwnerwiseError(f"{path} is corrupted or not an ownerwise checkpoint") from None


def _metadata(path: Path, file: Any) -> tuple[str, str]:
    metadata = file.metadata() or {}
    if not {_HEADER, _HASH} <= metadata.keys():
        raise OwnerwiseError(f"{path} is corrupted or not an ownerwise checkpoint")
    return metadata[_HEADER], metadata[_HASH]


def _parsed(path: Path, text: str) -> dict[str, Any]:
    version = parse_json(text, fields({"format": WHOLE}), str(path))["format"]
    check_format(path, version)
    return parse_json(text, _FORMATS[version], str(path))


def _compare(path: Path, digest: str, stored_hash: str) -> None:
    if digest != stored_hash:
        raise OwnerwiseError(f"{path} is corrupted: its content does not match its hash")


def check_format(path: Path, version: Any) -> None:
    """Reject a checkpoint or settings file whose format this version does not support."""
    if version not in _FORMATS:
        raise OwnerwiseError(
            f"{path} has format {version}, but this version of ownerwise reads format {FORMAT} and "
            "older ones: use the version that wrote it, or start a new run"
        )


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor as text."""
    return {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}
