"""ResNet-18, with group normalisation if it is trained, or batch normalisation if it is frozen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Normalisation = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Normalisation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape [batch, outputs, height / stride, width / stride]."""
        h = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He, Zhang, Ren, Sun 2016).

    Args:
        classes: number of outputs; 0 to return the features before the last layer.
        channels: number of image channels.
        width: number of channels in the first stage; 64 in the original.
        groups: maximum number of groups in group normalisation; each stage uses the largest divisor
            of its width up to this maximum.
        large_images: whether to use the original stem for 224x224 images (7x7 convolution with
            stride 2, max pooling) instead of a 3x3 convolution for 32x32 images.
        batch_statistics: whether to use batch normalisation, as networks with public weights do.
            Suitable only for frozen networks: batch normalisation mixes records, so the private
            step refuses to train the network.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        groups: int = 32,
        large_images: bool = False,
        batch_statistics: bool = False,
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_statistics else partial(_group_norm, groups)
        kernel, stride = (7, 2) if large_images else (3, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
        self.norm1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1) if large_images else nn.Identity()
        self.layer1 = _stage(width, width, 1, norm)
        self.layer2 = _stage(width, 2 * width, 2, norm)
        self.layer3 = _stage(2 * width, 4 * width, 2, norm)
        self.layer4 = _stage(4 * width, 8 * width, 2, norm)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes) if classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of shape [batch, classes], or features of shape [batch, 8 * width]."""
        h = self.pool(self.relu(self.norm1(self.conv1(x))))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        return self.fc(self.average(h).flatten(1))


def _stage(inputs: int, outputs: int, stride: int, norm: Normalisation) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs, stride, norm), Block(outputs, outputs, 1, norm))


def _group_norm(most: int, channels: int) -> nn.GroupNorm:
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    return nn.GroupNorm(groups, channels)
