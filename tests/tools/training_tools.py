"""What the tests of training share: a small task with three owners, and trainers for it."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import ownerwise as ow
from ownerwise.step import read_account
from ownerwise.training import (
    Trainer,
)

SEED = 5
OWNERS = {"ann": 1.0, "bob": 2.0, "eve": 8.0}


@cache
def task(records: int = 120) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Inputs, classes 0 to 2, and owners."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(records, 4, generator=generator)
    targets = inputs[:, :3].argmax(dim=1)
    return inputs, targets, np.resize(list(OWNERS), records)


def data():
    return task()[:2]


def validation():
    """Another task's records would do; these are copies of the first ones."""
    inputs, targets, owner = task()
    return {
        "validation": (inputs[:45].clone(), targets[:45].clone()),
        "validation_groups": owner[:45],
    }


@cache
def make_plan(**options) -> ow.Plan:
    owners = ow.Owners(task()[2], OWNERS, delta=1e-5)
    return ow.plan(owners, **{"steps": 12, "batch_size": 24, **options})


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))


def make_trainer(*, model=None, plan=None, **options) -> Trainer:
    settings = {"lr": 0.5, "seed": SEED, "evaluate_every": 4, **options}
    return Trainer(model or make_model(), plan or make_plan(), **settings)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint: model and optimizer."""
    return load_file(max(folder.glob("checkpoint-*.safetensors")))


def timeless(history: list[dict]) -> list[dict]:
    """A history without its times, which differ from run to run."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in history]


def lines(folder: Path) -> list[dict]:
    """The lines of the history on disk, without the name of the run that each of them holds."""
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    run = read_account(folder).run
    assert all(line.pop("run_id") == run for line in found)
    return found


class NoLogger:
    """A logger that does nothing; tests override what they need."""

    def start(self, run):
        pass

    def log(self, line):
        pass

    def finish(self, run):
        pass
