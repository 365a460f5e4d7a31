"""Networks, and features that have no privacy cost.

`models.build("mlp", inputs=21, classes=3)` builds a network by name; `list(models.BUILDERS)` lists
the names. All of these networks process records separately, so the private step can train them.
`models.features` provides feature extractors that have no privacy cost, because they do not depend
on private records. This subpackage imports no other subpackage.
"""

from ownerwise.models import features
from ownerwise.models.activations import TemperedSigmoid
from ownerwise.models.convolutional import mnist_cnn
from ownerwise.models.dense import hidden_problems, linear_head, mlp, mlp_head, scattering_head
from ownerwise.models.minilm_classifier import MiniLMClassifier
from ownerwise.models.registry import BUILDERS, build
from ownerwise.models.residual import ResNet18
from ownerwise.models.text import TextLSTM

__all__ = [
    "BUILDERS",
    "MiniLMClassifier",
    "ResNet18",
    "TemperedSigmoid",
    "TextLSTM",
    "build",
    "features",
    "hidden_problems",
    "linear_head",
    "mlp",
    "mlp_head",
    "mnist_cnn",
    "scattering_head",
]
