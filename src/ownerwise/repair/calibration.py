"""The calibration release: measure the tilt of the class biases on all records, and remove it.

Individual budgets tilt a model towards lax owners, whose records are drawn more often or pull
harder. The tilt consists mostly of one number per class. With so few numbers, a small part of the
strictest owner's budget is enough to measure the tilt with every record at equal weight. After
training, the class totals of the labels are released with noise once, and those of the predicted
probabilities once per round; between rounds, the class biases are shifted so that the two agree.

With `pull`, the class totals are released a second time, with every owner's records weighted by the
owner's budget. The ratio of the two totals says in which direction the budgets tilt the model. It
is measured with little noise, because lax owners can afford their large weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.accounting import ClosingRelease, gaussian_mu
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Closing
from ownerwise.planning import Plan

_CLASSES = 10  # assumed in planning, when the model is not yet known
_CANDIDATES = 64  # budgets tried as the strictest one that contributes in full
_FEW_ROUNDS, _MANY_ROUNDS = 2, 5
_LITTLE_NOISE = 0.02  # relative to the class total it is added to
_RELAXATION = {1: 2.5, 2: 2.0}  # predictions move less than the biases
_USUAL_RELAXATION = 1.5
_MILD = 2.0  # far below what James and Stein allow for many classes: most of a tilt is kept
_LARGEST_TAU = 2.0  # how far the tilt may exceed what the plan predicts before it is shrunk


@dataclass(eq=False)
class Calibration(Closing):
    """Shift the class biases until predictions match labels, with all records weighted equally.

    Formal guarantee: every record adds a one-hot vector to the first sum and a vector of
    probabilities to each later one, each with an L2 norm of at most 1 (times the owner's share, if
    the plan has shares), so all sums together are one Gaussian mechanism, which the plan accounts
    for (`plan(..., calibration=Calibration())`, docs/proofs/calibration.md). With `pull`, there is
    one more sum of one-hot vectors, in which a record counts in proportion to the owner's mu
    (`plan.closing_pulls`); every owner pays for the owner's own weight. The number of rounds, the
    noise, the shares and the weights are public: they follow from the budgets and the declared
    record counts.

    Attributes:
        share: fraction of the strictest owner's budget that is spent on the release, in terms of
            the squared mu of Gaussian differential privacy.
        rounds: number of rounds; by default 5 if the noise is small compared with the declared
            number of records, else 2; one fewer with `pull`.
        classes: number of classes assumed when the rounds and shares are chosen.
        pull: whether to measure the direction of the tilt as well. The first round starts from the
            tilt that the plan predicts in this direction, and noise is shrunk towards it instead of
            towards 0. This helps if owners hold different classes. If all budgets are equal, it
            changes nothing.
    """

    share: float = 0.1
    rounds: int | None = None
    classes: int = _CLASSES
    pull: bool = False
    _std: float = field(default=math.nan, repr=False)
    _count: int = field(default=0, repr=False)
    _sums: list[list[float] | None] = field(default_factory=list, repr=False)
    _unit: float = field(default=1.0, repr=False)  # what a record adds that counts in full
    _tilt: _Tilt | None = field(default=None, repr=False)  # None if the pull is not measured

    def __post_init__(self):
        problems = []
        if not 0 < self.share < 1:
            problems.append(f"share {self.share}: expected more than 0 and less than 1")
        if self.rounds is not None and not (1 <= self.rounds == int(self.rounds)):
            problems.append(f"rounds {self.rounds}: expected a whole number of at least 1")
        if not 2 <= self.classes == int(self.classes):
            problems.append(f"classes {self.classes}: expected a whole number of at least 2")
        if not isinstance(self.pull, bool):
            problems.append(f"pull {self.pull!r}: expected True or False")
        if problems:
            raise OwnerwiseError([f"Calibration: {problem}" for problem in problems])

    def closing(
        self, epsilon: np.ndarray, delta: np.ndarray, records: np.ndarray
    ) -> ClosingRelease:
        """Return the noise, the number of sums, and the mu from which owners contribute in full.

        Usually every record contributes in full. If a few strict owners would raise the noise for
        everyone, they contribute less: the rule minimises the sum of two squared errors, both
        relative to an average class total. One is the noise on that total; the other is the
        contribution it loses if all lost contributions belong to one class.
        """
        mu = _mus(epsilon, delta)
        total = float(records.sum())
        best = None
        for full in np.unique(np.quantile(mu, np.linspace(0, 1, _CANDIDATES), method="lower")):
            kept = float(records @ np.minimum(1.0, mu / full))
            noise = self.classes / (math.sqrt(self.share) * full * kept)
            error = noise**2 + (self.classes * (1 - kept / total)) ** 2
            if best is None or error < best[0]:
                best = error, float(full), noise
        assert best is not None
        _, full, noise = best
        pull = self.pull and bool(mu.max() > mu.min())
        rounds = self.rounds
        if rounds is None:
            many = noise * math.sqrt(_MANY_ROUNDS + 1) <= _LITTLE_NOISE
            rounds = (_MANY_ROUNDS if many else _FEW_ROUNDS) - pull
        count = int(rounds) + 1 + pull
        std = math.sqrt(count / self.share) / full
        if pull:
            largest = float(mu.max())
            return ClosingRelease(std * full / largest, count, full, largest)
        return ClosingRelease(std, count, full if full > mu.min() else 0.0)

    def bind(self, plan: Plan) -> Self:
        """Return the calibration in its initial state, with the plan's noise and rounds."""
        assert plan.closing_std is not None
        bound = copy.copy(self)
        bound._count, bound._sums, bound._tilt = plan.closing_count, [], None
        bound._unit = float(plan.closing_lengths(1).max())
        bound._std = plan.closing_std / bound._unit
        if plan.closing_pulls is not None:
            bound._tilt = _Tilt.under(plan)
        bound.outside = False
        return bound

    def contributions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one-hot labels for the sums of labels, and predicted probabilities for others."""
        logits = class_logits(outputs)
        if len(self._sums) >= self._of_labels:
            return torch.softmax(logits - torch.tensor(self._biases()), dim=1)
        labels = class_labels(targets, outputs)
        known = (labels >= 0) & (labels < logits.shape[1])
        one_hot = functional.one_hot(labels.where(known, 0), logits.shape[1])
        return one_hot.double() * known[:, None]

    def observe(self, noised: Tensor | None) -> None:
        """Store the next noised sum, or None if it was lost after its cost was charged."""
        self._sums.append(None if noised is None else (noised.double() / self._unit).tolist())

    @property
    def released(self) -> int:
        """Number of sums observed so far."""
        return len(self._sums)

    @property
    def shift(self) -> Tensor | None:
        """The tensor to subtract from the outputs; None before the last round, or if too much was
        lost.

        The biases are measured with noise, so they are shrunk (James and Stein 1961, positive part)
        towards 0, or towards the nearest multiple of the direction of the pull: if what remains is
        no larger than its noise, it is dropped. A single round never reverses the pull.
        """
        if len(self._sums) < self._count or self._labels is None or not self._predictions:
            return None
        centre, rest, kept = self._shrunk()
        return torch.tensor(centre + kept * rest)

    def _shrunk(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return what the biases are shrunk towards, their distance from it, and the factor kept.

        Each sums to 0 over the classes, weighted by the precision of the biases.
        """
        assert self._labels is not None
        last = self._predictions[-1]
        # variance of the last change in the biases, which outweighs what remains of earlier noise
        variance = (self._factor * self._std) ** 2 * (self._labels**-2.0 + last**-2.0)

        def centred(values: np.ndarray) -> np.ndarray:
            return values - np.average(values, weights=1 / variance)

        biases, pull = centred(self._biases()), centred(self._pull())
        length = float(np.sum(pull**2 / variance))
        tau = float(np.sum(pull * biases / variance)) / length if length else 0.0
        tau = min(tau, _LARGEST_TAU)
        centre = max(tau, 0.0) * pull
        once = self._count - self._of_labels == 1  # a single round may overshoot
        rest = biases - (tau * pull if once else centre)
        energy = float(np.sum(rest**2 / variance))
        return centre, rest, max(0.0, 1 - max(len(rest) - 3, 1) / energy) if energy else 0.0

    @property
    def _of_labels(self) -> int:
        """Number of sums of labels, which come before those of predictions."""
        return 1 if self._tilt is None else 2

    @property
    def _labels(self) -> np.ndarray | None:
        """The class totals of the labels, or None if they are not known."""
        known = self._sums[self._of_labels - 1 : self._of_labels]
        return self._floored(known[0]) if known and known[0] is not None else None

    @property
    def _predictions(self) -> list[np.ndarray]:
        """The class totals of the predictions in the rounds that were not lost."""
        rounds = self._sums[self._of_labels :]
        return [self._floored(total) for total in rounds if total is not None]

    def _pull(self) -> np.ndarray:
        """Return the tilt that the plan predicts; 0 if it was not measured, or was lost."""
        labels = self._labels
        if labels is None:
            return np.zeros(1)
        if self._tilt is None or self._sums[0] is None:
            return np.zeros(len(labels))
        return self._tilt.of(self._floored(self._sums[0]), labels, self._std)

    def _biases(self) -> np.ndarray:
        """Return the biases after the sums released so far."""
        biases, labels = self._pull(), self._labels
        if labels is None:
            return biases
        for predictions in self._predictions:
            biases = biases + self._factor * np.log(predictions / labels)
        return biases

    @property
    def _factor(self) -> float:
        """How far the biases move in a round, relative to the log of the ratio of the totals."""
        return _RELAXATION.get(self._count - self._of_labels, _USUAL_RELAXATION)

    def _floored(self, totals: list[float]) -> np.ndarray:
        return np.maximum(totals, self._std)

    def state(self) -> dict[str, Any]:
        """Return the noised sums released so far."""
        return {"sums": self._sums, "outside": self.outside}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the sums released before."""
        known = np.array([total for total in state["sums"] if total is not None], dtype=float)
        fits = known.ndim == 2 and bool(np.isfinite(known).all()) if len(known) else True
        if len(state["sums"]) > self._count or not fits:
            raise ValueError("expected the finite noised sums of this release")
        self._sums[:] = state["sums"]
        self.outside = bool(state.get("outside", False))

    def settings(self) -> dict[str, Any]:
        """Return the class name and the options, as JSON types."""
        found = {"kind": type(self).__name__, "share": self.share, "classes": self.classes}
        return {**found, "pull": True} if self.pull else found

    def record(self) -> dict[str, Any]:
        """Return the noised sums, the shift, and the fraction of the tilt kept after shrinking."""
        result: dict[str, Any] = {"sums": self._sums, "std": self._std, "shift": None}
        if (shift := self.shift) is not None:
            result |= {"shift": shift.tolist(), "kept": self._shrunk()[2]}
        if self._tilt is not None:
            result["pull"] = self._pull().tolist()
        return result


@dataclass(frozen=True)
class _Tilt:
    """What a plan says about the tilt, given class totals with and without weights.

    Attributes:
        slope: how much the log of a record's pull (sampling rate times clip norm) rises with the
            log of its weight in the weighted totals.
        bounds: the logarithms of the smallest and largest weight, which bound those of all ratios.
    """

    slope: float
    bounds: tuple[float, float]

    @classmethod
    def under(cls, plan: Plan) -> Self:
        assert plan.closing_pulls is not None
        weights = plan.closing_pulls / plan.closing_lengths(1)
        pulls = np.log(plan.sampling_rates * plan.clip_norms)
        spread = float(np.ptp(np.log(plan.closing_pulls)))
        slope = float(np.ptp(pulls)) / spread if spread else 0.0
        return cls(slope, (float(np.log(weights.min())), float(np.log(weights.max()))))

    def of(self, weighted: np.ndarray, plain: np.ndarray, std: float) -> np.ndarray:
        """Return the tilt of the class biases, from noised totals.

        It is shrunk towards 0, which matters only if it is hardly larger than its noise: where
        all owners hold the same classes, the measured direction is nothing but noise.
        """
        variance = std**2 * (weighted**-2.0 + plain**-2.0)
        tilt = np.clip(np.log(weighted / plain), *self.bounds)
        tilt -= np.average(tilt, weights=1 / variance)
        energy = float(np.sum(tilt**2 / variance))
        return self.slope * tilt * (max(0.0, 1 - _MILD / energy) if energy else 0.0)


def closing_for(plan: Plan) -> Closing | None:
    """Return the default closing release for a plan, or None if the plan has none."""
    return None if plan.closing_std is None else Calibration()


def class_logits(outputs: Any) -> Tensor:
    """Return outputs as float64 logits, [records, classes]; a single output is a binary logit."""
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2):
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise OwnerwiseError(
            f"the model's outputs are {shape}; expected one number per class and record: only "
            "classifiers have class biases to calibrate"
        )
    logits = outputs.detach().double().cpu()
    if logits.dim() == 1 or logits.shape[1] == 1:
        logits = logits.reshape(-1, 1)
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    return logits


def class_labels(targets: Any, outputs: Tensor) -> Tensor:
    """Return labels as int64, [records]; the first column if targets contain a cell as well."""
    if isinstance(targets, Tensor):
        labels = targets.detach().cpu()
        if labels.dim() == 2:
            labels = labels[:, 0]
        binary = outputs.dim() == 1 or outputs.shape[1] == 1
        if labels.shape == outputs.shape[:1] and (binary or not labels.is_floating_point()):
            return (labels.round() if labels.is_floating_point() else labels).long()
    raise OwnerwiseError(
        "the targets are not class labels; expected one whole number per record: only classifiers "
        "have class biases to calibrate"
    )


def _mus(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return a close lower bound on the mu of every budget; exact if there are few budgets."""
    result = np.empty(len(epsilon))
    for value in np.unique(delta):
        members = np.flatnonzero(delta == value)
        grid = np.unique(epsilon[members])
        if len(grid) > 4 * _CANDIDATES:
            ends = grid[0], grid[-1]
            grid = np.clip(np.geomspace(*ends, 4 * _CANDIDATES), *ends)
        of_grid = np.array([gaussian_mu(float(e), float(value)) for e in grid])
        result[members] = of_grid[np.searchsorted(grid, epsilon[members], side="right") - 1]
    return result
