"""Networks and public features of the papers on individualized privacy.

`models.build("mnist-cnn", classes=10)` makes a network by name; `models.NAMES` lists the names.
All of them keep records apart, so the private step can train them. `models.features` has feature
extractors that cost no privacy: they depend on no private record.
"""

from ownerwise.models import features
from ownerwise.models.activations import TemperedSigmoid
from ownerwise.models.convolutional import cifar_cnn, mnist_cnn
from ownerwise.models.dense import hidden_problems, linear_head, mlp, mlp_head, scattering_head
from ownerwise.models.registry import BUILDERS, NAMES, build
from ownerwise.models.residual import ResNet18
from ownerwise.models.text import ImdbLSTM, SurnamesLSTM

__all__ = [
    "BUILDERS",
    "NAMES",
    "ImdbLSTM",
    "ResNet18",
    "SurnamesLSTM",
    "TemperedSigmoid",
    "build",
    "cifar_cnn",
    "features",
    "hidden_problems",
    "linear_head",
    "mlp",
    "mlp_head",
    "mnist_cnn",
    "scattering_head",
]
