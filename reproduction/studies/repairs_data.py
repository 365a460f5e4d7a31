"""The settings of the study of repairs: records, owners and budgets, by rules written down first.

Rule settings, from which the advice follows:

- classes: MNIST, one owner per digit, epsilon 0.5 (digit 0) to 5 (digit 9).
- mixed: scikit-learn's digits, ten owners, epsilon 1 to 10. A record of digit k belongs to owner k
  with probability 0.6, otherwise to one of the nine others, each as likely.
- inputs: MNIST, two owners with the same mixture of digits. The strict one (epsilon 0.5) has each
  record with probability 0.3, and their images are turned by 90 degrees; the lax one (epsilon 5)
  has the rest.

Unseen settings, on which the advice is judged:

- split: cardiotocography, every class spread over many owners. Owners have ten records of one class
  (the last owner of a class has what is left) and epsilon 0.5 or 5; strict are 20% of the owners of
  the normal class, 50% of the suspect one and 80% of the pathological one.
- ages: Adult, three owners with all people below 30 (epsilon 5), from 30 to 44 (1) and above (0.3).
  Labels are mixed and their shares differ; the age is among the inputs.
- dimmed: chest X-rays (PneumoniaMNIST), two owners with the same mixture of labels. The strict one
  (epsilon 0.5) has each record with probability 0.3, with half the brightness plus Gaussian noise
  of standard deviation 0.1; the lax one (epsilon 5) has the rest.

Settings with less or more training than `classes`:

- short: 15 steps instead of 60.
- slow: a learning rate of 0.5 only.
- long: 200 steps.

Added after the results, because `dimmed` had chosen the lowest learning rate:

- dimmed-lower: dimmed with learning rates from 0.125 to 1.

Added because share bands need many records:

- many: classes with 50,000 training images and a batch size of 4,096.

Images of 28 by 28 pixels are averaged over 2 by 2. Recalls are measured per group: the owners, or
the classes in `split`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ownerwise as ow

SPLITS = 3
RATES = (2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Part:
    """Inputs, labels, owners and groups of some records."""

    x: Tensor
    y: Tensor
    owner: np.ndarray
    group: np.ndarray

    def at(self, index: np.ndarray) -> Part:
        """Return some of the records."""
        return Part(self.x[index], self.y[index], self.owner[index], self.group[index])


@dataclass(frozen=True)
class Split:
    """Training, validation and test records, and the epsilon of each owner."""

    train: Part
    validation: Part
    test: Part
    budgets: dict[int, float]

    @property
    def order(self) -> np.ndarray:
        """The groups from the strictest to the laxest, by the mean epsilon of their records."""
        epsilon = np.array([self.budgets[owner] for owner in self.train.owner.tolist()])
        groups = range(int(self.train.group.max()) + 1)
        return np.argsort([epsilon[self.train.group == group].mean() for group in groups])


@dataclass(frozen=True)
class Setting:
    """How a setting is made and trained."""

    make: Callable[[int], Split]
    classes: int
    hidden: tuple[int, ...] = ()
    steps: int = 60
    batch_size: int = 512
    rates: tuple[float, ...] = RATES
    search_splits: int = 1  # all splits where one has few validation records


def classes(split: int, records: int = 8_000) -> Split:
    train, validation, test = _mnist(split, records)
    parts = [Part(x, y, y.numpy(), y.numpy()) for x, y in (train, validation, test)]
    return Split(*parts, budgets=dict(enumerate(np.linspace(0.5, 5, 10).tolist())))


def mixed(split: int) -> Split:
    x, y = _all_of("digits")
    rng = np.random.default_rng(3000 + split)
    labels = y.numpy()
    owner = (labels + rng.integers(1, 10, len(labels))) % 10  # one of the nine others
    own = rng.random(len(labels)) < 0.6
    owner[own] = labels[own]
    whole = Part(x.flatten(1), y, owner, owner)
    return _in_fifths(whole, split, dict(enumerate(np.linspace(1, 10, 10).tolist())))


def inputs(split: int) -> Split:
    parts = []
    for number, (x, y) in enumerate(_mnist(split)):
        lax = _lax(len(x), split, number)
        images = x.unflatten(1, (14, 14))
        turned = torch.rot90(images, 1, (1, 2)).flatten(1)
        x = torch.where(torch.from_numpy(lax == 1)[:, None], x, turned)
        parts.append(Part(x, y, lax, lax))
    return Split(*parts, budgets={0: 0.5, 1: 5.0})


def split_classes(split: int) -> Split:
    x, y = _all_of("ctg")
    made = _in_fifths(Part(x, y, y.numpy(), y.numpy()), split, {})
    owner, budgets = np.zeros(len(made.train.y), dtype=np.int64), {}
    rng = np.random.default_rng(3000 + split)
    for label, strict in enumerate((0.2, 0.5, 0.8)):
        members = rng.permutation(np.flatnonzero(made.train.group == label))
        number = np.arange(len(members)) // 10
        owner[members] = len(budgets) + number
        owners = int(number.max()) + 1
        few = round(strict * owners)
        budgets |= {len(budgets) + at: 0.5 if at < few else 5.0 for at in range(owners)}
    return replace(made, train=replace(made.train, owner=owner), budgets=budgets)


def ages(split: int) -> Split:
    data = ow.data.load("adult")
    parts = [part for part in (data.train, data.test) if part is not None]
    x, y = _all_of("adult")
    age = np.concatenate([part.columns["age"] for part in parts]).astype(float)
    owner = np.digitize(age, (30, 45))
    order = np.random.default_rng(1000 + split).permutation(len(x))
    whole = Part(x, y, owner, owner)
    cut = [whole.at(at) for at in np.split(order, [10_000, 15_000, 25_000])[:3]]
    return Split(*cut, budgets={0: 5.0, 1: 1.0, 2: 0.3})


def dimmed(split: int) -> Split:
    x, y = _all_of("pneumoniamnist")
    x = _pooled(x)
    lax = _lax(len(x), split, 0)
    noise = torch.from_numpy(np.random.default_rng(4000).normal(0, 0.1, x.shape)).float()
    x = torch.where(torch.from_numpy(lax == 1)[:, None], x, 0.5 * x + noise)
    return _in_fifths(Part(x, y, lax, lax), split, {0: 0.5, 1: 5.0})


def lowered(budgets: dict[int, float], share: float) -> dict[int, float]:
    """Move every budget by a share of its distance to the strictest one."""
    strictest = min(budgets.values())
    return {owner: value - share * (value - strictest) for owner, value in budgets.items()}


def kept(owner: np.ndarray, budgets: dict[int, float], share: float, seed: int) -> np.ndarray:
    """Return the records left when a share of those with budgets above the mean is dropped."""
    epsilon = np.array([budgets[one] for one in owner.tolist()])
    lax = np.flatnonzero(epsilon > epsilon.mean())
    dropped = np.random.default_rng(seed).choice(lax, round(share * len(lax)), replace=False)
    return np.delete(np.arange(len(owner)), dropped)


def label_counts(part: Part, budgets: dict[int, float], classes: int) -> np.ndarray:
    """Return the label counts for each budget, in ascending order."""
    epsilon = np.array([budgets[one] for one in part.owner.tolist()])
    row = np.unique(epsilon, return_inverse=True)[1]
    counts = np.zeros((int(row.max()) + 1, classes))
    np.add.at(counts, (row, part.y.numpy()), 1)
    return counts


def mean_epsilon(split: Split) -> list[float]:
    """Return the mean epsilon of each group's training records, from strict to lax."""
    epsilon = np.array([split.budgets[owner] for owner in split.train.owner.tolist()])
    return [float(epsilon[split.train.group == group].mean()) for group in split.order]


def _lax(count: int, split: int, part: int) -> np.ndarray:
    return (np.random.default_rng([3000 + split, part]).random(count) >= 0.3).astype(np.int64)


def _in_fifths(whole: Part, split: int, budgets: dict[int, float]) -> Split:
    """Use a fifth of the records for testing, a fifth for validation and the rest for training."""
    order = np.random.default_rng(1000 + split).permutation(len(whole.y))
    fifth = len(order) // 5
    test, validation, train = np.split(order, [fifth, 2 * fifth])
    return Split(whole.at(train), whole.at(validation), whole.at(test), budgets)


def _mnist(split: int, records: int = 8_000) -> list[tuple[Tensor, Tensor]]:
    """Return images for training, 2,000 for validation, and the official test images."""
    (x, y), test = _pooled_mnist()
    order = np.random.default_rng(1000 + split).permutation(len(x))[: records + 2_000]
    train, validation = order[:records], order[records:]
    return [(x[train], y[train]), (x[validation], y[validation]), test]


@cache
def _pooled_mnist() -> list[tuple[Tensor, Tensor]]:
    data = ow.data.load("mnist")
    assert data.test is not None
    pairs = data.train.tensors(), data.test.tensors()
    return [(_pooled(images), labels.long()) for images, labels in pairs]


def _pooled(images: Tensor) -> Tensor:
    return functional.avg_pool2d(images.float(), 2).flatten(1)


def _all_of(name: str) -> tuple[Tensor, Tensor]:
    data = ow.data.load(name)
    pairs = [part.tensors() for part in (data.train, data.test) if part is not None]
    x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    return x.float(), y.long()


RULE_SETTINGS = {
    "classes": Setting(classes, 10, hidden=(32,)),
    "mixed": Setting(mixed, 10, hidden=(32,), batch_size=128, search_splits=SPLITS),
    "inputs": Setting(inputs, 10, hidden=(32,)),
}
UNSEEN_SETTINGS = {
    "split": Setting(split_classes, 3, batch_size=256, search_splits=SPLITS),
    "ages": Setting(ages, 2),
    "dimmed": Setting(dimmed, 2, hidden=(32,), batch_size=256, search_splits=SPLITS),
}
OTHER_SETTINGS = {
    "short": replace(RULE_SETTINGS["classes"], steps=15),
    "slow": replace(RULE_SETTINGS["classes"], rates=(0.5,)),
    "long": replace(RULE_SETTINGS["classes"], steps=200),
    "dimmed-lower": replace(UNSEEN_SETTINGS["dimmed"], rates=(0.125, 0.25, 0.5, 1.0)),
    "many": Setting(partial(classes, records=50_000), 10, hidden=(32,), batch_size=4096),
}
SETTINGS = RULE_SETTINGS | UNSEEN_SETTINGS | OTHER_SETTINGS
