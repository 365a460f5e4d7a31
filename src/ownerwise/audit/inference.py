"""Scores for membership inference: how much more likely a record is a member than not.

- LiRA (Carlini et al. 2022, "Membership Inference Attacks From First Principles"): online, the log
  ratio of two normal densities, fitted to the shadow models with and without the record; offline,
  how improbable so high a confidence is without the record.
- RMIA (Zarifzadeh, Liu, Shokri 2024, "Low-Cost High-Power Membership Inference Attacks"): for how
  many other records the target model favours this one, relative to the shadow models.

Shadow models are trained like the target but are never the target: otherwise the attack would be
judged on what it was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit, ndtr

from ownerwise.audit.signals import Signals

_FLOOR = 1e-6
_GAMMA = 1.0
_POPULATION = 2000


def lira_online(confidences: np.ndarray, shadows: Signals) -> np.ndarray:
    """Return the log-likelihood ratio of member against non-member for each record."""
    inside, outside = shadows.with_record, shadows.without_record
    return _log_density(confidences, *inside) - _log_density(confidences, *outside)


def lira_offline(confidences: np.ndarray, shadows: Signals) -> np.ndarray:
    """Return the probability that a model without the record is less confident about it."""
    median, std = shadows.without_record
    return ndtr((confidences - median) / std)


def rmia(confidences: np.ndarray, shadows: Signals) -> np.ndarray:
    """Return the share of other records whose likelihood ratio is smaller, for each record."""
    probabilities = expit(shadows.confidences)
    with_it = _masked_mean(probabilities, shadows.included)
    without = _masked_mean(probabilities, ~shadows.included)
    ratios = expit(confidences) / np.maximum((with_it + without) / 2, _FLOOR)
    step = max(1, len(ratios) // _POPULATION)
    population = np.sort(ratios[::step])
    return np.searchsorted(population, ratios / _GAMMA, side="right") / len(population)


INFERENCES: dict[str, Callable[[np.ndarray, Signals], np.ndarray]] = {
    "LiRA online": lira_online,
    "LiRA offline": lira_offline,
    "RMIA": rmia,
}
"""The attacks: from a target's confidences and the shadow models to one score per record."""


def _masked_mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    totals, counts = np.where(chosen, values, 0.0).sum(axis=0), chosen.sum(axis=0)
    return np.where(counts > 0, totals / np.maximum(counts, 1), values.mean(axis=0))


def _log_density(values: np.ndarray, median: np.ndarray, std: np.ndarray) -> np.ndarray:
    return -0.5 * ((values - median) / std) ** 2 - np.log(std)
