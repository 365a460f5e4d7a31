"""A scikit-learn regressor that trains within each owner's budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import nn

from ownerwise.errors import PrivacyWarning, Problems, known_names
from ownerwise.estimators.base import PrivateEstimator
from ownerwise.mechanisms import REGRESSION_LOSSES, RegressionLoss, Weights
from ownerwise.planning import RECORDS_PER_OWNER, AdaptiveClipNorm


class PrivateRegressor(RegressorMixin, PrivateEstimator):
    """A neural network that predicts a number, with an individual budget for each data owner.

    Formal guarantee: that of `PrivateClassifier`, with the range of the targets in place of the
    classes: it is assumed to be public. Without `target_range`, the range is taken from `y`, which
    reveals two of the targets. Such a fit is NOT private; a `PrivacyWarning`, `private_` and the
    card say so.

    Args:
        epsilon: one number for all owners; a mapping {owner: epsilon}, which may list more owners
            than a fit involves; or one number per record.
        delta: one number for all owners, or a mapping {owner: delta}.
        method: how to plan the budgets: "uniform", "sample", "scale", "both" or "individual" (see
            `plan`). "individual" needs `weights=None` and uses all records in every step.
        weights: a name, such as "ino", an object, such as `INO(tail=0.2)`, or None.
        steps: number of steps; 200 if neither this nor `epochs` is given.
        clipped_steps: for "individual": the number of steps that a budget pays for if every
            gradient is clipped; None for all steps.
        epochs: expected number of times that a record is drawn, instead of `steps`.
        batch_size: expected number of records per step; None uses a quarter of the records, but
            at most 512.
        clip_norm: bound on a record's gradient norm (the average over records if bounds differ);
            "adaptive", or an `AdaptiveClipNorm`, follows a quantile of the norms at a small cost.
        lr: learning rate of plain stochastic gradient descent.
        hidden: sizes of hidden layers (tanh); () gives linear regression.
        model: function (n_features, 1) -> module, instead of `hidden`.
        target_range: the public range (low, high) of the targets; None uses the smallest and
            largest target in `y`, which is NOT private. For training, targets are clipped to the
            range and scaled to [-1, 1]; predictions lie in the range.
        loss: "mse_loss", "l1_loss", "huber_loss" or "smooth_l1_loss", of outputs and scaled targets
            (`RegressionLoss`).
        input_range: a public range (low, high); each bound is one number or one per feature. Inputs
            are clipped to this range and scaled to [-1, 1]. With None, inputs are left unchanged.
        accountant: "pld" (tight) or "rdp".
        unit: what each epsilon protects: one "record", or the "owner" with all of their records.
            `batch_size` then counts owners.
        sampling: what is drawn at each step, "record" or "owner"; by default the same as `unit`.
        records_per_owner: with owner sampling, the largest number of an owner's records in a step;
            None for all.
        max_records: the most records of an owner that are used at all (`Owners.bound`); the
            others are dropped by a public hash. None keeps all.
        validation_fraction: probability that a public hash holds out a record, or an owner, for
            validation; the metrics are in `run_`. No guarantee covers held-out records, and
            held-out owners are not in `plan_`. None holds out nothing.
        split_by: what is held out: single records ("record") or whole owners ("owner"); by default
            the same as `unit`.
        device: where to train, such as "cuda"; the trained model is on the CPU again.
        verbose: whether to show a progress bar.
        random_state: None uses secret randomness. Any other value makes the result repeatable
            and NOT private.

    Attributes:
        target_range_: the range that was used.
        model_: the trained module.
        plan_: the plan, which includes the owners (`plan_.owners`).
        run_: the run, for reports and cards.
        epsilon_: epsilon spent for each owner's records, in the order of `plan_.owners.ids`.
        private_: whether the guarantee holds: False after a fit with a fixed `random_state`,
            without `target_range`, in a pipeline that fitted an earlier step, or with marked inputs
            (see `ownerwise.marks`).
        n_features_in_, feature_names_in_: as usual in scikit-learn.

    Example:
        >>> from sklearn.datasets import make_regression
        >>> X, y = make_regression(2000, 5, random_state=0)
        >>> owners = ["strict" if row[0] > 0 else "lax" for row in X]
        >>> regressor = PrivateRegressor({"strict": 1.0, "lax": 4.0}, target_range=(-300, 300))
        >>> regressor.fit(X, y, owners=owners).predict(X[:5]).shape
        (5,)
    """

    target_range: tuple[float, float] | None
    loss: str

    def __init__(
        self,
        epsilon: Any = 1.0,
        delta: Any = 1e-5,
        *,
        method: str = "sample",
        weights: str | Weights | None = None,
        steps: int | None = None,
        clipped_steps: float | None = None,
        epochs: float | None = None,
        batch_size: float | None = None,
        clip_norm: float | str | AdaptiveClipNorm = 1.0,
        lr: float = 0.5,
        hidden: Sequence[int] = (64,),
        model: Callable[[int, int], nn.Module] | None = None,
        target_range: tuple[float, float] | None = None,
        loss: str = "mse_loss",
        input_range: tuple[Any, Any] | None = None,
        accountant: str = "pld",
        unit: str = "record",
        sampling: str | None = None,
        records_per_owner: int | None = RECORDS_PER_OWNER,
        max_records: int | None = None,
        validation_fraction: float | None = None,
        split_by: str | None = None,
        device: str | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, owners: Any = None) -> Self:
        """Train on private records.

        Args:
            X: [records, features].
            y: numbers, [records].
            owners: owner id (int or str) of each record, or a tuple of ids for a record with
                several owners; None makes every record its own owner.
        """
        return self._fit(X, y, owners)

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted number of each record, within the range of the targets."""
        outputs = torch.from_numpy(self._outputs(X))
        return self._training_loss().numbers(outputs).numpy()

    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_all_finite=False, y_numeric=True)
        return X, y.astype(np.float64)

    def _public_targets(self, y: np.ndarray, problems: Problems) -> RegressionLoss | None:
        """Return the loss on the range of the targets; add a problem with the range or the name."""
        if self.loss not in REGRESSION_LOSSES:
            problems.add(f"loss {self.loss!r}; {known_names(self.loss, REGRESSION_LOSSES)}")
            return None
        low, high = self._range(y, problems)
        loss = None
        with problems.guard():
            loss = RegressionLoss(low, high, REGRESSION_LOSSES[self.loss])
        return loss

    def _range(self, y: np.ndarray, problems: Problems) -> tuple[Any, Any]:
        if self.target_range is None:
            low, high = float(y.min()), float(y.max())
            return (low, high) if low < high else (low - 1.0, high + 1.0)
        try:
            low, high = map(float, self.target_range)
        except (TypeError, ValueError):
            problems.add(f"target_range {self.target_range!r}: expected (low, high), or None")
            return 0.0, 1.0
        return low, high

    def _found_in_targets(self) -> list[str]:
        """Warn if the range is taken from the records; return the note for the run."""
        if self.target_range is not None:
            return []
        warnings.warn(
            "the range of the targets was taken from y, so it is NOT private; pass "
            "target_range=(low, high) from public knowledge instead",
            PrivacyWarning,
            stacklevel=4,
        )
        return ["the range of the targets, found in the records"]

    def _learn_targets(self, y: np.ndarray, public: RegressionLoss) -> np.ndarray:
        self.target_range_ = (public.low, public.high)
        return y.astype(np.float32)

    def _training_loss(self) -> RegressionLoss:
        return RegressionLoss(*self.target_range_, REGRESSION_LOSSES[self.loss])

    @property
    def _number_of_outputs(self) -> int:
        return 1
