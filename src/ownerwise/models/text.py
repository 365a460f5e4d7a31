"""A recurrent classifier for token ids, int64 [batch, length], padded with 0 at the end.

Padding has no effect: the output for a record does not depend on the longest record in its batch.
Otherwise a record's gradient would depend on other records, and clipping would no longer bound the
effect of one record.
"""

from __future__ import annotations

from torch import Tensor, nn

PADDING = 0


class TextLSTM(nn.Module):
    """An embedding, an LSTM, and a linear layer that is applied to the state after the last token.

    Args:
        symbols: number of token ids, including padding.
        classes: number of outputs.
        embedding: size of the embedding.
        hidden: size of the LSTM's state.
    """

    def __init__(
        self, symbols: int, classes: int = 2, embedding: int = 64, hidden: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        last = (token_counts(tokens) - 1).clamp(min=0)
        return self.head(at_places(states, last[:, None]).squeeze(1))


def token_counts(tokens: Tensor) -> Tensor:
    """Return the number of tokens in each record, excluding padding, [batch]."""
    return (tokens != PADDING).sum(dim=1)


def at_places(sequence: Tensor, places: Tensor) -> Tensor:
    """Return the entries at the given positions in each record.

    Args:
        sequence: [batch, length, features].
        places: positions, [batch, places].

    Returns:
        [batch, places, features].
    """
    return sequence.gather(1, places[:, :, None].expand(-1, -1, sequence.shape[2]))
