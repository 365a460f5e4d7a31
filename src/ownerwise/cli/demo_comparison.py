"""The comparison in `ownerwise demo`: four methods with ten owners, one per digit.

Budgets range from strict to lax. The splits of the data, the seeds and the search space are fixed
in advance. On each split, every method is tuned over the same clip norms and learning rates on
validation data, with the same number of runs; tail, kappa and the calibration are the library's
defaults. The results are shown whether or not any method improves on the others. The setting
(budgets from 1 to 10, 120 steps) was chosen after trying about ten others on these digits, and the
defaults were chosen partly on these digits, so only the splits and seeds used here are new. The
data are public; fixed seeds make the runs repeatable and therefore NOT private.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from tqdm import tqdm

from ownerwise import models
from ownerwise.data import Assignment, DataSet, Records, assign, load_digits
from ownerwise.mechanisms import WEIGHTS, Weights
from ownerwise.owners import Owners
from ownerwise.planning import Plan, plan
from ownerwise.repair import CALIBRATIONS
from ownerwise.report.comparison import METRICS, Comparison
from ownerwise.runs import Run
from ownerwise.training import Trainer
from ownerwise.wording import amount, span_up

__all__ = ["METHODS", "Demo", "DemoMethod", "DemoSearch"]


@dataclass(frozen=True)
class DemoMethod:
    """A method to compare: its planning method, its weights, and whether it calibrates."""

    label: str
    plan_method: str
    weights: Weights | None = None
    calibrated: bool = False


METHODS = (
    DemoMethod("DP-SGD", "uniform"),
    DemoMethod("IDP-SGD", "sample"),
    DemoMethod("INO-SGD", "sample", WEIGHTS.make("ino")),
    DemoMethod("IDP-SGD calibrated", "sample", calibrated=True),
)
_SHOWN = [metric for metric in METRICS if metric.key != "balanced_accuracy"]


@dataclass(frozen=True)
class DemoSearch:
    """The splits, the search space and the seeds, the same for every method.

    A step length is the learning rate times the clip norm; on each split, the search tries each
    clip norm with each step length.
    """

    clip_norms: tuple[float, ...] = (0.3, 1.0, 4.0)
    step_lengths: tuple[float, ...] = (2.0, 4.0, 8.0)
    search_seeds: tuple[int, ...] = (101,)
    seeds: tuple[int, ...] = (21, 22, 23)
    splits: int = 5
    steps: int = 120
    batch_size: int = 128
    evaluations: int = 20

    @property
    def cells(self) -> list[tuple[float, float]]:
        """All pairs of clip norm and learning rate."""
        return [(clip, length / clip) for clip in self.clip_norms for length in self.step_lengths]

    @property
    def runs_per_method(self) -> int:
        """Total number of runs per method, in the search and in the comparison."""
        return self.splits * (len(self.cells) * len(self.search_seeds) + len(self.seeds))


@dataclass
class Demo:
    """Load the digits, tune the methods and compare them.

    Args:
        search: splits, search space and seeds.
        methods: the methods to compare.
        low, high: the strictest and the laxest budget; the others are evenly spaced in between.
    """

    search: DemoSearch = field(default_factory=DemoSearch)
    methods: Sequence[DemoMethod] = METHODS
    low: float = 1.0
    high: float = 10.0

    @cached_property
    def splits(self) -> list[tuple[Records, Records, Records]]:
        """Training, validation and test records: 60, 20 and 20% of each digit, in random order.

        Training records are sorted by digit, so that one plan fits all splits. Records are split by
        position, which is suitable only for a public file that never changes (see `data.splits`).
        """
        data = load_digits()
        assert data.test is not None
        records = Records(
            np.concatenate([data.train.inputs, data.test.inputs]),
            np.concatenate([data.train.targets, data.test.targets]),
        )
        found = []
        for split in range(1, self.search.splits + 1):
            rng = np.random.default_rng(split)
            rows: tuple[list, ...] = ([], [], [])
            for label in np.unique(records.targets):
                order = rng.permutation(np.flatnonzero(records.targets == label))
                fifth = len(order) // 5
                cut = np.split(order, [len(order) - 2 * fifth, len(order) - fifth])
                for part, chosen in zip(rows, cut, strict=True):
                    part.append(chosen)
            train, validation, test = (records.take(np.concatenate(part)) for part in rows)
            found.append((train, validation, test))
        return found

    @cached_property
    def assignment(self) -> Assignment:
        """One owner per digit; the owner of the digit 0 has the strictest budget."""
        data = DataSet("digits", self.splits[0][0], None, tuple(map(str, range(10))))
        return assign.by_class(data, assign.evenly(self.low, self.high, 10))

    def compare(self, progress: bool = True) -> dict[str, list[Run]]:
        """Tune each method on each split, train it with all seeds; return the runs by label."""
        total = len(self.methods) * self.search.runs_per_method
        compared: dict[str, list[Run]] = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads would only wait for each other in so small a model
        with tqdm(total=total, disable=not progress, unit="run", smoothing=0.05) as bar:
            for method in self.methods:
                plans = self._plans(method)
                compared[method.label] = []
                for split in range(self.search.splits):
                    bar.set_description(f"{method.label}, split {split + 1}")
                    clip, lr = self._tune(method, plans, split, bar)
                    for seed in self.search.seeds:
                        run = self._run(method, plans[clip], lr, split, seed, final=True)
                        compared[method.label].append(run)
                        bar.update()
        torch.set_num_threads(threads)
        return compared

    def _plans(self, method: DemoMethod) -> dict[float, Plan]:
        owners = Owners(self.assignment.record_owner, self.assignment.epsilon)
        return {
            clip: plan(
                owners,
                method.plan_method,
                steps=self.search.steps,
                batch_size=self.search.batch_size,
                clip_norm=clip,
                calibration=CALIBRATIONS.make("classes") if method.calibrated else None,
            )
            for clip in self.search.clip_norms
        }

    def _tune(
        self, method: DemoMethod, plans: dict[float, Plan], split: int, bar: tqdm
    ) -> tuple[float, float]:
        """Return the clip norm and learning rate with the best validation accuracy."""
        scores: dict[tuple[float, float], float] = {}
        for clip, lr in self.search.cells:
            accuracies = []
            for seed in self.search.search_seeds:
                run = self._run(method, plans[clip], lr, split, seed, final=False)
                accuracies.append(run.history[-1]["validation"]["accuracy"])
                bar.update()
            scores[clip, lr] = float(np.mean(accuracies))
        return max(scores, key=scores.__getitem__)

    def _run(
        self,
        method: DemoMethod,
        method_plan: Plan,
        lr: float,
        split: int,
        seed: int,
        *,
        final: bool,
    ) -> Run:
        train, validation, test = self.splits[split]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = models.mlp(64, 10, hidden=(64,))
        steps = self.search.steps
        trainer = Trainer(
            model,
            method_plan,
            lr=lr,
            weights=method.weights,
            seed=seed,
            name=f"{method.label}, split {split + 1}, seed {seed}",
            label=method.label,
            evaluate_every=max(1, steps // self.search.evaluations) if final else steps,
            progress=False,
            notes={
                "model": "64-64-10 with ReLU",
                "data": "digits from scikit-learn",
                "split": str(split + 1),
            },
        )
        options = {}
        if final:
            options = {"test": test.tensors(), "test_groups": self.assignment.groups(test)}
        return trainer.fit(
            train.tensors(),
            validation=validation.tensors(),
            validation_groups=self.assignment.groups(validation),
            groups_are="owners",
            **options,
        )


def table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table that compares the methods."""
    width = max(len(method.label) for method in comparison.methods)
    titles = "  ".join(f"{metric.title:>16}" for metric in _SHOWN)
    yield f"{'':{width}}  {titles}      epsilon spent"
    for method in comparison.methods:
        cells = "  ".join(f"{amount(comparison.amounts(method, m)):>16}" for m in _SHOWN)
        spent = method.runs[0].epsilon()
        yield f"{method.label:{width}}  {cells}  {span_up(spent.min(), spent.max(), 3):>17}"


def owner_table(comparison: Comparison, budgets: Mapping[str, float]) -> Iterator[str]:
    """Yield one line per owner, with the budget and the recall under each method."""
    yield "owner  epsilon  " + "  ".join(f"{m.label:>18}" for m in comparison.methods)
    for group in comparison.groups:
        recalls = "  ".join(
            f"{100 * comparison.group_recall(method, group).mean:>18.1f}"
            for method in comparison.methods
        )
        yield f"{group.name:>5}  {budgets[group.name]:>7.3g}  {recalls}"


def chosen_cells(comparison: Comparison) -> Iterator[str]:
    """Yield the clip norms and learning rates that each method chose, split by split."""
    for method in comparison.methods:
        cells = {
            run.split: f"{run.plan.clip_norm:g} and {run.config['optimizer']['lr']:g}"
            for run in method.runs
        }
        yield f"{method.label}: {'; '.join(cells.values())}"
