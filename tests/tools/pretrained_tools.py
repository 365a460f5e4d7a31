"""Made-up weights of EfficientNet-Lite and a made-up package with them, and a plain network."""

import hashlib
import io
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.models.features import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2

Network = type[EfficientNetLite0] | type[EfficientNetLite1] | type[EfficientNetLite2]

# Kernel size, stride, outputs and expanded channels of each block: 16 in Lite0, 21 in the others.
BLOCKS: dict[Network, list[tuple[int, int, int, int]]] = {
    EfficientNetLite0: [
        (3, 1, 16, 32),
        *((3, 2, 24, 96), (3, 1, 24, 144)),
        *((5, 2, 40, 144), (5, 1, 40, 240)),
        *((3, 2, 80, 240), (3, 1, 80, 480), (3, 1, 80, 480)),
        *((5, 1, 112, 480), (5, 1, 112, 672), (5, 1, 112, 672)),
        *((5, 2, 192, 672), (5, 1, 192, 1152), (5, 1, 192, 1152), (5, 1, 192, 1152)),
        (3, 1, 320, 1152),
    ],
    EfficientNetLite1: [
        (3, 1, 16, 32),
        *((3, 2, 24, 96), (3, 1, 24, 144), (3, 1, 24, 144)),
        *((5, 2, 40, 144), (5, 1, 40, 240), (5, 1, 40, 240)),
        *((3, 2, 80, 240), (3, 1, 80, 480), (3, 1, 80, 480), (3, 1, 80, 480)),
        *((5, 1, 112, 480), (5, 1, 112, 672), (5, 1, 112, 672), (5, 1, 112, 672)),
        *((5, 2, 192, 672), *[(5, 1, 192, 1152)] * 4),
        (3, 1, 320, 1152),
    ],
    EfficientNetLite2: [
        (3, 1, 16, 32),
        *((3, 2, 24, 96), (3, 1, 24, 144), (3, 1, 24, 144)),
        *((5, 2, 48, 144), (5, 1, 48, 288), (5, 1, 48, 288)),
        *((3, 2, 88, 288), (3, 1, 88, 528), (3, 1, 88, 528), (3, 1, 88, 528)),
        *((5, 1, 120, 528), (5, 1, 120, 720), (5, 1, 120, 720), (5, 1, 120, 720)),
        *((5, 2, 208, 720), *[(5, 1, 208, 1248)] * 4),
        (3, 1, 352, 1248),
    ],
}


def is_installed(network: Network = EfficientNetLite0) -> bool:
    """Return whether the published weights are installed (`ownerwise[pretrained]`)."""
    return any(metadata.distributions(name=network.package.name))


def made_weights(network: Network = EfficientNetLite0, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors with the names and shapes of the published file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}

    def add(convolution: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
        weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator)
        tensors[f"{convolution}.weight"] = weight * (2 / (inputs * kernel**2)) ** 0.5
        tensors[f"{norm}.weight"] = 0.5 + torch.rand(outputs, generator=generator)
        tensors[f"{norm}.bias"] = torch.randn(outputs, generator=generator) / 2
        tensors[f"{norm}.running_mean"] = torch.randn(outputs, generator=generator) / 2
        tensors[f"{norm}.running_var"] = 0.5 + torch.rand(outputs, generator=generator)
        tensors[f"{norm}.num_batches_tracked"] = torch.tensor(1)

    add("_conv_stem", "_bn0", 32, 3, 3)
    inputs = 32
    for at, (kernel, _, outputs, inner) in enumerate(BLOCKS[network]):
        if at:
            add(f"_blocks.{at}._expand_conv", f"_blocks.{at}._bn0", inner, inputs, 1)
        add(f"_blocks.{at}._depthwise_conv", f"_blocks.{at}._bn1", inner, 1, kernel)
        add(f"_blocks.{at}._project_conv", f"_blocks.{at}._bn2", outputs, inner, 1)
        inputs = outputs
    add("_conv_head", "_bn1", 1280, inputs, 1)
    return tensors | {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}


def write_package(
    folder: Path, weights: dict[str, Tensor], network: Network = EfficientNetLite0
) -> str:
    """Write an installed package with these weights; return the SHA-256 of the weights file.

    Importing the package is an error.
    """
    name = network.package.name
    package = folder / name
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this code must not run')\n")
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    (package / "models" / "made.pth").write_bytes(buffer.getvalue())
    information = folder / f"{name}-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (information / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/models/made.pth,,\n")
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def install(
    monkeypatch, folder: Path, seed: int = 0, network: Network = EfficientNetLite0
) -> dict[str, Tensor]:
    """Install a package with made-up weights and expect its hash; return the weights."""
    weights = made_weights(network, seed)
    monkeypatch.setattr(network, "sha256", write_package(folder, weights, network))
    monkeypatch.syspath_prepend(str(folder))
    return weights


def plain_activations(
    network: Network, weights: dict[str, Tensor], images: Tensor, size: int
) -> dict[str, Tensor]:
    """Outputs of the stem, every block and the head, and the features, layer by layer."""
    weights = {name: tensor.to(images.dtype) for name, tensor in weights.items()}

    def layer(x: Tensor, convolution: str, norm: str, stride: int = 1) -> Tensor:
        weight = weights[f"{convolution}.weight"]
        before, after = [], []
        for length in x.shape[2:]:
            outputs = (length + stride - 1) // stride
            missing = max((outputs - 1) * stride + weight.shape[-1] - length, 0)
            before.append(missing // 2)
            after.append(missing - missing // 2)
        x = functional.pad(x, (before[1], after[1], before[0], after[0]))
        x = functional.conv2d(x, weight, stride=stride, groups=x.shape[1] // weight.shape[1])
        names = ("running_mean", "running_var", "weight", "bias")
        return functional.batch_norm(x, *(weights[f"{norm}.{name}"] for name in names), eps=1e-3)

    x = functional.interpolate(images, (size, size), mode="bicubic", antialias=True)
    x = (255 * x - 127) / 128
    x = layer(x, "_conv_stem", "_bn0", 2).clamp(0, 6)
    found = {"stem": x}
    for at, (_, stride, outputs, _) in enumerate(BLOCKS[network]):
        start, block = x, f"_blocks.{at}."
        if at:
            x = layer(x, block + "_expand_conv", block + "_bn0").clamp(0, 6)
        x = layer(x, block + "_depthwise_conv", block + "_bn1", stride).clamp(0, 6)
        x = layer(x, block + "_project_conv", block + "_bn2")
        if stride == 1 and outputs == start.shape[1]:
            x = x + start
        found[f"blocks.{at}"] = x
    x = layer(x, "_conv_head", "_bn1").clamp(0, 6)
    return found | {"head": x, "features": x.mean(dim=(2, 3))}
