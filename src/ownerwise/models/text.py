"""Recurrent networks on token ids, int64 [batch, length], padded with 0 at the end.

Padding changes nothing: a record has the same output however far the longest record of its batch
makes it be padded. Otherwise its gradient would depend on the other records, and clipping would no
longer bound what one record can do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ownerwise.models.activations import Activation, activation_maker

PADDING = 0


class SurnamesLSTM(nn.Module):
    """Embedding, LSTM, linear layer on the state after the last character: for surnames.

    Args:
        symbols: number of token ids, padding included; `data.load_surnames` has 59.
        classes: number of outputs.
        embedding: size of the embedding.
        hidden: size of the LSTM's state.
    """

    def __init__(
        self, symbols: int = 59, classes: int = 18, embedding: int = 64, hidden: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        last = (_lengths(tokens) - 1).clamp(min=0)
        return self.head(_at(states, last[:, None]).squeeze(1))


class ImdbLSTM(nn.Module):
    """Embedding, linear, LSTM in both directions, mean over words, two linear layers: for IMDb.

    Args:
        words: number of token ids, padding included.
        classes: number of outputs.
        embedding: size of the embedding.
        hidden: size of the first linear layer and of the LSTM's state in each direction.
        activation: of the two inner linear layers.
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
        lengths = _lengths(tokens)[:, None]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # Each record is read backwards from its own last word; a two-way LSTM would begin in the
        # padding. Its states need no turning back, as their mean is taken.
        reversed_words = _at(words, (lengths - 1 - places).clamp(min=0))
        states = torch.cat([self.forwards(words)[0], self.backwards(reversed_words)[0]], dim=2)
        real = (places < lengths)[:, :, None]
        mean = (states * real).sum(dim=1) / lengths.clamp(min=1)
        return self.head(mean)


def _lengths(tokens: Tensor) -> Tensor:
    """Return the number of real tokens of each record, [batch]."""
    return (tokens != PADDING).sum(dim=1)


def _at(sequence: Tensor, places: Tensor) -> Tensor:
    """Return [batch, places, features] of [batch, length, features]."""
    return sequence.gather(1, places[:, :, None].expand(-1, -1, sequence.shape[2]))
