"""Find the files of a data set, and download missing ones.

The following places are searched in order: the folder `data_dir`, or else the folder that the
environment variable OWNERWISE_DATA specifies; the system's shared data sets; the cache. Files found
in one of these places are used unchanged. Missing files are downloaded into the cache
(OWNERWISE_CACHE, or `ownerwise` in the user's cache folder); a file is placed there only after its
download is complete and its SHA-256 hash has been verified.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_whole

DATA_VARIABLE = "OWNERWISE_DATA"
CACHE_VARIABLE = "OWNERWISE_CACHE"
_TIMEOUT = 30  # seconds without receiving a byte
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Download:
    """A file to download.

    Attributes:
        file: path of the file within the data set's cache folder.
        urls: addresses to try in order.
        sha256: expected hash of the file's content.
    """

    file: str
    urls: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Part:
    """One file or folder that a data set needs.

    Attributes:
        names: accepted names, with the usual one first.
        downloads: the files to download if the part is missing.
    """

    names: tuple[str, ...]
    downloads: tuple[Download, ...]


@dataclass(frozen=True)
class Source:
    """The files of a data set.

    Attributes:
        name: name of the data set and of its folder.
        page: web page that describes the data set and offers it for download.
        parts: the files and folders that the data set needs.
        folders: names that other programs use for the data set's folder.
        system: the data set's folder among the system's shared data sets, if it has one there.
        own_names: whether the file names are distinctive enough for the files to be in the data
            folder itself, next to those of other data sets.
    """

    name: str
    page: str
    parts: tuple[Part, ...]
    folders: tuple[str, ...] = ()
    system: str | None = None
    own_names: bool = True


def locate(
    source: Source, data_dir: str | os.PathLike | None = None, download: bool = True
) -> list[Path]:
    """Return the path of each part of a source, after downloading missing parts.

    Raises:
        OwnerwiseError: if parts are missing; the message lists all of them and says where to put
            them.
    """
    root = _root(source, data_dir)
    folders = _folders(source, root)
    found: list[Path] = []
    problems: list[str] = []
    for part in source.parts:
        path = _find(part, folders) or _find_cached(source, part)
        why = ["download=False"]
        if path is None and download:
            try:
                path = _fetch_part(source, part)
            except OwnerwiseError as error:
                why = error.problems
        if path is None:
            problems.append(_missing(source, part, root, why))
        else:
            found.append(path)
    if problems:
        raise OwnerwiseError(problems)
    return found


def cache_folder() -> Path:
    """Return the folder for downloads."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ownerwise"


def fetch(item: Download, path: Path) -> None:
    """Download a file to `path`; keep it only if it is complete and has the right SHA-256 hash."""
    problems = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OwnerwiseError(
            f"the cache folder {path.parent} cannot be created ({error}); set {CACHE_VARIABLE} to "
            "a writable folder"
        ) from error
    for url in item.urls:
        try:
            write_whole(path, lambda temporary, url=url: _download(url, Path(temporary), item))
            return
        except OwnerwiseError as error:
            problems.append(f"{url}: {error}")
    raise OwnerwiseError(problems)


def _download(url: str, temporary: Path, item: Download) -> None:
    """Stream a file; report connection errors and close the connection."""
    try:
        _stream(url, temporary, item)
    except HTTPError as error:
        error.close()
        raise OwnerwiseError(str(error)) from None
    except (OSError, HTTPException) as error:
        raise OwnerwiseError(str(error)) from None


def _root(source: Source, data_dir: str | os.PathLike | None) -> Path | None:
    """Return the folder of data sets that the caller or the environment specifies, if any."""
    given = os.environ.get(DATA_VARIABLE) if data_dir is None else os.fspath(data_dir)
    if not given:
        return None
    if not Path(given).is_dir():
        what = f"the variable {DATA_VARIABLE}" if data_dir is None else "data_dir"
        raise OwnerwiseError(
            f"{what} is {given}, which is not a folder; expected the folder that contains "
            f"{source.name}/ and other data sets"
        )
    return Path(given)


def _folders(source: Source, root: Path | None) -> list[Path]:
    """Return the folders to search before the cache."""
    folders = []
    if root is not None:
        names = (source.name, *source.folders)
        folders += [root / name for name in names]
        if source.own_names or any(root.resolve().match(name) for name in names):
            folders.append(root)
    if source.system:
        shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
        folders += [Path(share, "datasets", source.system) for share in shared.split(":")]
    return folders


def _find(part: Part, folders: list[Path]) -> Path | None:
    places = (folder / name for folder in folders for name in part.names)
    return next((place for place in places if place.exists()), None)


def _find_cached(source: Source, part: Part) -> Path | None:
    """Return the cached part if it is complete; an earlier download may have been interrupted."""
    folder = cache_folder() / source.name
    files = [folder / item.file for item in part.downloads]
    if files and all(file.is_file() for file in files):
        return folder / Path(part.downloads[0].file).parts[0]
    return _find(part, [folder]) if len(files) < 2 else None


def _fetch_part(source: Source, part: Part) -> Path:
    folder = cache_folder() / source.name
    for item in part.downloads:
        if not (folder / item.file).is_file():
            fetch(item, folder / item.file)
    return folder / Path(part.downloads[0].file).parts[0]


def _missing(source: Source, part: Part, root: Path | None, why: list[str]) -> str:
    """Return the message about a missing part."""
    cache = cache_folder() / source.name
    looked = ", ".join(map(str, [*_folders(source, root), cache]))
    place = f"{cache}, or into {source.name}/ in the folder that {DATA_VARIABLE} specifies"
    return (
        f"{source.name}: {' or '.join(part.names)} was not found in {looked}, and was not "
        f"downloaded ({'; '.join(why)}). Download it from {source.page} and put it into "
        f"{place if root is None else root / source.name}"
    )


def _stream(url: str, path: Path, item: Download) -> None:
    digest = hashlib.sha256()
    request = Request(url, headers={"User-Agent": "ownerwise"})  # some refuse Python's default
    with urlopen(request, timeout=_TIMEOUT) as response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        # disable=None: no bar if the output is not a terminal
        options = {"total": total, "unit": "B", "unit_scale": True, "disable": None}
        with tqdm(desc=Path(item.file).name, **options) as bar:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
        received = file.tell()
    if total is not None and received < total:
        raise OwnerwiseError(f"the connection ended after {received} of {total} bytes; try again")
    if digest.hexdigest() != item.sha256:
        raise OwnerwiseError(
            f"got {received} bytes with SHA-256 {digest.hexdigest()}, expected {item.sha256}: "
            "the file is a different version or was tampered with, so it was discarded"
        )
