"""Files that are written atomically: completely or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any


def write_whole(path: str | PathLike, write: Callable[[str], Any]) -> None:
    """Let `write` fill a temporary file, then rename it, so that `path` is never half written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        _to_disk(temporary)
        os.replace(temporary, path)
        _to_disk(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str | PathLike, text: str) -> None:
    """Write text as UTF-8, with the same bytes on every system."""
    write_whole(path, lambda file: Path(file).write_bytes(text.encode("utf-8")))


def write_json(path: str | PathLike, content: Any, *, indent: int | None = 2) -> None:
    """Write JSON, with a newline at the end."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def _to_disk(path: str | Path) -> None:
    """Make sure that a file's content, or a folder's entries, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
