"""The plan of a PATE run: teachers, weights, noise and questions, fixed in advance."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr, ndtr

from ownerwise.accounting import find_root, gaussian_mu
from ownerwise.errors import PlanError
from ownerwise.owners import Owners, frozen
from ownerwise.pate.checks import plan_problems

METHODS = ("weight", "copies", "uniform")
MOST_CLASSES = 8
"""With more distinct budgets, teachers are shared by classes of similar budgets."""

_SAFETY = 1 - 1e-6
_GRID = 2.0**-20


@dataclass(frozen=True, eq=False)
class PatePlan:
    """Who pays how much for the answers of an ensemble of teachers.

    Formal guarantee. Teachers are trained on disjoint or overlapping parts of the records: each
    record is with teachers that its own id determines (`shards`), whose votes count `masses[o]`
    together. For at most `questions` public questions, in a fixed order, the following is released
    and nothing else: whether the largest weighted count plus N(0, test_std^2) reaches `threshold`
    (if there is a test), and, until `answers` questions are answered, the class with the largest
    weighted count after adding N(0, answer_std^2) to each. Adding or removing one record of owner o
    (with unit "owner": all of their records) changes the votes of its own teachers only, each from
    one class to another. So it changes

    - the largest weighted count by at most masses[o], and
    - the vector of weighted counts by a vector of norm at most sqrt(2) masses[o], reached if all of
      its teachers move from the same class to the same other class.

    Each release is a Gaussian mechanism, chosen adaptively. With the public caps on tests and
    answers, the whole is mu-Gaussian differentially private for owner o, with

        mu^2 = masses[o]^2 (questions / test_std^2 + 2 answers / answer_std^2),

    and (a, a mu^2 / 2)-Renyi differentially private at every order a. This holds for adaptive
    choices with caps fixed in advance (Smith and Thakurta 2022, "Fully Adaptive Composition for
    Gaussian Differential Privacy"). The caps are charged in full, however many questions were asked
    or answered: the actual numbers depend on the votes. Bounds that depend on the votes are smaller
    but private themselves, so they are never computed here.

    Public: everything in this plan, the questions, the hash key, the teachers' architecture and
    seeds. Private: the votes, the teachers, and which teachers agree.

    Attributes:
        method: "weight": teachers hold records of one budget class, whose votes count more the
            larger the budget is. "copies": votes count the same, and records are with more teachers
            the larger the budget is. "uniform": plain PATE, noise for the strictest budget.
        questions, answers: the caps.
        threshold: least noised count for an answer; None if all questions are answered.
        test_std, answer_std: standard deviations of the noise.
        classes: budget class of every owner.
        first, count: first teacher and number of teachers of each class.
        weights: how much the vote of a teacher of each class counts: multiples of `grid`.
        copies: number of teachers that hold a record of each class.
        targets, deltas: budgets of the owners.
        unit: "record" or "owner".
        owners: the owners.
    """

    method: str
    questions: int
    answers: int
    threshold: float | None
    test_std: float | None
    answer_std: float
    classes: np.ndarray = field(repr=False)
    first: np.ndarray = field(repr=False)
    count: np.ndarray = field(repr=False)
    weights: np.ndarray
    copies: np.ndarray
    targets: np.ndarray = field(repr=False)
    deltas: np.ndarray = field(repr=False)
    unit: str = "record"
    owners: Owners | None = field(default=None, repr=False)

    def __post_init__(self):
        for name in ("classes", "first", "count", "weights", "copies", "targets", "deltas"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    @property
    def teachers(self) -> int:
        """Number of teachers."""
        return int((self.first + self.count).max())

    @property
    def teacher_weights(self) -> np.ndarray:
        """How much each teacher's vote counts."""
        result = np.empty(self.teachers)
        for first, count, weight in zip(self.first, self.count, self.weights, strict=True):
            result[first : first + count] = weight
        return result

    @property
    def grid(self) -> float:
        """Grid of the weights and of the noise, a power of two; weighted counts are exact."""
        return grid_of_answers(self.answer_std, self.test_std)

    @property
    def masses(self) -> np.ndarray:
        """The total weight of the teachers that hold a record of each owner."""
        return (self.weights * self.copies)[self.classes]

    @property
    def mu(self) -> np.ndarray:
        """The Gaussian differential privacy of each owner after all questions."""
        return self.masses * math.sqrt(
            unit_cost(self.questions, self.answers, self.test_std, self.answer_std)
        )

    def renyi(self, order: float) -> np.ndarray:
        """Return each owner's Renyi divergence of this order after all questions."""
        return order * self.mu**2 / 2

    def epsilon(self) -> np.ndarray:
        """Return each owner's epsilon for one record (unit "owner": for all of their records)."""
        values, index = np.unique(np.stack([self.mu, self.deltas]), axis=1, return_inverse=True)
        found = np.array([epsilon_of(mu, delta) for mu, delta in values.T.tolist()])
        return found[index.reshape(-1)]

    @cached_property
    def hash(self) -> str:
        """Hash of everything that the plan specifies."""
        header = [
            self.method, self.questions, self.answers, self.threshold, self.test_std,
            self.answer_std, self.unit,
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(header).encode())
        for name in ("classes", "first", "count", "weights", "copies", "targets", "deltas"):
            digest.update(getattr(self, name).astype("<f8").tobytes())
        return digest.hexdigest()

    def verify(self) -> None:
        """Raise a PlanError if any owner would spend too much, by two accountants."""
        problems = plan_problems(self)
        if not problems:
            spent = self.epsilon()
            if not (spent <= self.targets).all():
                worst = int(np.argmax(spent / self.targets))
                problems.append(
                    f"an owner with epsilon {self.targets[worst]:g} would spend {spent[worst]:.6g}"
                )
            pairs = np.unique(np.stack([self.masses, self.targets, self.deltas]), axis=1)
            for mass, target, delta in pairs.T.tolist()[:: max(1, pairs.shape[1] // 8)]:
                by_reference = self._by_reference(mass, delta)
                if by_reference > target:
                    problems.append(
                        f"an owner with epsilon {target:g} would spend {by_reference:.6g} "
                        "according to dp-accounting"
                    )
        if problems:
            raise PlanError(problems)

    def _by_reference(self, mass: float, delta: float) -> float:
        """Return epsilon by dp-accounting: every test and every answer is an event."""
        from dp_accounting import dp_event
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant(value_discretization_interval=1e-4)
        if self.test_std is not None:
            accountant.compose(dp_event.GaussianDpEvent(self.test_std / mass), self.questions)
        answer = dp_event.GaussianDpEvent(self.answer_std / (math.sqrt(2) * mass))
        accountant.compose(answer, self.answers)
        return float(accountant.get_epsilon(delta)) * (1 - 5e-4)  # its grid overstates

    def describe(self) -> str:
        """Return the plan as text."""
        test = (
            ""
            if self.threshold is None
            else (
                f", if the largest count with noise of std {self.test_std:.4g} reaches "
                f"{self.threshold:.4g}"
            )
        )
        spent = self.epsilon()
        rows = [
            f"  epsilon {self.targets[self.classes == number].min():g}: {self.count[number]} "
            f"teachers, weight {self.weights[number]:.4g}, {self.copies[number]} per record, "
            f"spends {spent[self.classes == number].max():.4f}"
            for number in range(len(self.count))
            if (self.classes == number).any()
        ]
        return "\n".join(
            [
                f"PATE plan {self.hash[:12]}: {self.method}, {self.teachers} teachers",
                f"at most {self.questions} questions and {self.answers} answers with noise of std "
                f"{self.answer_std:.4g} per class{test}",
                *rows,
                f"UNIT OF PRIVACY: one {self.unit}. The caps are charged, whatever is answered.",
            ]
        )


def unit_cost(questions: int, answers: int, test_std: float | None, answer_std: float) -> float:
    """Return mu^2 for a record whose teachers' votes count 1 together."""
    tests = 0.0 if test_std is None else questions / test_std**2
    return tests + 2 * answers / answer_std**2


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon of a mu-Gaussian differentially private mechanism, rounded up."""

    def miss(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        second = math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))
        return math.log(max(float(ndtr(-epsilon / mu + mu / 2)) - second, 1e-300)) - math.log(delta)

    root = find_root(miss, math.log(4 * mu), slope=-5.0, low=-25.0, high=7.0, tolerance=1e-9)
    return math.exp(root) * (1 + 1e-8)


def grid_of_answers(answer_std: float, test_std: float | None) -> float:
    """Return the grid of the weights and the noise, for the smaller of both noises."""
    std = answer_std if test_std is None else min(answer_std, test_std)
    return 2.0 ** math.floor(math.log2(std * _GRID))


def make_pate_plan(
    owners: Owners,
    *,
    questions: int,
    answers: int,
    teachers: int = 250,
    method: str = "weight",
    threshold: float | None = None,
    test_share: float = 0.3,
    copies: int = 1,
    unit: str = "record",
) -> PatePlan:
    """Return a verified plan in which the answers of an ensemble stay within every budget.

    Args:
        owners: the owners, with their budgets and declared numbers of records.
        questions: the most public questions that may be asked.
        answers: the most of them that may be answered.
        teachers: number of teachers.
        method: "weight", "copies" or "uniform"; see `PatePlan`.
        threshold: answer only if the noised largest count reaches this number (Confident-GNMax);
            None answers every question (GNMax).
        test_share: fraction of mu^2 that pays for the tests, if there are any.
        copies: for "copies", the number of teachers that hold a record of the strictest class;
            others get more in proportion to their mu, rounded.
        unit: "record" or "owner"; with "owner", all records of an owner are with the same teachers.
    """
    problems = []
    if method not in METHODS:
        problems.append(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    if unit not in ("record", "owner"):
        problems.append(f"unit is {unit!r}; expected 'record' or 'owner'")
    whole = {"questions": questions, "answers": answers, "teachers": teachers, "copies": copies}
    problems += [
        f"{name} is {value!r}; expected a whole number of at least 1"
        for name, value in whole.items()
        if not (isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1)
    ]
    if not problems and answers > questions:
        problems.append(f"answers is {answers}; expected at most {questions}, the questions")
    if threshold is None and not problems and answers != questions:
        problems.append(
            f"answers is {answers} of {questions} questions without a threshold; expected as many "
            "answers as questions, because every question is answered"
        )
    if not 0 < test_share < 1:
        problems.append(f"test_share is {test_share!r}; expected a number between 0 and 1")
    if threshold is not None and not (
        isinstance(threshold, int | float) and math.isfinite(threshold)
    ):
        problems.append(f"threshold is {threshold!r}; expected a number of votes, or None")
    if owners.shared is not None:
        problems.append("records with several owners: expected one owner per record")
    if problems:
        raise PlanError(problems)
    mus = _mus(owners) * _SAFETY
    classes, of_class = _classes(mus)
    elements = np.ones(len(owners)) if unit == "owner" else np.maximum(owners.records, 1)
    held = np.bincount(classes, weights=elements, minlength=len(of_class))
    copied = np.ones(len(of_class), dtype=np.int64)
    weights = np.ones(len(of_class))
    first, count = np.zeros_like(copied), np.full(len(of_class), teachers)
    if method == "copies":
        copied = np.maximum(1, np.round(copies * of_class / of_class.min())).astype(np.int64)
    else:
        first, count = _parts(held, teachers)
    if method == "weight":
        weights = of_class * count.sum() / float(of_class @ count)
    if copied.max() > count.min():
        raise PlanError(
            f"a record would be with {copied.max()} teachers of {count.min()}: use more teachers, "
            "or fewer copies"
        )
    cost = float((of_class / (weights * copied)).min()) ** 2  # mu^2 of a mass of 1
    tests = 0.0 if threshold is None else test_share
    test_std = None if threshold is None else math.sqrt(questions / (tests * cost))
    answer_std = math.sqrt(2 * answers / ((1 - tests) * cost))
    grid = grid_of_answers(answer_std, test_std)
    plan = PatePlan(
        method=method,
        questions=int(questions),
        answers=int(answers),
        threshold=None if threshold is None else float(threshold),
        test_std=test_std,
        answer_std=answer_std,
        classes=classes,
        first=first,
        count=count,
        weights=np.floor(weights / grid) * grid,
        copies=copied,
        targets=owners.epsilon,
        deltas=owners.delta,
        unit=unit,
        owners=owners,
    )
    plan.verify()
    return plan


def _mus(owners: Owners) -> np.ndarray:
    pairs = np.stack([owners.epsilon, owners.delta])
    values, index = np.unique(pairs, axis=1, return_inverse=True)
    return np.array([gaussian_mu(e, d) for e, d in values.T.tolist()])[index.reshape(-1)]


def _classes(mus: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of every owner, and the smallest mu in each class."""
    values, index = np.unique(mus, return_inverse=True)
    if len(values) <= MOST_CLASSES:
        return index, values
    edges = np.geomspace(values[0], values[-1], MOST_CLASSES + 1)[:-1]
    number = np.searchsorted(edges, mus * (1 + 1e-12), side="right") - 1
    present, number = np.unique(number, return_inverse=True)
    return number, np.array([mus[number == at].min() for at in range(len(present))])


def _parts(held: np.ndarray, teachers: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the teachers among the classes by their declared numbers of records, one at least."""
    if len(held) > teachers:
        raise PlanError(f"{teachers} teachers for {len(held)} budget classes: use more teachers")
    ideal = held / held.sum() * teachers
    count = np.maximum(1, np.floor(ideal)).astype(np.int64)
    while count.sum() < teachers:
        count[np.argmax(ideal - count)] += 1
    while count.sum() > teachers:
        count[np.argmax(np.where(count > 1, count - ideal, -np.inf))] -= 1
    return np.append(0, np.cumsum(count)[:-1]), count
