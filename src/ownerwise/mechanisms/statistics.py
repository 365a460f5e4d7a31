"""Column statistics: scale and impute the columns of a table by a release that the plan pays for.

Each numeric column has a declared range, which is mapped to [-1, 1]. Before training, the number of
known values of every column, their sum and their sum of squares are released with noise, once. They
give the mean and the standard deviation by which a layer in front of the network standardises the
columns; a missing value becomes the mean. Everything else is post-processing.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.accounting import OpeningRelease, gaussian_mu
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.plugs import Plug
from ownerwise.planning import Plan

_COUNT_WEIGHT = math.sqrt(0.5)  # of a known value, relative to its sums: a count is easy to measure
_LONGEST = 1 + _COUNT_WEIGHT**2  # squared norm of what a record adds for one column
_CLEAR = 4.0  # standard deviations of noise above which a count is believed
_CAUTION = 2.0  # standard errors by which a variance is overstated
_LEAST_VARIANCE = 1e-6
_TOO_NOISY = 0.1  # noise on a mean, as a fraction of half the range
_FARTHEST = 5.0  # standard deviations from the mean at which standardised values are clipped


class Standardise(nn.Module):
    """Standardises the numeric columns of a table, in front of a network.

    Its inputs are `numbers` columns, scaled from declared ranges to [-1, 1], then one 0/1 column
    for each of them that says whether the value is missing, then any other columns. A known value
    becomes (value - mean) * scale, clipped to at most 5 in absolute value; a missing one becomes 0.
    All other columns are passed on.

    The mean and the scale are buffers, stored with the model. They are 0 and 1 until the private
    step sets them from the release that its plan accounts for (`plan(..., statistics=)`).
    """

    mean: Tensor
    scale: Tensor
    released: Tensor

    def __init__(self, numbers: int):
        super().__init__()
        if numbers < 1:
            raise OwnerwiseError(f"Standardise({numbers}): expected at least one column of numbers")
        self.numbers = int(numbers)
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("scale", torch.ones(numbers))
        self.register_buffer("released", torch.tensor(False))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs with standardised numbers."""
        values, others = inputs[:, : self.numbers], inputs[:, self.numbers :]
        known = 1 - others[:, : self.numbers]
        standardised = ((values - self.mean) * self.scale).clamp(-_FARTHEST, _FARTHEST)
        return torch.cat([standardised * known, others], dim=1)

    def contributions(self, inputs: Tensor) -> Tensor:
        """Return what each record adds to the release: float64 [records, 3 * numbers], norm <= 1.

        For a known value v of a column, these are (c, v, 1 - v^2) / sqrt((1 + c^2) * numbers), with
        c^2 = 1/2; for a missing one, zeros. Because v^2 + (1 - v^2)^2 <= 1 for |v| <= 1, the norm
        is at most 1 whatever the inputs contain. Every operation is exact or correctly rounded for
        each record by itself, so a record's row does not depend on the other rows.
        """
        values = inputs[:, : self.numbers].double()
        missing = inputs[:, self.numbers : 2 * self.numbers]
        known = (missing == 0) & torch.isfinite(values)
        v = values.where(known, torch.zeros_like(values)).clamp(-1, 1)
        one = known.double()
        parts = torch.cat([_COUNT_WEIGHT * one, v, one - v * v], dim=1)
        return parts * (1 / math.sqrt(_LONGEST * self.numbers))


@dataclass(eq=False)
class ColumnStatistics(Plug):
    """Pay for the mean and standard deviation of every numeric column: `plan(..., statistics=)`.

    Formal guarantee: every record adds a vector of L2 norm at most 1 to one sum over all records,
    which is released once, before training, with Gaussian noise of std `plan.opening_std`. With
    unit "owner", a record's vector is divided by the number of the owner's records, so all of them
    together add a vector of norm at most 1. The plan accounts for the sum as a Gaussian mechanism
    without sampling (docs/proofs/statistics.md). The declared ranges, the number of columns and the
    declared numbers of records are public.

    The noise is what the strictest owner can pay for; everyone pays the same. The more columns, the
    noisier each of them: declare few, or keep `scale="ranges"` if the budgets are small.

    Attributes:
        share: fraction of the strictest owner's budget that is spent on the release, in terms of
            the squared mu of Gaussian differential privacy.
    """

    share: float = 0.05
    _std: float = field(default=math.nan, repr=False)
    _total: float = field(default=math.nan, repr=False)  # what all known values would count
    _sums: list[list[float]] = field(default_factory=list, repr=False)

    def __post_init__(self):
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not (number and 0 < self.share < 1):
            raise OwnerwiseError(
                f"statistics.share {self.share!r}: expected more than 0 and less than 1"
            )

    def opening(self, epsilon: np.ndarray, delta: np.ndarray, unit: str) -> OpeningRelease:
        """Return the release whose noise spends the share of the strictest budget."""
        mus = [gaussian_mu(float(epsilon[delta == d].min()), float(d)) for d in np.unique(delta)]
        std = 1 / (math.sqrt(self.share) * min(mus))
        return OpeningRelease(std, together=unit == "owner")

    def bind(self, plan: Plan) -> Self:
        """Return the statistics in their initial state, with the plan's noise."""
        assert plan.opening_std is not None
        bound = copy.copy(self)
        bound._std, bound._sums = plan.opening_std, []
        owners = int((plan.records > 0).sum())
        bound._total = float(owners if plan.unit == "owner" else plan.total_records)
        return bound

    def concerns(self, columns: int) -> list[str]:
        """Return the reason why the release cannot be of use for so many columns, if there is one.

        It follows from the plan, to which the statistics are bound, and so from public numbers.
        """
        noise = self._std * math.sqrt(_LONGEST * columns) / self._total
        if noise <= _TOO_NOISY:
            return []
        return [
            f"the noise on the mean of a column is {noise:.2g} times half its declared range "
            f"(useful: at most {_TOO_NOISY:g}), so the statistics of {columns} columns tell little "
            "and cost part of the budgets: leave out plan.statistics, or declare fewer columns"
        ]

    @property
    def released(self) -> bool:
        """Whether the release has been made."""
        return bool(self._sums)

    def observe(self, noised: Tensor, layer: Standardise) -> None:
        """Store the noised sum, [3 * numbers], and set the layer's mean and scale."""
        self._sums = noised.double().reshape(3, layer.numbers).tolist()
        _, mean, deviation = self.estimates()
        with torch.no_grad():
            layer.mean.copy_(torch.from_numpy(mean))
            layer.scale.copy_(torch.from_numpy(1 / deviation))
            layer.released.fill_(True)

    def estimates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each column's number of known values, mean and standard deviation in [-1, 1].

        A mean is shrunk towards the middle of the range, as far as it may be noise, and a variance
        is overstated by two standard errors (at most 1), so noise is rarely magnified. A column
        whose number of known values is not clearly above its noise keeps its declared range: mean 0
        and standard deviation 1.
        """
        sums = np.array(self._sums)
        noise = self._std * math.sqrt(_LONGEST * sums.shape[1])  # on the sums of v and 1 - v^2
        known, total, rest = sums * math.sqrt(_LONGEST * sums.shape[1])
        known = np.minimum(known / _COUNT_WEIGHT, self._total)
        clear = known > _CLEAR * noise / _COUNT_WEIGHT
        count = np.where(clear, known, 1.0)
        mean = np.clip(total / count, -1, 1)
        error = noise / count * np.sqrt(1 + (mean / _COUNT_WEIGHT) ** 2)
        variance = np.clip(1 - rest / count, 0, 1) - mean**2
        variance += _CAUTION * error * np.sqrt(1 + 4 * mean**2)
        deviation = np.sqrt(np.clip(variance, _LEAST_VARIANCE, 1))
        mean = mean**3 / (mean**2 + error**2)
        return known, np.where(clear, mean, 0.0), np.where(clear, deviation, 1.0)

    def state(self) -> dict[str, Any]:
        """Return the noised sums."""
        return {"sums": self._sums}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the release that was made before."""
        sums = np.array(state["sums"], dtype=float)
        if sums.ndim != 2 or len(sums) != 3 or not np.isfinite(sums).all():
            raise ValueError("expected the finite noised sums of the release")
        self._sums = sums.tolist()

    def settings(self) -> dict[str, Any]:
        """Return the class name; the share is in the plan."""
        return {"kind": type(self).__name__}

    def record(self) -> dict[str, Any]:
        """Return what was released, in units of the declared ranges, as JSON types."""
        known, mean, deviation = (values.tolist() for values in self.estimates())
        return {"std": self._std, "known": known, "mean": mean, "deviation": deviation}


def as_statistics(given: Any) -> Any:
    """Return the statistics that true, or a table with options, describes; else `given`."""
    if given is True or given is False:
        return ColumnStatistics() if given else None
    if not isinstance(given, dict):
        return given
    if unknown := given.keys() - {"share"}:
        raise OwnerwiseError(
            f"statistics.{min(unknown)} is unknown; the only option is share, such as "
            "statistics = { share = 0.05 }"
        )
    return ColumnStatistics(**given)


def standardising_layers(model: nn.Module) -> list[Standardise]:
    """Return the layers of a model that standardise its columns.

    A derived class might contribute more than the plan accounts for, so it is not one of them.
    """
    return [module for module in model.modules() if type(module) is Standardise]
