"""Files that are written atomically and checked against a schema when they are read.

A schema is built from kinds: `fields({"seed": or_null(WHOLE)}, {"notes": mapping_of(TEXT)})`. If a
file is corrupted, reading it raises an `OwnerwiseError` that names the file and the entry.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ownerwise.errors import OwnerwiseError

Kind = Callable[[Any, str], Iterator[str]]
"""Yields the problems with a value; the second argument names its place in the file."""

_DEEPEST = 50  # levels of nesting; ownerwise itself writes fewer than 10
_ABANDONED = 3600.0  # seconds after which a temporary file's writer is assumed dead


@contextmanager
def writing(path: str | PathLike) -> Iterator[None]:
    """Turn a write failure, for example on a full disk, into an error that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OwnerwiseError(
            f"{path} cannot be written: {reason}; check the free disk space and the folder's "
            "permissions"
        ) from error


def write_whole(path: str | PathLike, write: Callable[[str], Any], mode: int = 0o644) -> None:
    """Write a temporary file with `write`, then rename it, so `path` is never partially written.

    Until then, only its owner may read it; from then on, its permissions are `mode`.

    Temporary files left behind by killed writers of the same file are removed.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_temporary(path.parent, path.name, older=_ABANDONED)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            write(temporary)
            os.chmod(temporary, mode)
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


def append_text(path: str | PathLike, text: str) -> None:
    """Append text to a file and flush it to disk; if that fails, the file is left unchanged."""
    path = Path(path)
    with writing(path):
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.truncate(path, size)
            raise


def drop_temporary(folder: Path, name: str, older: float = 0.0) -> None:
    """Delete temporary files for `name` (a pattern) last modified at least `older` seconds ago."""
    for path in folder.glob(f".{name}.????????"):  # as `mkstemp` names them
        try:
            if time.time() - path.stat().st_mtime >= older:
                path.unlink()
        except FileNotFoundError:  # its writer has finished
            continue


def read_json(path: str | PathLike, kind: Kind, missing: str = "") -> dict[str, Any]:
    """Return the JSON object in `path`, which must be of this kind.

    Args:
        path: the file.
        kind: the required kind of content.
        missing: the error message if the file does not exist.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise OwnerwiseError(missing or f"no file {path}: check the path") from None
    except OSError as error:
        raise OwnerwiseError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(content, kind, str(path))


def parse_json(content: bytes | str, kind: Kind, name: str) -> dict[str, Any]:
    """Return the JSON object in `content`, read from file `name`; it must be of this kind."""
    try:
        parsed = json.loads(content)
        nested = _deeper_than(parsed, _DEEPEST)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise OwnerwiseError(f"{name} is corrupted: expected JSON") from None
    if not isinstance(parsed, dict):
        raise OwnerwiseError(f"{name} is corrupted: expected a JSON object")
    if nested:
        raise OwnerwiseError(f"{name} is corrupted: it is nested more than {_DEEPEST} levels deep")
    if problems := [f"{name} is corrupted: {problem}" for problem in kind(parsed, "")]:
        raise OwnerwiseError(problems)
    return parsed


def of_kind(words: str, accepts: Callable[[Any], bool]) -> Kind:
    """Return a kind that accepts the values for which `accepts` is true; `words` describes them."""

    def problems(value: Any, place: str) -> Iterator[str]:
        if not accepts(value):
            shown = repr(value)
            shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
            yield f"{place or 'its content'} is {shown}; expected {words}"

    return problems


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


ANYTHING = of_kind("a value", lambda value: True)
TEXT = of_kind("text", lambda value: isinstance(value, str))
FLAG = of_kind("true or false", lambda value: isinstance(value, bool))
NUMBER = of_kind("a finite number", _is_number)
POSITIVE = of_kind("a positive finite number", lambda value: _is_number(value) and value > 0)
WHOLE = of_kind("a whole number of at least 0", _is_whole)
INTEGER = of_kind(
    "a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)
)
DIGEST = of_kind(
    "64 hexadecimal digits",
    lambda value: (
        isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
    ),
)


def one_of(*names: str) -> Kind:
    """Return a kind that accepts only these names."""
    return of_kind(f"one of {', '.join(names)}", lambda value: value in names)


def or_null(kind: Kind) -> Kind:
    """Return a kind that accepts null as well as values of the given kind."""

    def problems(value: Any, place: str) -> Iterator[str]:
        if value is not None:
            yield from (f"{problem}, or null" for problem in kind(value, place))

    return problems


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """Return a kind that accepts lists whose entries are all of the given kind."""

    def problems(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, list) or length not in (None, len(value)):
            size = "" if length is None else f" of {length} entries"
            yield f"{place} is {type(value).__name__}; expected a list{size}"
            return
        for number, entry in enumerate(value):
            yield from kind(entry, f"{place}[{number}]")

    return problems


def mapping_of(kind: Kind) -> Kind:
    """Return a kind that accepts objects whose entries, whatever their names, are of the given
    kind."""

    def problems(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place} is {type(value).__name__}; expected an object"
            return
        for name, entry in value.items():
            yield from kind(entry, f"{place}.{name}")

    return problems


def fields(required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None) -> Kind:
    """Return a kind that accepts objects with these entries; any other entries are allowed."""

    def problems(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place} is {type(value).__name__}; expected an object"
            return
        inside = f"{place}." if place else ""
        for name in required:
            if name not in value:
                yield f"{inside}{name} is missing"
        for name, kind in {**required, **(optional or {})}.items():
            if name in value:
                yield from kind(value[name], inside + name)

    return problems


def _deeper_than(content: Any, levels: int) -> bool:
    level = [content]
    for _ in range(levels):
        if not level:
            break
        level = [
            entry
            for value in level
            if isinstance(value, dict | list)
            for entry in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def _to_disk(path: str | Path) -> None:
    """Make sure that the content of a file, or the entries of a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
