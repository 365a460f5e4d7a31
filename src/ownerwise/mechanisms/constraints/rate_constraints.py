"""Training under rate constraints: a noised histogram of predictions prices every record's loss.

Formal guarantee (docs/proofs/raco.md): each record adds its predicted shares to one cell of the
histogram, so it moves the histogram by at most 1 in sum and in length. With the noise that the plan
pays for, the histogram is a private release; rates, multipliers and prices are computed from it
alone and cost nothing further. Given the prices, the loss of a record depends on that record only,
so the clipped gradients have their usual sensitivity. Public: the partition's rule, the
constraints, all options. Private: the cell of a record.

After "Private Rate-Constrained Optimization with Applications to Fair Learning" (RaCO-DP, 2026).
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

from ownerwise.batches import (
    described,
)
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.constraints.rates import Constraint, Rate, flattened
from ownerwise.mechanisms.losses import Loss, per_record
from ownerwise.mechanisms.plugs import SummedRelease

if TYPE_CHECKING:
    from ownerwise.planning import (
        Plan,
    )


class RateConstraints(SummedRelease):
    """Constraints with their multipliers: a release of the private step that learns from itself.

    Every step releases the noised sum of predicted shares per cell and class. It gives the rates,
    these raise or lower the multipliers (which stay in [0, cap]), and those price a prediction of
    class k in cell c: a record's loss becomes its own loss plus the price of its prediction.

    Args:
        constraints: one constraint or several, nested as they come.
        ascent: step size of the multipliers.
        damping: how far a multiplier follows the last step's excess besides, times that excess. It
            keeps model and multipliers from swinging; 0 is plain ascent.
        cap: largest multiplier.
        temperature: factor on the outputs inside of the softmax that stands for the prediction.
        hard: count predicted classes instead of shares in the histogram.
        smoothing: weight of the past in the denominators that do not depend on the model; 0 takes
            each step's own.
        floor: least denominator, as a share of what cells of equal size would hold.

    Example:
        >>> import ownerwise as ow
        >>> part = ow.Partition({"sex": ("F", "M")}, classes=2)
        >>> fair = RateConstraints(ow.constraints.demographic_parity(part, "sex", max_gap=0.05))
        >>> owners = ow.Owners(range(4000), 2.0)
        >>> plan = ow.plan(owners, "uniform", steps=20, batch_size=1000, constraints=fair)

        Then train with it: `ow.Trainer(model, plan, lr=1.0, constraints=fair)`.
    """

    release_share = 0.1  # of a step's cost, unless the plan states otherwise

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
        self.options = {
            "ascent": ascent, "damping": damping, "cap": cap, "temperature": temperature,
            "hard": hard, "smoothing": smoothing, "floor": floor,
        }  # fmt: skip
        problems = [
            f"{name}={self.options[name]}: expected a positive finite number"
            for name in ("ascent", "cap", "temperature", "floor")
            if not 0 < self.options[name] < math.inf
        ]
        if not 0 <= damping < math.inf:
            problems.append(f"damping={damping}: expected a finite number of at least 0")
        if not 0 <= smoothing < 1:
            problems.append(f"smoothing={smoothing}: expected 0 to below 1")
        if problems:
            raise OwnerwiseError(problems)
        rates = list(
            {id(r): r for one in self.constraints for _, r in one.expression.terms}.values()
        )
        self._numerators = _rows([rate.numerator for rate in rates])
        self._denominators = _rows([rate.denominator for rate in rates])
        self._fixed = np.array([rate.fixed_base for rate in rates])
        self._weights = np.array([_coefficients(one, rates) for one in self.constraints])
        self._constants = np.array([one.expression.constant for one in self.constraints])
        self._bounds = np.array([one.bound for one in self.constraints])
        self._signs = np.array([1.0 if one.sense == "≤" else -1.0 for one in self.constraints])
        self._plan: Plan | None = None
        self._mass = math.nan  # expected total of the histogram: what all records add on average
        self._floors = np.full(len(rates), math.nan)  # least denominators
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
        return [one.name for one in self.constraints]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the histogram: cells, classes."""
        return self.partition.shape

    @property
    def multipliers(self) -> np.ndarray:
        """The multiplier of every constraint now."""
        return self._state["multipliers"].copy()

    def bind(self, plan: Plan) -> Self:
        """Return these constraints at the start of a run of the plan."""
        bound = copy.copy(self)
        bound._state = {name: np.zeros_like(value) for name, value in self._state.items()}
        bound._plan = plan
        shares = 1.0 if plan.release_shares is None else plan.release_shares
        bound._mass = float((plan.sampling_rates * shares) @ plan.records)
        bound._floors = self.options["floor"] * bound._mass * self._denominators.mean(axis=1)
        return bound

    def contributions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what every record adds to the histogram: its shares in its cell."""
        self._check(outputs, targets)
        shares = self._shares_by_class(outputs).T
        if self.options["hard"]:
            shares = functional.one_hot(shares.argmax(dim=1), self.shape[1]).to(shares)
        cells = targets[:, 1, None, None].expand(-1, 1, self.shape[1])
        return shares.new_zeros(len(outputs), *self.shape).scatter_(1, cells, shares[:, None])

    def total(self, outputs: Tensor, targets: Tensor, shares: Tensor | None) -> Tensor:
        """Return the histogram of a batch, the sum of its contributions times `shares`, float64.

        A record's shares add up to 1 within float64's precision, so that no row need be cut.
        """
        self._check(outputs, targets)
        if self.options["hard"]:
            counts = functional.one_hot(outputs.argmax(dim=1), self.shape[1]).T.double()
        else:
            counts = self._shares_by_class(outputs, torch.float64)
        if shares is not None:
            counts = counts * shares.to(counts)
        found = _sum_by_cell(counts, targets[:, 1], self.shape[0])
        if not math.isfinite(float(found.sum())):  # one call in the common case
            counts = torch.where(torch.isfinite(counts).all(dim=0), counts, 0.0)
            found = _sum_by_cell(counts, targets[:, 1], self.shape[0])
        return found

    def process(self, noised: Tensor) -> Tensor:
        """Raise or lower the multipliers by a noised histogram, and return the prices it makes.

        Prices [cells, classes] are the derivative of sum_j multiplier_j * rate_j to a record's
        predicted shares, times the histogram's expected total: the loss is divided by about that.
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
        per_count = self._weights / bases  # of every constraint to every sum of counts
        slopes = per_count @ self._numerators - (per_count * rates) @ self._denominators
        state["noise"] = self._plan.release_std * np.sqrt((slopes * slopes).sum(axis=1))
        prices = (self._mass * self._signs * state["multipliers"]) @ slopes
        return torch.from_numpy(prices.reshape(self.shape)).to(noised.device)

    def _bases(self, counts: np.ndarray) -> np.ndarray:
        """Return the denominators: smoothed where they do not depend on the model, floored."""
        smoothing = self.options["smoothing"]
        past = self._state["denominators"]
        past[:] = smoothing * past + (1 - smoothing) * counts
        smoothed = past / (1 - smoothing ** float(self._state["steps"][0]))
        return np.maximum(np.where(self._fixed, smoothed, counts), self._floors)

    def penalised(self, loss: Loss) -> PenalisedLoss:
        """Return `loss` plus the price of each record's prediction, for the private step."""
        return PenalisedLoss(loss, self)

    def record(self) -> dict[str, Any] | None:
        """Return values (noised), their noise, and multipliers of the last step; None before it."""
        if not self._state["steps"]:
            return None
        return {
            name: dict(zip(self.names, self._state[name].tolist(), strict=True))
            for name in ("values", "noise", "multipliers")
        }

    def measure(self, predicted: np.ndarray, cells: np.ndarray) -> dict[str, float | None]:
        """Return every constraint's value on predicted classes. NOT private: no noise is added."""
        histogram = np.zeros(self.shape)
        np.add.at(histogram, (cells, predicted), 1.0)
        return {one.name: one.value(histogram) for one in self.constraints}

    def describe(self) -> dict[str, Any]:
        """Return constraints and options as JSON types."""
        listed = [{"name": c.name, "sense": c.sense, "bound": c.bound} for c in self.constraints]
        columns = {name: list(map(str, v)) for name, v in self.partition.columns.items()}
        return {"constraints": listed, "partition": columns, **self.options}

    def state(self) -> dict[str, Any]:
        """Return what the next step needs: multipliers and smoothed denominators."""
        return {name: value.tolist() for name, value in self._state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a stored state."""
        lengths = [{n: len(values) for n, values in one.items()} for one in (state, self._state)]
        if lengths[0] != lengths[1]:
            raise OwnerwiseError(
                f"the stored state is of other constraints ({lengths[0]}); expected {lengths[1]}: "
                "give the constraints of the run"
            )
        self._state = {name: np.array(values, dtype=np.float64) for name, values in state.items()}

    def _shares_by_class(self, outputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return predicted shares [classes, records]: along rows of few classes softmax is slow."""
        temperature = self.options["temperature"]
        scores = outputs.T if temperature == 1 else temperature * outputs.T
        return functional.softmax(scores, dim=0, dtype=dtype)

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.dim() != 2 or targets.shape[1] != 2 or targets.dtype != torch.int64:
            raise OwnerwiseError(
                f"targets are {described(targets)}; expected int64 [records, 2], class and cell: "
                "make them with partition.targets(labels, columns)"
            )
        if outputs.dim() != 2 or outputs.shape[1] != self.shape[1]:
            raise OwnerwiseError(
                f"outputs are {described(outputs)}; expected [records, {self.shape[1]}], one per "
                "class of the partition"
            )


class PenalisedLoss:
    """A per-record loss plus the price of the record's prediction; without prices, the loss."""

    def __init__(self, loss: Loss, constraints: RateConstraints):
        self.plain = loss
        self.cells = constraints.shape[0]
        self._losses = per_record(loss)
        self._constraints = constraints

    def __call__(self, outputs: Tensor, targets: Tensor, prices: Tensor | None = None) -> Tensor:
        """Return one number per record."""
        self._constraints._check(outputs, targets)
        if prices is None:
            return self._losses(outputs, targets[:, 0])
        if self.plain is functional.cross_entropy and self._constraints.options["temperature"] == 1:
            logs = functional.log_softmax(outputs.T, dim=0)  # cross-entropy and shares at once
            losses = functional.nll_loss(logs.T, targets[:, 0], reduction="none")
            shares = logs.exp()
        else:
            losses = self._losses(outputs, targets[:, 0])
            shares = self._constraints._shares_by_class(outputs)
        own = prices.to(shares).T.index_select(1, targets[:, 1])
        return losses + (own * shares).sum(dim=0)


def _sum_by_cell(counts: Tensor, cells: Tensor, size: int) -> Tensor:
    """Return [cells, classes] of counts [classes, records]."""
    return counts.new_zeros(len(counts), size).index_add_(1, cells, counts).T


def _rows(masks: list[np.ndarray]) -> np.ndarray:
    return np.array([mask.ravel() for mask in masks], dtype=np.float64)


def _coefficients(constraint: Constraint, rates: list[Rate]) -> list[float]:
    found = [0.0] * len(rates)
    for weight, term in constraint.expression.terms:
        found[[id(rate) for rate in rates].index(id(term))] += weight
    return found
