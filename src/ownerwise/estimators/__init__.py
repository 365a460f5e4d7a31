"""Estimators for scikit-learn, an optional extra: nothing else in the package loads them.

This subpackage may import every subpackage except config and cli.
"""

try:
    from ownerwise.estimators.classifier import PrivateClassifier
    from ownerwise.estimators.regressor import PrivateRegressor
except ImportError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    raise ImportError(
        "the estimators need scikit-learn 1.6 or newer: pip install 'ownerwise[sklearn]'"
    ) from error

__all__ = ["PrivateClassifier", "PrivateRegressor"]
