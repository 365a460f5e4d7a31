"""The data sets used by constraints.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.data import DataSet, Records
from ownerwise_reproduction.data import (
    load_adult,
    load_credit_default,
    load_heart,
    load_parkinsons_telemonitoring,
)

HOURS, HOURS_RANGE = "hours-per-week", (0, 100)


@dataclass(frozen=True)
class Task:
    """Records with their columns, split into training and test (or validation)."""

    inputs: Tensor
    labels: np.ndarray
    columns: dict[str, np.ndarray]
    classes: int = 2

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: np.ndarray) -> Task:
        columns = {name: values[which] for name, values in self.columns.items()}
        return replace(
            self, inputs=self.inputs[torch.from_numpy(which)], labels=self.labels[which],
            columns=columns,
        )  # fmt: skip

    def split(self, share: float, seed: int) -> tuple[Task, Task]:
        order = np.random.default_rng(seed).permutation(len(self))
        cut = int(share * len(self))
        return self.take(np.sort(order[:cut])), self.take(np.sort(order[cut:]))


def _all(parts: list[Records | None]) -> tuple[Tensor, np.ndarray, dict[str, np.ndarray]]:
    known = [part for part in parts if part is not None]
    inputs = torch.from_numpy(np.concatenate([part.inputs for part in known]))
    labels = np.concatenate([part.targets for part in known])
    sex = np.concatenate([part.columns["sex"] for part in known])
    return inputs, labels, {"sex": np.where(np.char.lower(sex) == "female", "female", "male")}


def _features(data: DataSet, column: str) -> list[int]:
    return [at for at, name in enumerate(data.features) if name.partition("=")[0] == column]


def _buckets(values: Tensor, number: int) -> Tensor:
    """Return a one-hot encoding of values by equal bins of the declared range, -1 to 1."""
    at = ((values + 1) / 2 * number).long().clamp(0, number - 1)
    return functional.one_hot(at, number).flatten(1).float()


def adult() -> Task:
    """Return the 45,222 complete rows; numbers are also one-hot encoded in 20 bins each."""
    data = load_adult(download=False)
    inputs, labels, columns = _all([data.train, data.test])
    numbers = [at for at, name in enumerate(data.features) if "=" not in name]
    filled = _complete(data, inputs)
    inputs = torch.cat([inputs, _buckets(inputs[:, numbers], 20)], dim=1)
    return Task(inputs, labels, columns).take(filled)


def hours() -> Task:
    """Return the same rows of Adult, to predict weekly hours: below 35, up to 40, or more.

    Income takes the place of the hours among the inputs.
    """
    data = load_adult(download=False)
    inputs, incomes, columns = _all([data.train, data.test])
    filled = _complete(data, inputs)
    (place,) = _features(data, HOURS)
    low, high = HOURS_RANGE
    worked = torch.round(low + (inputs[:, place] + 1) / 2 * (high - low))
    labels = torch.bucketize(worked, torch.tensor([34.5, 40.5])).numpy()
    inputs = inputs.clone()
    inputs[:, place] = 2 * torch.from_numpy(incomes) - 1
    numbers = [at for at, name in enumerate(data.features) if "=" not in name and at != place]
    inputs = torch.cat([inputs, _buckets(inputs[:, numbers], 20)], dim=1)
    return Task(inputs, labels, columns, classes=3).take(filled)


def _complete(data: DataSet, inputs: Tensor) -> np.ndarray:
    """Return the rows without missing values."""
    known = torch.ones(len(inputs), dtype=torch.bool)
    for column in ("workclass", "occupation", "native-country"):
        known &= inputs[:, _features(data, column)].sum(dim=1) == 1
    return np.flatnonzero(known.numpy())


def credit() -> Task:
    """Return education, marriage and payment states one-hot, the rest scaled by public ranges."""
    data = load_credit_default(download=False)
    inputs, labels, columns = _all([data.train, data.test])
    states = [at for at, name in enumerate(data.features) if name.startswith("PAY_")
              and not name.startswith("PAY_AMT")]  # fmt: skip
    months = torch.round((inputs[:, states] + 1) / 2 * 11).long()  # -2 to 9, from 0 on
    rest = [at for at in range(inputs.shape[1]) if at not in states]
    parts = [inputs[:, rest], functional.one_hot(months, 12).flatten(1).float()]
    return Task(torch.cat(parts, dim=1), labels, columns)


def parkinsons() -> Task:
    """Return recordings, split by record: both parts contain the same 42 people."""
    data = load_parkinsons_telemonitoring(download=False, motor_score=True, split="records")
    return Task(*_all([data.train, data.test]))


def heart() -> Task:
    data = load_heart(download=False)
    return Task(*_all([data.train, data.test]))


def nine() -> Task:
    """Return a synthetic population with nine equal groups: three regions times three ages."""
    random = np.random.default_rng(9)
    records = 60_000
    group = random.choice(9, records, p=np.array([20, 16, 14, 12, 10, 9, 8, 6, 5]) / 100)
    lean = np.linspace(-1.2, 1.2, 9)[random.permutation(9)]
    features = random.normal(size=(records, 12)) + 0.5 * lean[group][:, None] * np.eye(12)[0]
    weights = random.normal(size=12) / np.sqrt(12)
    score = features @ weights * 2 + lean[group] - 0.4
    labels = (score + random.logistic(size=records) > 0).astype(np.int64)
    inputs = np.concatenate([features / 3, np.eye(9)[group]], axis=1).astype(np.float32)
    return Task(torch.from_numpy(inputs), labels, {"group": group})


TASKS: dict[str, Callable[[], Task]] = {
    "adult": adult, "credit": credit, "parkinsons": parkinsons, "heart": heart, "nine": nine,
    "hours": hours,
}  # fmt: skip
