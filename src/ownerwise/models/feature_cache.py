"""Extracted features on disk, so that a data set passes through an extractor only once.

A file is named after the SHA-256 of the extractor's fingerprint and of the inputs' bytes, and its
metadata contain the SHA-256 of its content. The features are as sensitive as the records they were
computed from, so the folder needs the same protection as the records.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_whole

ENVIRONMENT = "OWNERWISE_CACHE"
"""The environment variable that names the default folder."""

_WARNING = "NOT PRIVATE: computed from the records, without noise"


def cache_folder(given: str | os.PathLike | None, extractor: object) -> Path | None:
    """Return the folder to use: `given`, else the one named by the environment variable, else None.

    An extractor without a fingerprint is not cached; if the folder was given, this is an error.
    """
    folder = given or os.environ.get(ENVIRONMENT) or None
    if folder is None or isinstance(getattr(extractor, "fingerprint", None), str):
        return None if folder is None else Path(folder)
    if given:
        raise OwnerwiseError(
            f"cache={os.fspath(given)!r}: the features of a {type(extractor).__name__} cannot be "
            "cached; expected an extractor with an attribute `fingerprint`, a string that "
            "determines its features. Leave out `cache`"
        )
    return None


def cached(
    folder: Path, fingerprint: str, inputs: Tensor, compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the features of the inputs from the folder, or compute and store them.

    A damaged file triggers a warning and is replaced.
    """
    path = folder / f"{_digest(inputs, fingerprint)}.safetensors"
    features = _read(path, len(inputs)) if path.exists() else None
    if features is None:
        features = compute(inputs).cpu().contiguous()
        metadata = {"sha256": _digest(features), "warning": _WARNING}
        write_whole(path, lambda file: save_file({"features": features}, file, metadata))
    return features.to(inputs.device)


def _read(path: Path, records: int) -> Tensor | None:
    try:
        with safe_open(path, "pt") as file:
            features, metadata = file.get_tensor("features"), file.metadata()
        if len(features) == records and metadata["sha256"] == _digest(features):
            return features
    except (OSError, SafetensorError, KeyError, TypeError):
        pass
    warnings.warn(
        f"{path} is damaged, so the features are computed again and the file is replaced",
        stacklevel=4,
    )
    return None


def _digest(tensor: Tensor, words: str = "") -> str:
    head = f"{words}\n{tensor.dtype}\n{list(tensor.shape)}\n"
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(head.encode())
    digest.update(content.numpy().data)
    return digest.hexdigest()
