"""Privacy filters: how much each record may spend if its cost in a step depends on earlier outputs.

With individual accounting, a record is charged for its own gradient norm, which depends on the
model, and therefore on everything released before. An accountant for fixed costs does not cover
that; a filter does. It fixes a limit on the sum of a record's costs in advance, and a record takes
part in a step only if its sum, including that step, stays within the limit.

All steps here are Gaussian mechanisms on all records: a record whose part of the sum has length at
most `d` is charged (d / s)^2, where s is the noise std. This module finds the largest limit L on
the sum of these squares for each (epsilon, delta).

- `gdp`: L = mu^2, where mu-Gaussian privacy is exactly (epsilon, delta). The log-likelihood ratio
  of the whole run is then dominated by that of N(mu, 1) and N(0, 1) (docs/proofs/individual.md;
  Smith, Thakurta 2022, "Fully Adaptive Composition for Gaussian Differential Privacy"). It is the
  largest possible limit.
- `zcdp`: L = 2 rho, where rho-zCDP implies (epsilon, delta) (Whitehouse, Ramdas, Rogers, Wu 2023).
- `rdp`: L = 2 B / a, where Renyi privacy B at the order a implies (epsilon, delta); the order is
  fixed in advance for each budget (Feldman, Zrnic 2021, "Individual Privacy Accounting via a Renyi
  Filter").
"""

from __future__ import annotations

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import log_ndtr, ndtr

FILTERS = ("gdp", "rdp", "zcdp")
"""Names of the filters; the first one is the default."""

_MU_RANGE = (1e-8, 400.0)
_BISECTIONS = 60
_MANY, _NODES = 4096, 2048
_NEAR, _FEW = 1e-5, 14  # bisections that are left if log mu is known to `_NEAR`
_EXCESS_ORDERS = np.geomspace(1e-3, 1e6, 721)
_AT_ONCE = 4096


def gaussian_delta(mu: np.ndarray | float, epsilon: np.ndarray | float) -> np.ndarray:
    """Return the smallest delta such that N(mu, 1) and N(0, 1) are (epsilon, delta)-close.

    Reference: Dong, Roth, Su (2022), "Gaussian Differential Privacy", Corollary 1.
    """
    mu, epsilon = np.asarray(mu, dtype=np.float64), np.asarray(epsilon, dtype=np.float64)
    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def filter_limits(name: str, epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the limit on the sum of squares for each budget, from below.

    Args:
        name: one of `FILTERS`.
        epsilon, delta: the budgets, one each per owner.
    """
    budgets, of_owner = np.unique(np.stack([epsilon, delta]), axis=1, return_inverse=True)
    found = gdp_limits(*budgets) if name == "gdp" else renyi_limits(*budgets)[0]
    return found[of_owner.reshape(-1)]


def gdp_limits(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return mu^2 for each budget, from below: `gaussian_delta` never exceeds delta.

    With many budgets, mu is first found for a few of each delta and interpolated, which only
    shortens the search: every result is checked.
    """
    low = np.full(len(epsilon), np.log(_MU_RANGE[0]))
    high = np.full(len(epsilon), np.log(_MU_RANGE[1]))
    for value in np.unique(delta) if len(epsilon) > _MANY else ():
        members = np.flatnonzero(delta == value)
        if len(members) <= _MANY:
            continue
        first, last = np.log([epsilon[members].min(), epsilon[members].max()])
        nodes = np.linspace(first, last, _NODES)
        at_nodes = _log_mu(np.exp(nodes), np.full(_NODES, value), *np.log(_MU_RANGE))
        guess = CubicSpline(nodes, at_nodes)(np.log(epsilon[members]))
        low[members], high[members] = guess - _NEAR, guess + _NEAR
    found = _log_mu(epsilon, delta, low, high, _FEW if len(epsilon) > _MANY else _BISECTIONS)
    if (missed := gaussian_delta(np.exp(found), epsilon) > delta).any():
        found[missed] = _log_mu(epsilon[missed], delta[missed], *np.log(_MU_RANGE))
    return np.exp(2 * found) * (1 - 1e-9)


def _log_mu(
    epsilon: np.ndarray,
    delta: np.ndarray,
    low: np.ndarray | float,
    high: np.ndarray | float,
    rounds: int = _BISECTIONS,
) -> np.ndarray:
    """Return the lower end of log mu after some bisections."""
    low, high = np.broadcast_to(low, epsilon.shape), np.broadcast_to(high, epsilon.shape)
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        fits = gaussian_delta(np.exp(middle), epsilon) <= delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.array(low)


def renyi_limits(epsilon: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 2 B / a for each budget, and the order a at which it is largest.

    A limit on the Renyi divergence of order a is B = epsilon - log((a-1)/a) + (log delta + log
    a)/(a-1). For Gaussian mechanisms without sampling, the divergence of order a is a/2 times the
    sum of squares, so the best order serves `rdp` and `zcdp` alike: rho = B / a.
    """
    order = 1 + _EXCESS_ORDERS
    limits, orders = np.empty(len(epsilon)), np.empty(len(epsilon))
    for start in range(0, len(epsilon), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        renyi = epsilon[part, None] - np.log1p(-1 / order)
        renyi += (np.log(delta[part, None]) + np.log(order)) / _EXCESS_ORDERS
        values = 2 * renyi / order
        best = values.argmax(axis=1)
        limits[part], orders[part] = values[np.arange(len(best)), best], order[best]
    return np.maximum(limits, 0.0) * (1 - 1e-9), orders
