"""Features of whole film reviews: states of a pretrained MiniLM, or the words that occur.

Both are fixed functions of each review and have no privacy cost: nothing is fitted to reviews.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.data.vocabulary import tokenize
from ownerwise.models import minilm
from ownerwise.models.features import MiniLM
from ownerwise.models.wordpiece import END, PADDING, START

_CHUNK = 126  # word pieces that the network reads at once, besides the start and the end
_LENGTH = 8 * _CHUNK + 2  # of a review; the rest is ignored
_GROUP = 16  # chunks of similar length that are computed together


class ReviewMiniLM(nn.Module):
    """MiniLM's states after several layers, each averaged over all word pieces of a review.

    A review is read in chunks of 126 word pieces, up to 1,008, in bfloat16. From each layer's
    average, that of 16 reviews is subtracted that were made up for this purpose: otherwise, what
    all reviews have in common would use up most of the clip norm. Each layer then has length 1,
    and the layers together have length 1 as well.

    Args:
        layers: the layers, counted from 0.
    """

    pretraining = MiniLM.pretraining

    def __init__(self, layers: Sequence[int] = (1, 2, 3, 4, 5)) -> None:
        super().__init__()
        self.layers = list(layers)
        self.minilm = MiniLM().to(torch.bfloat16)

    @property
    def fingerprint(self) -> str:
        """Everything that determines the features of encoded reviews, as text."""
        made_up = hashlib.sha256(_made_up().encode()).hexdigest()
        weights = minilm.SHA256["model.safetensors"]
        return f"ReviewMiniLM {weights}, {self.layers}, chunks of {_CHUNK}, {made_up}"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of the texts' word pieces, int64 [texts, length]."""
        return torch.tensor(self.minilm.words.encode(texts, _LENGTH))

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the features, float [batch, 384 * layers]."""
        features = functional.normalize(self._averages(ids) - self._centre, dim=2)
        return features.flatten(1) / len(self.layers) ** 0.5

    @cached_property
    def _centre(self) -> Tensor:
        """The mean of the made-up reviews' averages, [layers, 384]."""
        with torch.no_grad():
            return self._averages(self.encode(_made_up().split("\n\n"))).mean(dim=0)

    def _averages(self, ids: Tensor) -> Tensor:
        """Return the states after `layers`, averaged over all pieces, [batch, layers, 384]."""
        padding = self.minilm.words.ids[PADDING]
        reviews = [row[row != padding][1:-1].split(_CHUNK) for row in ids]
        chunks = [chunk for review in reviews for chunk in review]
        review_of = torch.arange(len(reviews)).repeat_interleave(
            torch.tensor([len(review) for review in reviews])
        )
        sums, counts = self._sums(chunks)
        shape = len(reviews), len(self.layers), sums.shape[-1]
        total = torch.zeros(shape).index_add_(0, review_of, sums)
        pieces = torch.zeros(len(reviews)).index_add_(0, review_of, counts)
        return total / pieces[:, None, None]

    def _sums(self, chunks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sums over the pieces of each chunk, [chunks, layers, 384], and their counts.

        Chunks of similar length are computed together, which needs the least padding.
        """
        special = self.minilm.words.ids
        start, end = torch.tensor([special[START]]), torch.tensor([special[END]])
        whole = [torch.cat([start, chunk, end]) for chunk in chunks]
        lengths = torch.tensor([len(chunk) for chunk in whole])
        sums = torch.empty(len(whole), len(self.layers), self.minilm.network.norm.weight.numel())
        for rows in lengths.argsort().split(_GROUP):
            parts = [whole[row] for row in rows]
            ids = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=special[PADDING])
            real = ids != special[PADDING]
            states = self._states(ids, real).float() * real[..., None]
            sums[rows] = states.sum(dim=2).transpose(0, 1)
        return sums, lengths.float()

    def _states(self, ids: Tensor, real: Tensor) -> Tensor:
        """Return the states after `layers`, [layers, chunks, length, 384]."""
        encoder = self.minilm.network
        fixed = encoder.positions.weight[: ids.shape[1]] + encoder.segments.weight[0]
        states = [encoder.norm(encoder.pieces(ids) + fixed)]
        for layer in encoder.layers:
            states.append(layer(states[-1], real))
        return torch.stack([states[layer + 1] for layer in self.layers])


class LastPieces(nn.Module):
    """The ids of MiniLM's word pieces of a review's end, which often says what to think of it.

    Args:
        letters: number of characters to keep from the end.
        length: number of word pieces; the rest of these characters is ignored.
    """

    def __init__(self, letters: int = 600, length: int = 128) -> None:
        super().__init__()
        self.letters = letters
        self.minilm = MiniLM(length)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids, int64 [texts, length]."""
        return self.minilm.encode([text[-self.letters :] for text in texts])

    def forward(self, ids: Tensor) -> Tensor:
        """Return the ids unchanged."""
        return ids


class HashedWords(nn.Module):
    """Which words occur in a text, hashed to a fixed number of places; each text has length 1.

    Args:
        size: number of places.
    """

    def __init__(self, size: int = 4000) -> None:
        super().__init__()
        self.size = size

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return which words occur, bool [texts, size]."""
        found = torch.zeros(len(texts), self.size, dtype=torch.bool)
        for row, text in enumerate(texts):
            found[row, [zlib.crc32(word.encode()) % self.size for word in tokenize(text)]] = True
        return found

    def forward(self, found: Tensor) -> Tensor:
        """Return the features, float [batch, size]."""
        return functional.normalize(found.float(), dim=1)


def _made_up() -> str:
    return (files("ownerwise_reproduction") / "made_up_reviews.txt").read_text(encoding="utf-8")
