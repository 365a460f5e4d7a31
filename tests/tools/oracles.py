"""Slow or foreign ways to the same figures, for tests only."""

import warnings

import numpy as np
from opacus.accountants import PRVAccountant
from scipy.integrate import quad
from scipy.optimize import minimize_scalar


def prv_epsilon(rate, multiplier, steps, delta, target=1.0):
    """Opacus' PRV accountant: its estimate. Its bounds lie `eps_error` around, its mesh follows."""
    error = max(1e-4, min(0.01, 0.01 * target))
    accountant = PRVAccountant()
    accountant.history = [(multiplier, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
    return float(table.compute_epsilon(delta, delta / 1000, error)[1])


def exact_rdp_epsilon(rate, multiplier, steps, delta):
    """RDP at the best REAL order, every moment by adaptive quadrature."""

    def log_moment(order):
        if rate == 1:
            return order * (order - 1) / (2 * multiplier**2)
        shift = 1 / multiplier

        def log_integrand(u):
            log_ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + shift * u - shift**2 / 2)
            return order * log_ratio - u**2 / 2 - 0.5 * np.log(2 * np.pi)

        ends = (-12.0, order * shift + 12.0)
        grid = np.linspace(*ends, 2001)
        peak = float(np.max(log_integrand(grid)))
        middle = [0.0, shift, order * shift, float(grid[np.argmax(log_integrand(grid))])]
        value = quad(
            lambda u: np.exp(log_integrand(u) - peak), *ends,
            points=sorted(p for p in middle if ends[0] < p < ends[1]), limit=400, epsabs=0,
            epsrel=1e-12,
        )[0]  # fmt: skip
        return peak + np.log(value)

    def bound(log_excess):
        excess = np.exp(log_excess)
        order = 1 + excess
        return (
            steps * log_moment(order) / excess
            + np.log1p(-1 / order)
            - (np.log(delta) + np.log(order)) / excess
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = min(np.linspace(np.log(0.05), np.log(2000), 60), key=bound)
        best = minimize_scalar(bound, bounds=(start - 0.25, start + 0.25), method="bounded")
    return float(min(best.fun, bound(start)))
