"""The least noisy Gaussian mechanism, without subsampling, that a budget allows."""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr, ndtr

from ownerwise.accounting.roots import find_root


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return mu such that N(mu, 1) and N(0, 1) are exactly (epsilon, delta)-indistinguishable.

    Reference: Dong, Roth, Su (2022), "Gaussian Differential Privacy", Corollary 1.
    """

    def miss(log_mu: float) -> float:
        mu = np.exp(log_mu)
        second = np.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
        value = ndtr(-epsilon / mu + mu / 2) - second
        return float(np.log(max(value, 1e-300)) - np.log(delta))

    guess = np.log(epsilon / 4)
    return float(np.exp(find_root(miss, guess, slope=5.0, low=-18.0, high=6.0, tolerance=1e-6)))
