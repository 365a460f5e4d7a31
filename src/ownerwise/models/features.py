"""Features that have no privacy cost: fixed transforms, and extractors trained only on public data.

Anything fitted to private records (components, means, fine-tuned weights) would be released without
noise. An extractor is therefore either a fixed transform (`Scattering`, `Patches`) or a network
whose weights come from public data (`EfficientNetLite0`, `EfficientNetLite1` and
`EfficientNetLite2` for images, `MiniLM` for texts, or your own network in `Frozen`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ownerwise.errors import OwnerwiseError
from ownerwise.marks import mark, marks_of
from ownerwise.models.efficientnet import (
    EfficientNetLite,
    EfficientNetLite0,
    EfficientNetLite1,
    EfficientNetLite2,
)
from ownerwise.models.feature_cache import cache_folder, cached
from ownerwise.models.minilm import MiniLM
from ownerwise.models.patches import Patches
from ownerwise.models.scattering import Scattering
from ownerwise.registry import Registry

__all__ = [
    "EXTRACTORS",
    "EfficientNetLite0",
    "EfficientNetLite1",
    "EfficientNetLite2",
    "Frozen",
    "MiniLM",
    "Patches",
    "Scattering",
    "build",
    "extract",
]

EXTRACTORS: Registry[Callable[..., nn.Module]] = Registry(
    "ownerwise.extractors",
    {
        "efficientnet-lite0": EfficientNetLite0,
        "efficientnet-lite1": EfficientNetLite1,
        "efficientnet-lite2": EfficientNetLite2,
        "minilm": MiniLM,
        "patches": Patches,
        "scattering": Scattering,
    },
    kind="extractor",
)
"""The extractor for each name. Other packages can add extractors through the entry-point group
`ownerwise.extractors`."""

_PIECE = 2048  # records per cache file; an interrupted extraction loses at most one file


def build(name: str, **options: Any) -> nn.Module:
    """Return an extractor by name (one of `EXTRACTORS`) with options, such as `size=160`."""
    described = {"name": name, **options}
    if problems := EXTRACTORS.problems(described):
        raise OwnerwiseError(problems)
    return EXTRACTORS.make(described)


def extract(
    extractor: nn.Module,
    inputs: Tensor | Sequence[str],
    batch_size: int = 32,
    *,
    cache: str | os.PathLike | None = None,
    progress: bool | None = None,
) -> Tensor:
    """Return the features of all records, computed batch by batch, without gradients.

    Args:
        extractor: the transform or network.
        inputs: the extractor's inputs, [records, ...]; or one text per record, for an extractor
            with a method `encode` that turns texts into inputs, such as `MiniLM`.
        batch_size: number of records to process at a time.
        cache: folder in which features are stored and looked up; by default the one named by the
            environment variable `OWNERWISE_CACHE`, if any. It needs the same protection as the
            records. The extractor must have a `fingerprint`, as `EfficientNetLite0` and `MiniLM`
            do.
        progress: whether to show a progress bar; by default, only if the output is a terminal.
    """
    folder = cache_folder(cache, extractor)
    marks = marks_of(extractor, inputs)
    if not isinstance(inputs, Tensor):
        inputs = _encoded(extractor, inputs)
    if isinstance(extractor, EfficientNetLite | MiniLM | Patches):
        extractor.check(inputs)
    hidden = None if progress is None else not progress
    pieces: list[Tensor] = []
    with torch.no_grad(), tqdm(total=len(inputs), unit="record", disable=hidden) as bar:

        def compute(piece: Tensor) -> Tensor:
            parts = []
            for part in piece.split(batch_size):
                parts.append(extractor(part))
                bar.update(len(part))
            return torch.cat(parts)

        for piece in inputs.split(_PIECE):
            if folder is None:
                pieces.append(compute(piece))
            else:
                pieces.append(cached(folder, str(extractor.fingerprint), piece, compute))
                bar.update(sum(map(len, pieces)) - bar.n)  # records read from the cache
    return mark(torch.cat(pieces), *marks)


def reads_texts(extractor: nn.Module) -> bool:
    """Return whether an extractor turns texts into its inputs, with a method `encode`."""
    return callable(getattr(extractor, "encode", None))


def _encoded(extractor: nn.Module, texts: Sequence[str]) -> Tensor:
    if not reads_texts(extractor):
        raise OwnerwiseError(
            f"the inputs are a {type(texts).__name__}, and a {type(extractor).__name__} has no "
            "method `encode` for texts; expected a tensor, or an extractor of texts such as MiniLM"
        )
    encode: Any = extractor.encode
    return encode(texts)


class Frozen(nn.Module):
    """A module that does not change: it has no gradients and is always in evaluation mode.

    If a frozen module is the first part of a model, only the other parts are trained. A frozen
    module keeps the batch statistics of its public training data.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the module's outputs, detached from the autograd graph."""
        return self.module(x)
