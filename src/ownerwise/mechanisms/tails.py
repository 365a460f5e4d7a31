"""Functions that describe how importance falls from 1 to 0 over the tail of a batch.

A tail function f on [0, gamma] is non-increasing with values in [0, 1] (INO-SGD, Definition 3.2).
Here, a tail function is rescaled to the unit interval and measured from its END, which is
numerically more accurate: `rising(x)` = f(gamma - gamma x) for x in [0, 1], and `area(x)` is its
integral from 0 to x. Both functions are exact: the integral determines the weights, and a rounded
lookup table could push a weight above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import betainc


class Tail(Protocol):
    """A non-decreasing function on [0, 1] with values in [0, 1], and its exact integral."""

    def rising(self, x: np.ndarray) -> np.ndarray:
        """Return the importance at a distance of x tail lengths from the end of the tail."""
        ...

    def area(self, x: np.ndarray) -> np.ndarray:
        """Return the integral of `rising` from 0 to x."""
        ...


@dataclass(frozen=True)
class Beta:
    """The reversed distribution function of Beta(alpha, beta).

    A larger alpha gives the tail less weight, and a larger beta gives it more; alpha = beta = 1 is
    a straight line. The integral has a closed form: x I_x(a, b) - a/(a+b) I_x(a+1, b).
    """

    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self):
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive finite number, got {value}")

    def rising(self, x: np.ndarray) -> np.ndarray:
        """Return I_x(alpha, beta)."""
        if self.alpha == self.beta == 1:
            return np.asarray(x, dtype=np.float64)
        return betainc(self.alpha, self.beta, x)

    def area(self, x: np.ndarray) -> np.ndarray:
        """Return the integral of I_u(alpha, beta) from 0 to x."""
        if self.alpha == self.beta == 1:
            return 0.5 * np.square(x)
        a, b = self.alpha, self.beta
        return np.maximum(x * betainc(a, b, x) - a / (a + b) * betainc(a + 1, b, x), 0.0)


class Steps:
    """A step function with steps of equal width, given by its values from the start of the tail.

    `Steps()` has the paper's values 1/2, 1/4, 1/8, 0. `Steps.of(function)` turns any function into
    a piecewise constant one, so that the checks and the integral apply to exactly the function
    used.
    """

    def __init__(self, values: Sequence[float] = (1 / 2, 1 / 4, 1 / 8, 0.0)):
        try:
            falling = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            falling = np.zeros(0)
        if falling.ndim != 1 or not len(falling):
            raise ValueError(f"expected a list of at least one value, got {values!r}")
        if not ((falling >= 0) & (falling <= 1)).all():
            raise ValueError(
                f"importance must be in [0, 1], got {falling.min()} to {falling.max()}"
            )
        if (np.diff(falling) > 0).any():
            at = int(np.argmax(np.diff(falling) > 0))
            raise ValueError(
                f"importance must not rise along the tail: {falling[at]:g} is followed by "
                f"{falling[at + 1]:g}"
            )
        self._rising = falling[::-1].copy()
        self._areas = np.concatenate([[0.0], np.cumsum(self._rising)]) / len(falling)

    @classmethod
    def of(cls, function: Callable[[float], float], pieces: int = 1000) -> Steps:
        """Return a step function that approximates `function` on [0, 1]; the tail starts at 0."""
        middles = (np.arange(pieces) + 0.5) / pieces
        return cls([float(function(float(x))) for x in middles])

    @property
    def values(self) -> np.ndarray:
        """Values of the steps, from the start of the tail to its end."""
        return self._rising[::-1].copy()

    def rising(self, x: np.ndarray) -> np.ndarray:
        """Return the value of the step that contains x."""
        return self._rising[self._piece(x)]

    def area(self, x: np.ndarray) -> np.ndarray:
        """Return the integral of the steps from 0 to x."""
        piece = self._piece(x)
        count = len(self._rising)
        return self._areas[piece] + self._rising[piece] * (np.asarray(x) - piece / count)

    def _piece(self, x: np.ndarray) -> np.ndarray:
        count = len(self._rising)
        return np.clip(np.floor(np.asarray(x) * count), 0, count - 1).astype(np.int64)

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:g}" for value in self.values[:5])
        return f"Steps([{shown}{', ...' if len(self._rising) > 5 else ''}])"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steps) and np.array_equal(self._rising, other._rising)

    def __hash__(self) -> int:
        return hash(self._rising.tobytes())
