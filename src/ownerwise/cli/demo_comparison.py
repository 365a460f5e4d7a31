"""The comparison in `ownerwise demo`: four methods with ten owners, one per digit.

Budgets range from strict to lax. The seeds and the search space are fixed in advance. Every method
is tuned over the same clip norms and learning rates, on validation data, with the same number of
runs; tail and kappa are the library's defaults and are not tuned. The results are shown whether or
not any method improves on the others. The setting (budgets from 1 to 10, 120 steps) was chosen
after trying about ten others on these digits, and docs/how-to/tail-and-kappa.md compares nine
choices of tail and kappa on the same test images, so only the seeds used here are new. The data are
public; fixed seeds make the runs repeatable and therefore NOT private.
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
from ownerwise.report.comparison import Difference, Metric
from ownerwise.runs import Run
from ownerwise.training import Trainer
from ownerwise.wording import Amount, span_up

__all__ = ["METHODS", "Demo", "DemoMethod", "DemoSearch", "DemoSummary"]


@dataclass(frozen=True)
class DemoMethod:
    """A method to compare: its planning method, and how it weights the records in a batch."""

    label: str
    plan_method: str
    weights: Weights | None = None


METHODS = (
    DemoMethod("DP-SGD", "uniform"),
    DemoMethod("IDP-SGD", "sample"),
    DemoMethod("INO-SGD", "sample", WEIGHTS.make("ino")),
    DemoMethod("INO-SGD budget-aware", "sample", WEIGHTS.make({"kind": "ino", "kappa": 1.0})),
)
PLAIN, BASELINE = "DP-SGD", "IDP-SGD"


@dataclass(frozen=True)
class DemoSearch:
    """The search space and the seeds, the same for every method.

    A step length is the learning rate times the clip norm; the search tries each clip norm with
    each step length.
    """

    clip_norms: tuple[float, ...] = (0.3, 1.0, 4.0)
    step_lengths: tuple[float, ...] = (2.0, 4.0, 8.0)
    search_seeds: tuple[int, ...] = (101, 102, 103)
    seeds: tuple[int, ...] = (21, 22, 23, 24, 25, 26, 27, 28)
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
        return len(self.cells) * len(self.search_seeds) + len(self.seeds)


@dataclass(frozen=True)
class DemoSummary:
    """Results of one method on the test records.

    Attributes:
        figures: mean and standard deviation of each metric over seeds, by the metric's name.
        recalls: mean recall of each owner's digit.
        spent: smallest and largest epsilon spent.
    """

    label: str
    clip_norm: float
    lr: float
    figures: Mapping[str, Amount]
    recalls: Mapping[str, float]
    spent: tuple[float, float]


@dataclass
class Demo:
    """Load the digits, tune the methods and compare them.

    Args:
        search: search space and seeds.
        methods: the methods to compare.
        low, high: the strictest and the laxest budget; the others are evenly spaced in between.
    """

    search: DemoSearch = field(default_factory=DemoSearch)
    methods: Sequence[DemoMethod] = METHODS
    low: float = 1.0
    high: float = 10.0

    @cached_property
    def data(self) -> DataSet:
        """The digits from scikit-learn."""
        return load_digits()

    @cached_property
    def parts(self) -> tuple[Records, Records, Records]:
        """Training, validation and test records; validation uses a quarter of the training part.

        Records are split by position, which is suitable only for a public file that never changes
        (see `data.splits`).
        """
        train, test = self.data.train, self.data.test
        assert test is not None
        held_out = np.zeros(len(train), dtype=bool)
        for label in np.unique(train.targets):
            held_out[np.flatnonzero(train.targets == label)[::4]] = True
        return train.take(~held_out), train.take(held_out), test

    @cached_property
    def assignment(self) -> Assignment:
        """One owner per digit; the owner of the digit 0 has the strictest budget."""
        train = self.parts[0]
        data = DataSet("digits", train, None, self.data.classes)
        return assign.by_class(data, assign.evenly(self.low, self.high, 10))

    @property
    def strictest(self) -> str:
        """The owner with the smallest budget."""
        return min(self.assignment.group_budgets, key=self.assignment.group_budgets.__getitem__)

    def compare(self, progress: bool = True) -> dict[str, list[Run]]:
        """Tune each method, train it with all seeds and return the runs by label."""
        total = len(self.methods) * self.search.runs_per_method
        compared: dict[str, list[Run]] = {}
        with tqdm(total=total, disable=not progress, unit="run", smoothing=0.05) as bar:
            for method in self.methods:
                plans = self._plans(method)
                bar.set_description(f"{method.label}: search")
                clip, lr = self._tune(method, plans, bar)
                bar.set_description(f"{method.label}: clip norm {clip:g}, lr {lr:g}")
                compared[method.label] = []
                for seed in self.search.seeds:
                    run = self._run(method, plans[clip], lr, seed, final=True)
                    compared[method.label].append(run)
                    bar.update()
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
            )
            for clip in self.search.clip_norms
        }

    def _tune(self, method: DemoMethod, plans: dict[float, Plan], bar: tqdm) -> tuple[float, float]:
        """Return the clip norm and learning rate with the best validation accuracy."""
        scores: dict[tuple[float, float], float] = {}
        for clip, lr in self.search.cells:
            accuracies = []
            for seed in self.search.search_seeds:
                run = self._run(method, plans[clip], lr, seed, final=False)
                accuracies.append(run.history[-1]["validation"]["accuracy"])
                bar.update()
            scores[clip, lr] = float(np.mean(accuracies))
        return max(scores, key=scores.__getitem__)

    def _run(
        self, method: DemoMethod, method_plan: Plan, lr: float, seed: int, *, final: bool
    ) -> Run:
        train, validation, test = self.parts
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
            name=f"{method.label}, seed {seed}",
            label=method.label,
            evaluate_every=max(1, steps // self.search.evaluations) if final else steps,
            progress=False,
            notes={"model": "64-64-10 with ReLU", "data": "digits from scikit-learn"},
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

    def summaries(self, compared: Mapping[str, Sequence[Run]]) -> list[DemoSummary]:
        """Return the results of each method on the test records."""
        return [self._summary(label, runs) for label, runs in compared.items()]

    def _summary(self, label: str, runs: Sequence[Run]) -> DemoSummary:
        tests = [run.history[-1]["test"] for run in runs]
        groups = [[t["groups"][g]["recall"] for g in self.assignment.group_budgets] for t in tests]
        recalls = np.array(groups)  # [seeds, owners], strictest first
        columns = {
            "overall": [t["accuracy"] for t in tests],
            "worst owner": recalls.min(axis=1),
            "strictest owner": recalls[:, 0],
            "strictest three": recalls[:, :3].mean(axis=1),
            "spread": recalls.std(axis=1),
        }
        spent = runs[0].epsilon()
        return DemoSummary(
            label,
            float(runs[0].plan.clip_norm),
            runs[0].config["optimizer"]["lr"],
            {name: Amount.of(list(values)) for name, values in columns.items()},
            dict(zip(self.assignment.group_budgets, recalls.mean(axis=0).tolist(), strict=True)),
            (float(spent.min()), float(spent.max())),
        )


def table(summaries: Sequence[DemoSummary]) -> Iterator[str]:
    """Yield the lines of the table that compares the methods."""
    names = list(summaries[0].figures)
    width = max(len(summary.label) for summary in summaries)
    yield f"{'':{width}}  " + "  ".join(f"{name:>15}" for name in names) + "      epsilon spent"
    for summary in summaries:
        cells = [f"{a.mean:.3f} ± {a.deviation or 0:.3f}" for a in summary.figures.values()]
        spent = span_up(*summary.spent, 3)
        yield f"{summary.label:{width}}  " + "  ".join(f"{c:>15}" for c in cells) + f"  {spent:>17}"


def owner_table(summaries: Sequence[DemoSummary], budgets: Mapping[str, float]) -> Iterator[str]:
    """Yield one line per owner, with the budget and the recall under each method."""
    yield "owner  epsilon  " + "  ".join(f"{summary.label:>20}" for summary in summaries)
    for owner, epsilon in budgets.items():
        recalls = "  ".join(f"{summary.recalls[owner]:>20.3f}" for summary in summaries)
        yield f"{owner:>5}  {epsilon:>7.3g}  {recalls}"


def findings(summaries: Sequence[DemoSummary]) -> Iterator[str]:
    """Yield one sentence per method about its gains and losses compared with a simpler method.

    A difference between two means counts only if it exceeds twice its standard error.
    """
    by_label = {summary.label: summary for summary in summaries}
    for label, summary in by_label.items():
        if label == PLAIN:
            continue
        against = PLAIN if label == BASELINE else BASELINE
        base = by_label[against].figures
        words: dict[str, list[str]] = {"gained": [], "lost": [], "even": []}
        for name, value in summary.figures.items():
            metric = Metric(name, name, higher_is_better=name != "spread")
            change = Difference.between(metric, value, base[name])
            words[change.outcome].append(f"{name} {100 * change.by:+.1f}")
        text = "; ".join(
            f"{'no clear difference' if outcome == 'even' else outcome}: {', '.join(each)}"
            for outcome, each in words.items()
            if each
        )
        yield f"{label} vs {against}, in percentage points: {text}."
