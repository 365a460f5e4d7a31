"""Find out what a scikit-learn pipeline has learned from the records without noise."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags

from ownerwise.errors import PrivacyWarning, name_some


def warn_of_fitted_steps(estimator: BaseEstimator) -> list[str]:
    """Warn about transformers that a pipeline has just fitted to the records; return notes on them.

    A step has no reference to its pipeline, so the pipeline is looked up on the call stack.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Pipeline) and caller.steps[-1][1] is estimator:
            break
        frame = frame.f_back
    else:
        return []
    fitted = [name for name, step in caller.steps[:-1] if _learns_from_records(step)]
    if fitted:
        warnings.warn(
            f"the pipeline fitted {name_some(fitted)} to the records without noise: this fit is "
            "NOT private. Fit it to public data and wrap it in sklearn.frozen.FrozenEstimator, or "
            "pass a public input_range instead",
            PrivacyWarning,
            stacklevel=3,
        )
    return [f"{name}, fitted to the records in a pipeline" for name in fitted]


def _learns_from_records(step: Any) -> bool:
    if step in (None, "passthrough") or isinstance(step, FrozenEstimator):
        return False
    constant = isinstance(step, SimpleImputer) and step.strategy == "constant"
    return not constant and get_tags(step).requires_fit
