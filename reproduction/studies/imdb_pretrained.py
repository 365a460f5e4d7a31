"""IMDb by a linear head on features of a pretrained MiniLM, against a linear bag of words.

    python reproduction/studies/imdb_pretrained.py extract features/   # hours on one core
    python reproduction/studies/imdb_pretrained.py train features/

One epsilon for everybody (delta 1e-5), as on the slides of the paper on importance sampling (DPIS),
whose network is trained from scratch on all 25,000 reviews. Features: the states of MiniLM after
each of four layers (2, 4, 5, 6), averaged over the first 126 word pieces of a review and over its
last 126, in bfloat16. They depend only on the review. They are computed for 5,000 random training
reviews and 5,000 random test reviews.

The bag of words counts each hashed word once, and divides by the square root of the number of
different words. It is trained on the same 5,000 reviews, and on all 25,000.

Layer, learning rate and number of hashed words were chosen on 1,000 of the 5,000 training reviews,
with training on the other 4,000: a choice that is not accounted for, as in the papers. Before that,
the accuracies of all layers without privacy had been seen on the test reviews as well, and those of
an earlier version with plain SGD and without subtracting a mean: 75.6, 76.3, 76.6, 76.7 and 76.7
for MiniLM, 74.9, 75.1, 75.3, 75.5 and 75.5 for the words of all reviews. Adam was then chosen for
all, on the 1,000 training reviews. Runs have fixed seeds and are NOT PRIVATE: they show how private
runs would perform.
"""

from __future__ import annotations

import argparse
import os
import statistics
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ownerwise as ow
from ownerwise.data import tokenize
from ownerwise.files import write_json, write_text
from ownerwise.models.features import MiniLM
from ownerwise_reproduction.data import load_imdb

RESULTS = Path(__file__).parents[1] / "results/imdb_pretrained"
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0)
SLIDES = (59.1, 62.1, 65.9, 68.3, 70.2)  # DPIS from scratch, on the slides
LAYERS = (1, 2, 3, 4, 5)
POOLED = ("mean", "first", "last", "maximum")  # of all word pieces; of 126 of them
CHUNK, CHUNKS = 126, 8
SEEDS = (1, 2, 3)
STEPS, PIECE = 60, 500
Part = tuple[Tensor, Tensor]


def pieces(part: str) -> list[np.ndarray]:
    """Return the rows of each file of features: random rows, in a fixed order."""
    random = np.random.default_rng(0)
    orders = {"test": random.permutation(25000)[:5000], "train": random.permutation(25000)}
    return np.split(orders[part], len(orders[part]) // PIECE)


def extract(folder: Path) -> None:
    """Write the features, 500 reviews per file; files that are there are kept."""
    folder.mkdir(exist_ok=True)
    reviews = load_imdb(vocabulary="none")
    network = MiniLM(128).to(torch.bfloat16)
    for part in ("test", "train"):
        records = getattr(reviews, part)
        for rows in pieces(part):
            path = folder / f"{part}-{rows[0]}.pt"
            if path.exists():
                continue
            features = pooled(network, [records.inputs[row] for row in rows])
            labels = torch.tensor(np.asarray(records.targets)[rows])
            torch.save({"x": features.half(), "y": labels}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)


def pooled(network: MiniLM, texts: list[str]) -> Tensor:
    """Return the poolings `POOLED` of the states after `LAYERS`, [texts, poolings, layers, 384]."""
    whole = network.words.encode(texts, CHUNKS * CHUNK + 2)
    pieces_of = [[piece for piece in ids if piece][1:-1] for ids in whole]
    chunks = [[t[at : at + CHUNK] for at in range(0, len(t), CHUNK)] or [[]] for t in pieces_of]
    means, maxima = states(network, [chunk for text in chunks for chunk in text])
    found, at = [], 0
    for text in chunks:
        mean, maximum = means[at : at + len(text)], maxima[at : at + len(text)]
        sizes = torch.tensor([float(len(chunk) + 2) for chunk in text])
        weighted = torch.einsum("c,clf->lf", sizes / sizes.sum(), mean)
        found.append(torch.stack([weighted, mean[0], mean[-1], maximum.amax(0)]))
        at += len(text)
    return torch.stack(found)


@torch.no_grad()
def states(network: MiniLM, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the mean and the largest states after `LAYERS`, [texts, layers, 384] each."""
    special = network.words.ids
    start, end = special["[CLS]"], special["[SEP]"]
    ids = torch.tensor([[start, *t, end] + [0] * (CHUNK - len(t)) for t in texts])
    encoder = network.network
    means, maxima = torch.empty(2, len(ids), len(LAYERS), 384)
    for rows in (ids != 0).sum(1).argsort().split(16):
        longest = int((ids[rows] != 0).sum(1).max())
        part = ids[rows, :longest]
        real = part != 0
        weights = real.float()[..., None]
        fixed = encoder.positions.weight[:longest] + encoder.segments.weight[0]
        x = encoder.norm(encoder.pieces(part) + fixed)
        for at, layer in enumerate(encoder.layers):
            x = layer(x, real)
            if at in LAYERS:
                to = LAYERS.index(at)
                means[rows, to] = (x.float() * weights).sum(1) / weights.sum(1)
                maxima[rows, to] = x.float().masked_fill(~real[..., None], -torch.inf).amax(1)
    return means, maxima


def public_mean(folder: Path, layer: int) -> Tensor:
    """Return the mean features of 160 paragraphs of this project's documentation."""
    path = folder / "public.pt"
    if not path.exists():
        pages = sorted((Path(__file__).parents[2] / "docs").glob("**/*.md"))
        texts = [text for page in pages for text in page.read_text().split("\n\n")]
        texts = [text for text in texts if len(text) > 300 and text[0].isalpha()][:160]
        network = MiniLM(128).to(torch.bfloat16)
        ids = network.words.encode(texts, HALF + 2)
        torch.save(states(network, [[i for i in row if i][1:-1] for row in ids]), path)
    return torch.load(path)[:, LAYERS.index(layer)].mean(0)


def read(folder: Path, part: str, layer: int) -> Part:
    """Return the features of every review after a layer, with length 1, and the labels."""
    names = [folder / f"{part}-{rows[0]}.pt" for rows in pieces(part)]
    files = [torch.load(name, weights_only=False) for name in names]
    x = torch.cat([file["x"].float() for file in files])[:, :, LAYERS.index(layer)].mean(1)
    x = functional.normalize(x - public_mean(folder, layer))
    return x, torch.cat([file["y"] for file in files])


def bag(texts: list[str], size: int) -> Tensor:
    """Return which hashed words occur, each review with length 1."""
    found = torch.zeros(len(texts), size)
    for row, text in enumerate(texts):
        words = {zlib.crc32(word.encode()) % size for word in tokenize(text)}
        found[row, list(words)] = len(words) ** -0.5
    return found


def accuracy(train: Part, test: Part, epsilon: float, rate: float, seed: int) -> float:
    """Return the accuracy of a linear head, in per cent."""
    owners = ow.Owners(np.zeros(len(train[0]), dtype=int), {0: epsilon}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=STEPS, batch_size=len(train[0]) // 5, clip_norm=1.0)
    model = ow.models.linear_head(train[0].shape[1], 2)
    trainer = ow.Trainer(model, plan, lr=rate, optimizer=torch.optim.Adam, seed=seed)
    trainer.fit(train)
    with torch.no_grad():
        return 100 * float((model(test[0]).argmax(1) == test[1]).float().mean())


def chosen(train: Part, epsilon: float, rates: tuple[float, ...]) -> tuple[float, float]:
    """Return the best accuracy on 1,000 of the training reviews, and its learning rate."""
    fit, held = tuple(t[:4000] for t in train), tuple(t[4000:5000] for t in train)
    return max((accuracy(fit, held, epsilon, rate, 9), rate) for rate in rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["extract", "train"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.work == "extract":
        extract(arguments.folder)
        return
    import warnings

    warnings.simplefilter("ignore")  # fixed seeds
    folder = arguments.folder
    rates = (0.03, 0.1, 0.3)
    layer = max(LAYERS, key=lambda at: chosen(read(folder, "train", at), 1.0, (0.1,))[0])
    train, test = read(folder, "train", layer), read(folder, "test", layer)
    reviews = load_imdb(vocabulary="none")
    rows = {part: np.concatenate(pieces(part)) for part in ("train", "test")}
    texts = {p: [getattr(reviews, p).inputs[row] for row in rows[p]] for p in rows}
    sizes = {
        size: chosen((bag(texts["train"], size), train[1]), 1.0, (0.1,))[0] for size in (1000, 4000)
    }
    size = max(sizes, key=lambda s: sizes[s])
    few = bag(texts["train"], size), train[1]
    tested = bag(texts["test"], size), test[1]
    everyone = (
        bag(list(reviews.train.inputs), size),
        torch.as_tensor(np.asarray(reviews.train.targets)),
    )
    lines, results = [], []
    for epsilon, slide in zip(EPSILONS, SLIDES, strict=True):
        row = {"epsilon": epsilon, "slides": slide}
        for name, data, against in (
            ("MiniLM", train, test),
            ("words", few, tested),
            ("all words", everyone, tested),
        ):
            if name != "all words":  # which takes the rate of the same words on fewer reviews
                rate = chosen(data, epsilon, rates)[1]
            found = [accuracy(data, against, epsilon, rate, seed) for seed in SEEDS]
            row[name] = found
            row[f"{name}, learning rate"] = rate
            print(epsilon, name, rate, found, flush=True)
        results.append(row)
        cells = [
            f"{statistics.mean(row[n]):.1f} ({min(row[n]):.1f} to {max(row[n]):.1f})"
            for n in ("MiniLM", "words", "all words")
        ]
        lines.append(f"| {epsilon:g} | {' | '.join(cells)} | {slide} |")
    RESULTS.mkdir(parents=True, exist_ok=True)
    facts = {"layer": layer, "hashed words": size, "steps": STEPS, "seeds": SEEDS, "rows": results}
    write_json(RESULTS / "results.json", facts)
    head = (
        "# IMDb with a pretrained network\n\nTest accuracy in per cent, mean of three runs (lowest "
        "to highest); delta 1e-5. The features are *pretrained*; the slides of DPIS train *from "
        "scratch* on all 25,000 reviews. The standard error due to the 5,000 test reviews is 0.6.\n"
        "`reproduction/studies/imdb_pretrained.py` says how the figures were made. Runs have "
        "fixed seeds and are NOT PRIVATE.\n\n"
        "| epsilon | head on MiniLM, 5,000 reviews | bag of words, the same reviews | bag of "
        "words, 25,000 reviews | DPIS, slides |\n|---|---|---|---|---|\n"
    )
    write_text(RESULTS / "index.md", head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
