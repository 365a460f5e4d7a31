"""The file of spends: what each record has spent, kept apart from everything that may be shown.

Spends follow from the records' own gradients and are NOT PRIVATE. They are stored beside the
checkpoint that they belong to, in a file that only its owner may read (mode 0600), and nowhere
else. A checkpoint may be shared, so it names its spends by a hash that includes a secret number
from the file: whoever lacks the file cannot test guesses about its contents.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ownerwise.errors import OwnerwiseError
from ownerwise.files import drop_temporary, write_whole, writing

FORMAT = 1
_NAME = "spends"
_RESTORE = "restore it together with its checkpoint; without it, the run cannot continue"


def spends_path(checkpoint: Path, name: str) -> Path:
    """Return the file of the spends called `name`, which belongs to a checkpoint."""
    number = checkpoint.stem.removeprefix("checkpoint-")
    return checkpoint.with_name(f"spends-{number}-{name[:16]}.safetensors")


def save_spends(folder: Path, updates: int, identity: str, spent: np.ndarray) -> str:
    """Write the spends for the checkpoint with this number, and return the hash that names them.

    The file has a new name each time, so an existing checkpoint keeps the file that it needs until
    a new one is complete.

    Args:
        folder: the run's folder.
        updates: number of updates applied to the model.
        identity: what the spends belong to: the run, the plan and the order of the records.
        spent: the spends, int64.
    """
    nonce = secrets.token_hex(16)
    name = _digest(nonce, identity, spent)
    header = {"format": FORMAT, "nonce": nonce, "identity": identity, "not private": True}
    path = spends_path(folder / f"checkpoint-{updates:08d}.safetensors", name)
    content = save({_NAME: spent}, metadata={"ownerwise": json.dumps(header)})
    write_whole(path, lambda file: Path(file).write_bytes(content), 0o600)
    return name


def load_spends(checkpoint: Path, name: str, identity: str | None = None) -> np.ndarray:
    """Return the spends that belong to a checkpoint, or raise an error if they are not intact.

    Args:
        checkpoint: the checkpoint.
        name: the hash by which it names its spends.
        identity: what they must belong to; None to read them only.
    """
    path = spends_path(checkpoint, name)
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["ownerwise"])
            spent = file.get_tensor(_NAME)
        version, stored, nonce = header["format"], header["identity"], header["nonce"]
        spent = np.ascontiguousarray(spent, dtype=np.int64)
    except FileNotFoundError:
        raise OwnerwiseError(
            f"{path.name}, which says what each record has spent, is missing: {_RESTORE}"
        ) from None
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError):
        raise OwnerwiseError(f"{path.name} is damaged or no file of spends: {_RESTORE}") from None
    if version != FORMAT:
        raise OwnerwiseError(
            f"{path.name} has format {version!r}, but this version of ownerwise reads format "
            f"{FORMAT}: use the version that wrote it"
        )
    if identity is not None and stored != identity:
        raise OwnerwiseError(
            f"{path.name} belongs to another run or plan, or to records in another order: pass "
            "the records in the order of the original run"
        )
    if _digest(nonce, stored, spent) != name:
        raise OwnerwiseError(
            f"{path.name} does not belong to {checkpoint.name}, or was changed: {_RESTORE}"
        )
    return spent


def drop_older(checkpoint: Path, name: str) -> None:
    """Delete the spends that no checkpoint needs, after `checkpoint` with the spends `name`."""
    kept = spends_path(checkpoint, name)
    with writing(checkpoint.parent):
        drop_temporary(checkpoint.parent, "spends-*.safetensors")  # of writers that were killed
        for path in checkpoint.parent.glob("spends-*.safetensors"):
            number = path.stem.split("-")[1]
            newer = kept.stem.split("-")[1] == number and path != kept
            if newer or not path.with_name(f"checkpoint-{number}.safetensors").exists():
                path.unlink()


def _digest(nonce: str, identity: str, spent: np.ndarray) -> str:
    digest = hashlib.sha256(f"{nonce} {identity} {spent.shape}".encode())
    digest.update(spent.astype("<i8").tobytes())
    return digest.hexdigest()
