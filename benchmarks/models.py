"""The models for the step benchmark, each with one batch of synthetic data.

The transformers (GPT-2, BERT, and both with LoRA) need transformers and peft, MiniLM its weights.

``build(name)`` returns the model, inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.models import ResNet18, mlp, mnist_cnn


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: int
    inputs: Callable[[int], Tensor]
    classes: int
    tokens: int = 0  # the number of targets per record, if there are several


class LSTMClassifier(nn.Module):
    def __init__(self, words: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(x))
        return self.head(outputs[:, -1])


class Transformer(nn.Module):
    def __init__(self, words: int = 10_000, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 128)
        self.position = nn.Parameter(0.02 * torch.randn(length, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x) + self.position).mean(dim=1))


def cifar_cnn() -> nn.Module:
    """Return the CIFAR network of Papernot et al. (2021), with 550,570 parameters."""
    layers: list[nn.Module] = []
    width = 3
    for out in (32, 64, 128):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


def resnet18() -> nn.Module:
    return ResNet18()


def images(channels: int, size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, channels, size, size)


def words(length: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, 10_000, (batch, length))


class Outputs(nn.Module):
    """A model of the transformers library: the scores, with the classes in the last dimension."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(input_ids=x, attention_mask=torch.ones_like(x)).logits


def gpt2(length: int = 128) -> nn.Module:
    """Return a small GPT-2 (4 layers, 256 wide) with tied embeddings, for the next token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 10_000, "n_positions": length, "n_embd": 256, "n_layer": 4, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Outputs(GPT2LMHeadModel(GPT2Config(**sizes, **dropout)))


def bert(length: int = 128) -> nn.Module:
    """Return a small BERT (4 layers, 256 wide) with a head for two classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=10_000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Outputs(BertForSequenceClassification(config))


def lora(model: nn.Module, *layers: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=list(layers)))


def minilm() -> nn.Module:
    from ownerwise.models import MiniLMClassifier

    return MiniLMClassifier(classes=2, length=64)


CASES = {
    "mlp": Case(mlp, 256, lambda batch: torch.randn(batch, 21), 3),
    "mnist": Case(mnist_cnn, 512, images(1, 28), 10),
    "cifar": Case(cifar_cnn, 256, images(3, 32), 10),
    "lstm": Case(LSTMClassifier, 256, words(20), 2),
    "transformer": Case(Transformer, 64, words(64), 2),
    "resnet18": Case(resnet18, 64, images(3, 32), 10),
    "gpt2": Case(gpt2, 16, words(128), 10_000, tokens=128),
    "gpt2-long": Case(lambda: gpt2(1024), 2, words(1024), 10_000, tokens=1024),
    "bert": Case(bert, 32, words(128), 2),
    "bert-long": Case(lambda: bert(1024), 4, words(1024), 2),
    "minilm": Case(minilm, 32, words(64), 2),
    "gpt2-lora": Case(lambda: lora(gpt2(), "c_attn"), 16, words(128), 10_000, tokens=128),
    "bert-lora": Case(lambda: lora(bert(), "query", "value"), 32, words(128), 2),
}


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, inputs and targets; they are the same for every call."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model()
    targets = (case.batch, case.tokens) if case.tokens else (case.batch,)
    return model, case.inputs(case.batch), torch.randint(0, case.classes, targets)


def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy, of several targets as their mean."""
    if targets.dim() == 1:
        return functional.cross_entropy(outputs, targets, reduction=reduction)
    flat = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    losses = flat.view_as(targets).mean(dim=1)
    return losses if reduction == "none" else losses.mean()


def loss_of(name: str) -> Callable[..., Tensor]:
    """Return the loss of a case: torch's own where there is one target per record."""
    return loss if CASES[name].tokens else functional.cross_entropy


class Criterion(nn.CrossEntropyLoss):
    """The same loss as a module, which Opacus needs."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return loss(input, target, self.reduction)
