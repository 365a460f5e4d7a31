"""Networks from the papers that the library itself does not include.

References:
    Papernot, Thakurta, Song, Chien, Erlingsson (2021), "Tempered Sigmoid Activations for Deep
    Learning with Differential Privacy": the network for CIFAR, used by IDP-SGD and INO-SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ownerwise.models import MiniLMClassifier, TextLSTM
from ownerwise.models.activations import Activation, activation_maker
from ownerwise.models.text import PADDING, at_places, token_counts


def cifar_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Sequential:
    """Return the network for colour images [batch, 3, 32, 32] (550,570 parameters by default)."""
    make = activation_maker(activation)
    layers: list[nn.Module] = []
    width = 3
    for out in (32, 64, 128):
        layers += [nn.Conv2d(width, out, 3, padding=1), make()]
        layers += [nn.Conv2d(out, out, 3, padding=1), make(), nn.MaxPool2d(2)]
        width = out
    head = (nn.Flatten(), nn.Linear(2048, 128), make(), nn.Linear(128, classes))
    return nn.Sequential(*layers, *head)


def surnames_lstm(
    symbols: int = 59, classes: int = 18, embedding: int = 64, hidden: int = 128
) -> TextLSTM:
    """Return the LSTM for surnames; `data.load_surnames` uses 59 token ids and 18 languages."""
    return TextLSTM(symbols, classes, embedding, hidden)


class ImdbLSTM(nn.Module):
    """The network for IMDb reviews.

    Its layers are an embedding, a linear layer, a bidirectional LSTM, the mean over words and
    two linear layers.

    Args:
        words: number of token ids, including padding.
        classes: number of outputs.
        embedding: size of the embedding.
        hidden: size of the first linear layer and of the LSTM's state in each direction.
        activation: activation function of the two inner linear layers.
    """

    def __init__(
        self,
        words: int = 20_000,
        classes: int = 2,
        embedding: int = 100,
        hidden: int = 32,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        make = activation_maker(activation)
        self.embedding = nn.Embedding(words, embedding, padding_idx=PADDING)
        self.project = nn.Sequential(nn.Linear(embedding, hidden), make())
        self.forwards = nn.LSTM(hidden, hidden, batch_first=True)
        self.backwards = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(2 * hidden, 16), make(), nn.Linear(16, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, classes]."""
        words = self.project(self.embedding(tokens))  # [batch, length, hidden]
        lengths = token_counts(tokens)[:, None]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # Each record is read backwards from its own last word; a two-way LSTM would start in the
        # padding. The states need not be reversed again, since only their mean is used.
        reversed_words = at_places(words, (lengths - 1 - places).clamp(min=0))
        states = torch.cat([self.forwards(words)[0], self.backwards(reversed_words)[0]], dim=2)
        real = (places < lengths)[:, :, None]
        mean = (states * real).sum(dim=1) / lengths.clamp(min=1)
        return self.head(mean)


class AdaptedMiniLM(nn.Module):
    """MiniLM with low-rank adapters and a linear head; only these two are trained.

    It needs peft. The network computes in bfloat16, its trained parameters stay in float32.

    Args:
        classes: number of outputs.
        length: number of word pieces per text.
        rank: rank of the adapters of queries and values.
    """

    pretraining = MiniLMClassifier.pretraining

    def __init__(self, classes: int = 2, length: int = 128, rank: int = 4) -> None:
        super().__init__()
        import peft

        adapters = peft.LoraConfig(
            r=rank, target_modules=["query", "value"], modules_to_save=["head"]
        )
        network: nn.Module = MiniLMClassifier(classes, length)
        self.network = peft.get_peft_model(network, adapters)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """Return [batch, classes]."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            return self.network(ids).float()
