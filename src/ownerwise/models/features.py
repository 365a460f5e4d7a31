"""Features that cost no privacy: fixed transforms, and extractors made from public data alone.

Whatever is fitted to private records (components, means, fine-tuned weights) would show them
without noise. So an extractor here is either a formula (`Scattering`), or was made from public data
(`PCA.fit(..., public=True)`, weights of a public model), or says "not private".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.models.residual import ResNet18
from ownerwise.models.scattering import Scattering

__all__ = ["PCA", "Frozen", "Scattering", "extract", "load_resnet18"]


def extract(extractor: nn.Module, inputs: Tensor, batch_size: int = 32) -> Tensor:
    """Return the features of all records, computed batch by batch, without gradients."""
    with torch.no_grad():
        return torch.cat([extractor(part) for part in inputs.split(batch_size)])


class Frozen(nn.Module):
    """A module that stays as it is: no gradients, always in evaluation mode.

    As the first part of a model it leaves only the rest to be trained, and its batch statistics
    stay those of its public training data.
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
        """Return the module's outputs, as constants."""
        return self.module(x)


class PCA(nn.Module):
    """Principal components: `PCA.fit(public_data, 60, public=True)(x)` is [batch, 60].

    Attributes:
        mean: [features].
        directions: orthonormal rows, [components, features].
        variances: along the directions, falling, [components].
        not_private: True if it was fitted to private records, and then nobody may see it, nor
            anything made with it.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor

    def __init__(
        self, mean: Tensor, directions: Tensor, variances: Tensor, not_private: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("directions", directions)
        self.register_buffer("variances", variances)
        self.not_private = not_private

    @classmethod
    def fit(
        cls, data: Tensor, components: int, *, public: bool = False, not_private: bool = False
    ) -> PCA:
        """Return the components of public data.

        Args:
            data: [records, ...]; records are flattened.
            components: how many, at most the numbers of records and of features.
            public: states that no record of `data` needs protection.
            not_private: take private records nevertheless; the result is marked.
        """
        problems = []
        if public == not_private:
            given = "both were given" if public else "neither was given"
            problems.append(
                "principal components show the data that they are fitted to, without noise: pass "
                "public=True if every record is public, or not_private=True for a result without "
                f"any guarantee; {given}. Scattering needs no data at all"
            )
        flat = data.flatten(1).to(torch.float64)
        most = min(flat.shape)
        if not 1 <= components <= most:
            problems.append(f"components {components}: expected 1 to {most} for {_shape(data)}")
        if not torch.isfinite(flat).all():
            problems.append("the data holds NaN or infinite numbers: remove these records")
        if problems:
            raise OwnerwiseError(problems)
        mean = flat.mean(dim=0)
        _, lengths, directions = torch.linalg.svd(flat - mean, full_matrices=False)
        directions = directions[:components]
        largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
        directions = directions * largest.sign()  # the sign is arbitrary: make it repeatable
        variances = lengths[:components].square() / max(1, len(flat) - 1)
        dtype = data.dtype if data.is_floating_point() else torch.get_default_dtype()
        return cls(mean.to(dtype), directions.to(dtype), variances.to(dtype), not_private)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, components]."""
        return (x.flatten(1).to(self.mean.dtype) - self.mean) @ self.directions.T

    def extra_repr(self) -> str:
        """Return sizes, for `repr`, and whether the guarantee is gone."""
        sizes = f"{self.directions.shape[1]} -> {self.directions.shape[0]}"
        return f"{sizes}, NOT PRIVATE" if self.not_private else sizes


def load_resnet18(path: str | PathLike, *, groups: int = 32) -> Frozen:
    """Return the features [batch, 512] of a ResNet-18 with weights from a safetensors file.

    The weights must come from public data. Tensors have the names that are usual for this network
    (`conv1.weight`, `bn1.running_mean`, `layer2.0.downsample.0.weight`); its last layer (`fc`) is
    left out. The file tells image channels, width, stem (7x7 or 3x3) and normalisation (batch
    statistics, or else group normalisation). Images must be scaled as they were in the public
    training.

    Args:
        path: of the file. Nothing is ever downloaded.
        groups: of the group normalisation, if there are no batch statistics.
    """
    tensors = {
        _our_name(name): tensor
        for name, tensor in _read_weights(Path(path)).items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
    stem = tensors.get("conv1.weight")
    if stem is None or stem.dim() != 4:
        raise OwnerwiseError(
            f"{path} holds no ResNet-18: expected a tensor conv1.weight of four dimensions, found "
            f"{name_some(sorted(tensors)) or 'nothing'}"
        )
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are overwritten
        model = ResNet18(
            classes=0,
            channels=stem.shape[1],
            width=stem.shape[0],
            groups=groups,
            large_images=stem.shape[2] == 7,
            batch_statistics="norm1.running_mean" in tensors,
        )
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    if problems := _misfits(Path(path).name, tensors, expected):
        raise OwnerwiseError(problems)
    model.load_state_dict(tensors, strict=False)
    return Frozen(model)


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise OwnerwiseError(
            f"no weights at {path}, and none are downloaded: get a public ResNet-18 in safetensors "
            "format yourself and pass its path, or use features.Scattering, which needs no weights"
        )
    try:
        return load_file(path)
    except SafetensorError:
        raise OwnerwiseError(
            f"{path} is not a safetensors file (or is damaged). A torch file can run code when it "
            "is opened: convert it where that is safe, with "
            "safetensors.torch.save_file(torch.load(file, weights_only=True), path)"
        ) from None


def _our_name(name: str) -> str:
    return re.sub(r"\bbn(\d)\b", r"norm\1", name).replace(".downsample.", ".shortcut.")


def _misfits(file: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return all differences between the tensors of a file and those of the network."""
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"{file} lacks {name_some(missing)} of a ResNet-18")
    if unknown := sorted(found.keys() - expected.keys()):
        problems.append(f"{file} holds {name_some(unknown)}, which a ResNet-18 does not have")
    for name in sorted(found.keys() & expected.keys()):
        if found[name].shape != expected[name].shape:
            problems.append(
                f"{file}: {name} is {_shape(found[name])}; expected {_shape(expected[name])}"
            )
    return problems


def _shape(tensor: Any) -> str:
    return f"shape {list(tensor.shape)}"
