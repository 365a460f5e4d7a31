"""Train under rate constraints, with a penalty computed from a noised histogram of predictions.

Formal guarantee (docs/proofs/raco.md): each record adds its class probabilities to one cell of the
histogram, so it changes the histogram by at most 1 in L1 and L2 norm. With the noise that the plan
accounts for, the histogram is a private release; rates, multipliers and prices are computed from
the histogram alone, at no additional privacy cost. Given the prices, a record's loss depends on
that record only, so the clipped gradients have their usual sensitivity. The partition's rule, the
constraints and all options are public; a record's cell is private.

Based on "Private Rate-Constrained Optimization with Applications to Fair Learning" (RaCO-DP, 2026).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.batches import described
from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.mechanisms.constraints.rates import Constraint, Rate, flattened
from ownerwise.mechanisms.losses import Loss, per_record
from ownerwise.mechanisms.plugs import Cells, Release

if TYPE_CHECKING:
    from ownerwise.planning import Plan

_OUTPUT_ROUNDOFFS = 64.0  # rounding of an output: 8 relative roundoffs, for outputs up to 8


class RateConstraints(Release):
    """Rate constraints and their multipliers, as an adaptive release in the private step.

    Every step releases the noised sum of class probabilities per cell and class. The rates computed
    from this histogram raise or lower the multipliers (which stay in [0, cap]), and the multipliers
    set the price of predicting class k in cell c. The price of a record's prediction is added to
    its loss.

    Args:
        constraints: one constraint, or a list of constraints, which may contain further lists.
        ascent: step size of the multipliers.
        damping: weight with which a constraint's excess over its bound in the last step is added to
            its multiplier. Damping keeps the model and the multipliers from oscillating; 0 is plain
            gradient ascent.
        cap: largest multiplier.
        temperature: factor applied to the outputs in the softmax that represents the prediction.
        hard: count predicted classes instead of probabilities in the histogram. This requires a
            hardened plan, because a rounding error in an output can change the predicted class.
        smoothing: weight of past steps in the denominators that do not depend on the model; with 0,
            only the current step is used.
        floor: smallest denominator, as a fraction of the value it would have if all cells had equal
            size.

    Example:
        >>> import ownerwise as ow
        >>> part = ow.Partition({"sex": ("F", "M")}, classes=2)
        >>> fair = RateConstraints(ow.constraints.demographic_parity(part, "sex", max_gap=0.05))
        >>> owners = ow.Owners(range(4000), 2.0)
        >>> plan = ow.plan(owners, "uniform", steps=20, batch_size=1000, constraints=fair)

        To train with these constraints, call `ow.Trainer(model, plan, lr=1.0, constraints=fair)`.
    """

    planned_with = "the same constraints, ow.plan(..., constraints=)"

    def __init__(
        self,
        constraints: Constraint | Sequence[Any],
        *,
        ascent: float = 0.4,
        damping: float = 4.0,
        cap: float = 10.0,
        temperature: float = 1.0,
        hard: bool = False,
        smoothing: float = 0.9,
        floor: float = 0.05,
    ):
        self.constraints = flattened(constraints)
        self.partition = self.constraints[0].partition
        self.shape = self.partition.shape  # cells, classes
        self.options = {
            "ascent": ascent, "damping": damping, "cap": cap, "temperature": temperature,
            "hard": hard, "smoothing": smoothing, "floor": floor,
        }  # fmt: skip
        problems = Problems(
            f"{name}={self.options[name]}: expected a positive finite number"
            for name in ("ascent", "cap", "temperature", "floor")
            if not 0 < self.options[name] < math.inf
        )
        if not 0 <= damping < math.inf:
            problems.add(f"damping={damping}: expected a finite number of at least 0")
        if not 0 <= smoothing < 1:
            problems.add(f"smoothing={smoothing}: expected a number of at least 0 and below 1")
        problems.raise_()
        terms = [term for constraint in self.constraints for term in constraint.expression.terms]
        rates = list({id(rate): rate for _, rate in terms}.values())
        self._numerators = _rows([rate.numerator for rate in rates])
        self._denominators = _rows([rate.denominator for rate in rates])
        self._fixed = np.array([rate.fixed_base for rate in rates])
        self._weights = np.array([_coefficients(c, rates) for c in self.constraints])
        self._constants = np.array([c.expression.constant for c in self.constraints])
        self._bounds = np.array([c.bound for c in self.constraints])
        self._signs = np.array([1.0 if c.sense == "≤" else -1.0 for c in self.constraints])
        self._plan: Plan | None = None
        self._mass = math.nan  # expected total of the histogram
        self._floors = np.full(len(rates), math.nan)  # smallest denominators
        self._state = {
            "multipliers": np.zeros(len(self.constraints)),
            "raised": np.zeros(len(self.constraints)),  # multipliers without damping
            "denominators": np.zeros(len(rates)),  # exponentially weighted sums over steps
            "values": np.zeros(len(self.constraints)),
            "noise": np.zeros(len(self.constraints)),
            "steps": np.zeros(1),
        }

    @property
    def names(self) -> list[str]:
        """Names of the constraints."""
        return [constraint.name for constraint in self.constraints]

    @property
    def multipliers(self) -> np.ndarray:
        """The current multiplier for each constraint."""
        return self._state["multipliers"].copy()

    def bind(self, plan: Plan) -> Self:
        """Return a copy of these constraints in its initial state, for a run under the plan."""
        bound = copy.copy(self)
        bound._state = {name: np.zeros_like(value) for name, value in self._state.items()}
        bound._plan = plan
        of = plan.holders
        scales = 1.0 if of.release_shares is None else of.release_shares
        bound._mass = float((of.sampling_rates * scales) @ of.elements)
        bound._floors = self.options["floor"] * bound._mass * self._denominators.mean(axis=1)
        return bound

    def output_slack(self, roundoff: float) -> float:
        """Return how much rounding can change the histogram in L1 norm, per record in the batch.

        Probabilities change by at most the temperature times the largest change in an output, which
        is assumed to be 8 unit roundoffs of an output of magnitude 8. A rounding error in an output
        can change the predicted class, so there is no bound for `hard=True`.
        """
        if self.options["hard"]:
            return math.inf
        return self.options["temperature"] * _OUTPUT_ROUNDOFFS * roundoff

    def contributions(self, outputs: Tensor, targets: Tensor) -> Cells:
        """Return the class probabilities that each record adds to its cell in the histogram."""
        self._check(outputs, targets)
        if self.options["hard"]:
            counts = functional.one_hot(outputs.argmax(dim=1), self.shape[1]).double()
        else:
            counts = self._probabilities(outputs, torch.float64).T
        return Cells(counts, targets[:, 1])

    def process(self, noised: Tensor) -> Tensor:
        """Update the multipliers from a noised histogram and return the resulting prices.

        Prices [cells, classes] are the derivative of sum_j multiplier_j * rate_j with respect to a
        record's class probabilities, multiplied by the histogram's expected total. This factor
        roughly offsets the division by the expected batch size. In every cell, the lowest price is
        0: a constant for all classes has no gradient, because probabilities sum to 1, and negative
        prices would cancel against the loss, which magnifies its rounding error.
        """
        assert self._plan is not None
        assert self._plan.release_std is not None
        state, cap = self._state, self.options["cap"]
        histogram = noised.double().cpu().numpy().ravel()
        state["steps"] += 1
        bases = self._bases(self._denominators @ histogram)
        rates = np.minimum(np.maximum(self._numerators @ histogram / bases, 0.0), 1.0)
        state["values"] = self._weights @ rates + self._constants
        excess = self._signs * (state["values"] - self._bounds)
        raised = state["raised"] + self.options["ascent"] * excess
        state["raised"] = raised = np.minimum(np.maximum(raised, 0.0), cap)
        damped = raised + self.options["damping"] * excess
        state["multipliers"] = np.minimum(np.maximum(damped, 0.0), cap)
        # derivative of each constraint with respect to each sum of counts
        per_count = self._weights / bases
        slopes = per_count @ self._numerators - (per_count * rates) @ self._denominators
        state["noise"] = self._plan.release_std * np.sqrt((slopes * slopes).sum(axis=1))
        prices = ((self._mass * self._signs * state["multipliers"]) @ slopes).reshape(self.shape)
        prices -= prices.min(axis=1, keepdims=True)
        return torch.from_numpy(prices).to(noised.device)

    def _bases(self, counts: np.ndarray) -> np.ndarray:
        """Return the denominators, smoothed if independent of the model, and bounded from below."""
        smoothing = self.options["smoothing"]
        past = self._state["denominators"]
        past[:] = smoothing * past + (1 - smoothing) * counts
        smoothed = past / (1 - smoothing ** float(self._state["steps"][0]))
        return np.maximum(np.where(self._fixed, smoothed, counts), self._floors)

    def penalised(self, loss: Loss) -> PenalisedLoss:
        """Return `loss` plus the price of each record's prediction."""
        return PenalisedLoss(loss, self)

    def record(self) -> dict[str, Any] | None:
        """Return the noised values, noise std and multipliers from the last step, if any."""
        if not self._state["steps"]:
            return None
        return {
            name: dict(zip(self.names, self._state[name].tolist(), strict=True))
            for name in ("values", "noise", "multipliers")
        }

    def measure(self, predicted: np.ndarray, cells: np.ndarray) -> dict[str, float | None]:
        """Return each constraint's value for predicted classes, without noise (NOT private)."""
        histogram = np.zeros(self.shape)
        np.add.at(histogram, (cells, predicted), 1.0)
        return {constraint.name: constraint.value(histogram) for constraint in self.constraints}

    def settings(self) -> dict[str, Any]:
        """Return the constraints and options as JSON types."""
        listed = [{"name": c.name, "sense": c.sense, "bound": c.bound} for c in self.constraints]
        columns = {name: list(map(str, v)) for name, v in self.partition.columns.items()}
        return {"constraints": listed, "partition": columns, **self.options}

    def state(self) -> dict[str, Any]:
        """Return the state for the next step: multipliers and smoothed denominators."""
        return {name: value.tolist() for name, value in self._state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""
        stored, expected = (
            {name: len(values) for name, values in entries.items()}
            for entries in (state, self._state)
        )
        if stored != expected:
            raise OwnerwiseError(
                f"the stored state belongs to different constraints ({stored}); expected "
                f"{expected}: use the constraints of the original run"
            )
        self._state = {name: np.array(values, dtype=np.float64) for name, values in state.items()}

    def _probabilities(self, outputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return probabilities as [classes, records], because softmax is slow along short rows."""
        temperature = self.options["temperature"]
        scores = outputs.T if temperature == 1 else temperature * outputs.T
        return functional.softmax(scores, dim=0, dtype=dtype)

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.dim() != 2 or targets.shape[1] != 2 or targets.dtype != torch.int64:
            raise OwnerwiseError(
                f"targets are {described(targets)}; expected int64 [records, 2], class and cell: "
                "create them with partition.targets(labels, columns)"
            )
        if outputs.dim() != 2 or outputs.shape[1] != self.shape[1]:
            raise OwnerwiseError(
                f"outputs are {described(outputs)}; expected [records, {self.shape[1]}], one "
                "output for each class of the partition"
            )


class PenalisedLoss:
    """A per-record loss plus the price of the prediction; the loss alone if there are no prices."""

    def __init__(self, loss: Loss, constraints: RateConstraints):
        self.plain = loss
        self.cells = constraints.shape[0]
        self._losses = per_record(loss)
        self._constraints = constraints

    def __call__(self, outputs: Tensor, targets: Tensor, prices: Tensor | None = None) -> Tensor:
        """Return one loss per record."""
        self._constraints._check(outputs, targets)
        if prices is None:
            return self._losses(outputs, targets[:, 0])
        if self.plain is functional.cross_entropy and self._constraints.options["temperature"] == 1:
            logs = functional.log_softmax(outputs.T, dim=0)  # for loss and probabilities
            losses = functional.nll_loss(logs.T, targets[:, 0], reduction="none")
            probabilities = logs.exp()
        else:
            losses = self._losses(outputs, targets[:, 0])
            probabilities = self._constraints._probabilities(outputs)
        own_prices = prices.to(probabilities).T.index_select(1, targets[:, 1])
        return losses + (own_prices * probabilities).sum(dim=0)


def _rows(masks: list[np.ndarray]) -> np.ndarray:
    return np.array([mask.ravel() for mask in masks], dtype=np.float64)


def _coefficients(constraint: Constraint, rates: list[Rate]) -> list[float]:
    coefficients = [0.0] * len(rates)
    for weight, term in constraint.expression.terms:
        coefficients[[id(rate) for rate in rates].index(id(term))] += weight
    return coefficients
