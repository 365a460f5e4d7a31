"""Everything that a package outside the library may add, in one file that nothing else knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.data import DataSet, Records
from ownerwise.mechanisms import ClippingRule, Release, Weights, per_record
from ownerwise.report.blocks import Section, Text


class Halved(Weights):
    """The same weight for every record; counts the batches, and stores the count."""

    def __init__(self, weight: float = 0.5):
        if not 0 <= weight <= 1:
            raise ValueError(f"weight {weight}: expected a number from 0 to 1")
        self.weight = weight
        self.batches = 0

    def weights(
        self, losses: np.ndarray, clip_norms: np.ndarray, owner_index: np.ndarray
    ) -> np.ndarray:
        self.batches += 1
        return np.full(len(losses), self.weight)

    def score_slack(self, roundoff: float) -> float:
        return 0.0

    def settings(self) -> dict[str, Any]:
        return {"kind": "Halved", "weight": self.weight}

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Whole(ClippingRule):
    """Scales every gradient to its clip norm."""

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: Any) -> Tensor:
        return clip_norms / norms.clamp(min=1e-6)


class ClassCounts(Release):
    """Noisy counts of the classes in each batch: a paid release with a state."""

    def __init__(self, classes: int):
        self.shape = (classes,)
        self.total = [0.0] * classes

    def contributions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.one_hot(targets, self.shape[0]).double()

    def process(self, noised: Tensor) -> Tensor:
        self.total = (torch.tensor(self.total).double() + noised.cpu()).tolist()
        return noised

    def penalised(self, loss: Any) -> Any:
        losses = per_record(loss)

        def without_release(outputs: Tensor, targets: Tensor, released: Any = None) -> Tensor:
            return losses(outputs, targets)

        vars(without_release)["plain"] = loss  # what the run's config names
        return without_release

    def settings(self) -> dict[str, Any]:
        return {"kind": "ClassCounts", "classes": self.shape[0]}

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def _section(comparison: Any) -> list[Text] | None:
    used = [method.label for method in comparison.methods if (method.weights or {}).get("weight")]
    return [Text(f"Halved was used by {', '.join(used)}.")] if used else None


SECTION = Section("halved", "Halved", "Halved weights", _section)


def squared(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    """The squared distance from the class, one number per record."""
    wanted = functional.one_hot(targets, outputs.shape[1]).to(outputs)
    return scale * (outputs - wanted).square().mean(dim=1)


def load_dots(data_dir: Any, download: bool, *, records: int = 300) -> DataSet:
    """Dots on a plane in three classes."""
    chance = np.random.default_rng(0)
    targets = np.arange(records) % 3
    inputs = (chance.normal(size=(records, 2)) + targets[:, None]).astype(np.float32)
    made = Records(inputs, targets)
    test = np.arange(records) % 5 == 0
    return DataSet("dots", made.take(~test), made.take(test), ("a", "b", "c"))


class Net(nn.Module):
    """A network with one hidden layer."""

    def __init__(self, inputs: int, classes: int, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
