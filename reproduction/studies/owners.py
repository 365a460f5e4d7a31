"""Privacy per owner: owner sampling against record sampling at the same epsilon per OWNER.

    python reproduction/studies/owners.py parkinsons
    python reproduction/studies/owners.py voices
    python reproduction/studies/owners.py mnist

Settings, fixed before any result was seen:

- parkinsons: Parkinsons Telemonitoring, 5,875 recordings of 42 people, who are the owners. The
  class says whether total_UPDRS is above 27.576, the file's median; a linear model on inputs scaled
  by fixed ranges. Five splits: a hash of each person's number decides whether they are a test
  person (30%), a validation person (20% of the others) or a training person.
- voices: the same recordings, people and splits; the class is the person's sex, the inputs are the
  16 measures of the voice. Added when parkinsons had shown that its classes cannot be predicted for
  unseen people, not even without privacy.
- mnist: 60,000 training images, with owners made by a rule. The images are sorted by class (in the
  order of the file within a class) and cut into 6,000 pieces of 1, 4, 7, 13, 25, 1, 4, ... images;
  each of 3,000 owners gets two of the pieces, paired by a random permutation (seed 21). So an owner
  has 2 to 50 images of one or two classes. A hash of the owner's number holds out 10% of the owners
  for validation; the official test images are used for testing. A linear model on pixels.

Each mechanism is tuned on the validation owners over the same number of cells: at most 8 records of
an owner or all (`records_per_owner` for owner sampling, `Owners.bound` for record sampling), two
batch sizes (fractions of all owners or records) and four learning rates; clip norm 1, delta 1e-5,
method "sample", 150 steps. Five final runs: one per split, or five seeds. Runs have fixed seeds and
are NOT PRIVATE: they show how private runs would perform. Each setting is a file in
reproduction/results/owners; index.md is written from them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from ownerwise.data.splits import held_out
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/owners"
EPSILONS = (1.0, 4.0, 8.0)
SAMPLINGS = ("owner", "record")
MOST = (8, None)
FRACTIONS = (0.1, 0.5)
RATES = (0.25, 1.0, 4.0, 16.0)
STEPS, DELTA, REPEATS = 150, 1e-5, 5
VOICE_MEASURES = 16  # the last inputs
PIECES = (1, 4, 7, 13, 25)

Part = tuple[Tensor, Tensor, np.ndarray]
Cell = tuple[int | None, float, float]
"""Most records per owner, batch as a fraction, learning rate."""


@dataclass(frozen=True)
class Split:
    """Inputs, labels and owners of training, validation and test records."""

    train: Part
    validation: Part
    test: Part


def parkinsons() -> list[Split]:
    x, y, person, _ = _recordings()
    return _splits_of_people(x, y, person)


def voices() -> list[Split]:
    x, _, person, sex = _recordings()
    return _splits_of_people(x[:, -VOICE_MEASURES:], sex, person)


def _recordings() -> tuple[Tensor, Tensor, np.ndarray, Tensor]:
    """Return inputs, classes, people and sexes of all recordings."""
    data = ow.data.load("parkinsons_telemonitoring")
    parts = [part for part in (data.train, data.test) if part is not None]
    x = torch.cat([part.tensors()[0] for part in parts]).float()
    y = torch.cat([part.tensors()[1] for part in parts]).long()
    person, sex = (
        np.concatenate([part.columns[name] for part in parts]) for name in ("subject", "sex")
    )
    return x, y, person.astype(np.int64), torch.from_numpy(sex == "female").long()


def _splits_of_people(x: Tensor, y: Tensor, person: np.ndarray) -> list[Split]:
    found = []
    for split in range(REPEATS):
        test = _chosen(person, 0.3, "test", split)
        validation = _chosen(person, 0.2, "validation", split) & ~test
        train = ~test & ~validation
        found.append(Split(*((x[m], y[m], person[m]) for m in (train, validation, test))))
    return found


def mnist() -> list[Split]:
    data = ow.data.load("mnist")
    assert data.test is not None
    x, y = data.train.tensors()
    owner = owners_of_mnist(y.numpy())
    validation = _chosen(owner, 0.1, "validation", 0)
    test_x, test_y = data.test.tensors()
    parts = [(x[m].float().flatten(1), y[m].long(), owner[m]) for m in (~validation, validation)]
    test = test_x.float().flatten(1), test_y.long(), np.arange(len(test_y))
    return [Split(*parts, test)]


def owners_of_mnist(labels: np.ndarray) -> np.ndarray:
    sizes = np.array(list(islice(cycle(PIECES), 6000)))
    piece = np.repeat(np.arange(len(sizes)), sizes)
    holder = np.random.default_rng(21).permutation(len(sizes)) // 2
    owner = np.empty(len(labels), dtype=np.int64)
    owner[np.argsort(labels, kind="stable")] = holder[piece]
    return owner


def _chosen(owner: np.ndarray, share: float, part: str, seed: int) -> np.ndarray:
    return held_out([str(one).encode() for one in owner.tolist()], share, part, seed)


SETTINGS = {"parkinsons": parkinsons, "voices": voices, "mnist": mnist}


class Study:
    def __init__(self, name: str):
        self.splits = SETTINGS[name]()
        self.plans: dict[Any, tuple[ow.Plan, np.ndarray]] = {}

    def plan(
        self, split: int, sampling: str, epsilon: float, cell: Cell
    ) -> tuple[ow.Plan, np.ndarray]:
        """Return the plan and the training rows that it uses."""
        most, fraction, _ = cell
        key = split, sampling, epsilon, most, fraction
        if key not in self.plans:
            ids = self.splits[split].train[2]
            owners, rows = ow.Owners(ids, epsilon, DELTA), np.arange(len(ids))
            options: dict[str, Any] = {"records_per_owner": most}
            if sampling == "record":
                options = {}
                if most is not None:
                    owners, rows = owners.bound(most)
            total = len(owners) if sampling == "owner" else owners.total_records
            made = ow.plan(
                owners,
                unit="owner",
                sampling=sampling,
                steps=STEPS,
                batch_size=fraction * total,
                **options,
            )
            self.plans[key] = made, rows
        return self.plans[key]

    def train(self, split: int, sampling: str, epsilon: float, cell: Cell, seed: int) -> nn.Module:
        plan, rows = self.plan(split, sampling, epsilon, cell)
        x, y, _ = self.splits[split].train
        model = linear(self.splits[split])
        trainer = ow.Trainer(
            model, plan, lr=cell[2], seed=seed, evaluate_every=STEPS, progress=False
        )
        trainer.fit((x[rows], y[rows]))
        return model

    def run(self, sampling: str, epsilon: float) -> dict[str, Any]:
        scores = {}
        for cell in product(MOST, FRACTIONS, RATES):
            models = [
                (at, self.train(at, sampling, epsilon, cell, 900 + at))
                for at in range(len(self.splits))
            ]
            scores[cell] = np.mean([accuracy(m, self.splits[at].validation) for at, m in models])
        best = max(scores, key=lambda cell: scores[cell])
        finals = []
        for repeat in range(REPEATS):
            at = repeat % len(self.splits)
            finals.append(
                accuracy(self.train(at, sampling, epsilon, best, repeat), self.splits[at].test)
            )
        plans = [self.plan(at, sampling, epsilon, best)[0] for at in range(len(self.splits))]
        noise = [plan.noise_std / plan.expected_batch_size for plan in plans]
        tuning = [[*cell, float(score)] for cell, score in scores.items()]
        return {"cell": best, "accuracy": finals, "noise": np.mean(noise), "tuning": tuning}


def linear(split: Split) -> nn.Linear:
    x, y, _ = split.train
    model = nn.Linear(x.shape[1], int(y.max()) + 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def accuracy(model: nn.Module, part: Part) -> float:
    with torch.no_grad():
        return float((model(part[0]).argmax(dim=1) == part[1]).double().mean())


def references(study: Study) -> dict[str, list[float]]:
    """Return test accuracies of the commonest training label, and without privacy."""
    common, plain = [], []
    for split in study.splits:
        x, y, _ = split.train
        common.append(float((split.test[1] == y.mode().values).double().mean()))
        plain.append(accuracy(_plain(linear(split), x, y), split.test))
    return {"commonest label": common, "not private": plain}


def _plain(model: nn.Linear, x: Tensor, y: Tensor) -> nn.Linear:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(x), y) + 1e-4 * model.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return model


def table(stored: dict[str, Any]) -> str:
    lines = [
        "# Privacy per owner: owner sampling and record sampling", "",
        "`python reproduction/studies/owners.py` writes this page; its first lines describe the",
        "settings, which were fixed before any result was seen. Test accuracy in percent, mean and",
        "standard deviation of five runs; noise: standard deviation of the noise on the averaged",
        "gradient, for clip norm 1. All runs have fixed seeds and are NOT PRIVATE.", "",
    ]  # fmt: skip
    for name, results in stored.items():
        lines += [
            f"## {name}", "",
            "| ε per owner | sampling | accuracy | most records | batch | learning rate | noise |",
            "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for label, values in results["references"].items():
            lines.append(f"| | {label} | {_spread(values)} | | | | |")
        for key, entry in results["runs"].items():
            epsilon, sampling = key.split()
            most, fraction, rate = entry["cell"]
            lines.append(
                f"| {epsilon} | {sampling} | {_spread(entry['accuracy'])} | {most or 'all'} | "
                f"{fraction:.0%} | {rate:g} | {entry['noise']:.3g} |"
            )
        lines.append("")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    found = 100 * np.array(values)
    return f"{found.mean():.1f}" + (f" ± {found.std(ddof=1):.1f}" if len(found) > 1 else "")


def _path(setting: str) -> Path:
    return RESULTS / f"{setting}.json"


def _stored(path: Path) -> dict[str, Any]:
    return read_json(path, mapping_of(ANYTHING)) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = _path(options.setting)
    RESULTS.mkdir(exist_ok=True)
    study = Study(options.setting)
    results = _stored(path) or {"references": references(study), "runs": {}}
    for epsilon, sampling in product(EPSILONS, SAMPLINGS):
        key = f"{epsilon:g} {sampling}"
        if key in results["runs"]:
            continue
        results["runs"][key] = study.run(sampling, epsilon)
        write_json(path, results, indent=None)
        stored = {name: _stored(_path(name)) for name in SETTINGS if _path(name).exists()}
        write_text(RESULTS / "index.md", table(stored))
        print(table({options.setting: results}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
