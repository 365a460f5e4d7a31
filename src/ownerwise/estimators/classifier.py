"""A scikit-learn classifier that trains within each owner's budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import nn
from torch.nn import functional

from ownerwise.errors import PrivacyWarning, Problems, name_some
from ownerwise.estimators.base import PrivateEstimator
from ownerwise.mechanisms import Loss, Weights
from ownerwise.planning import RECORDS_PER_OWNER, AdaptiveClipNorm


class PrivateClassifier(ClassifierMixin, PrivateEstimator):
    """A neural network trained with an individual privacy budget for each data owner.

    Formal guarantee: one `fit` with `random_state=None` is (epsilon_o, delta_o)-differentially
    private for each individual record of owner o (add or remove one record; with unit="owner", for
    owner o with all of their records), and all fitted attributes may be published. This is the
    guarantee of `PrivateStep` with the plan in `plan_`.
    The following are assumed to be public: all parameters below, who the owners are and how many
    records each has, the number of features, and the classes. Without `classes`, labels are taken
    from `y`, which reveals which labels occur. Such a fit is NOT private; a `PrivacyWarning`,
    `private_` and the card say so. Inputs are not standardised with data statistics; pass a public
    `input_range` instead. A scaler that a pipeline fits before this step releases statistics of the
    records without noise; that fit is NOT private either, and is reported in the same places. A
    scaler that you call yourself cannot be detected. Each additional fit on the same records spends
    the budgets again. A parameter search or cross-validation is NOT accounted for; it triggers a
    `PrivacyWarning`. No guarantee covers the records on which `score` is computed.

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
        hidden: sizes of hidden layers (tanh); () gives logistic regression.
        model: function (n_features, n_classes) -> module, instead of `hidden`.
        classes: all class labels, known in advance; None uses the labels in `y`, which is NOT
            private.
        input_range: a public range (low, high); each bound is one number or one per feature. Inputs
            are clipped to this range and scaled to [-1, 1]. With None, inputs are left unchanged.
        accountant: "pld" (tight) or "rdp".
        calibration: True, or options such as {"share": 0.1}, to pay for a release after training
            that removes the tilt of the class biases (`Calibration`).
        repair: a `PullAdjustment`, or its options as a mapping, to train without the tilt. The
            counts are public, [owners, classes], with owners and classes sorted. Requires
            `weights=None`.
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
        classes_: class labels, sorted.
        model_: the trained module.
        plan_: the plan, which includes the owners (`plan_.owners`).
        run_: the run, for reports and cards.
        epsilon_: epsilon spent for each owner's records, in the order of `plan_.owners.ids`.
        private_: whether the guarantee holds: False after a fit with a fixed `random_state`,
            without `classes`, in a pipeline that fitted an earlier step, or with marked inputs (see
            `ownerwise.marks`).
        n_features_in_, feature_names_in_: as usual in scikit-learn.

    Example:
        >>> from sklearn.datasets import make_classification
        >>> X, y = make_classification(2000, random_state=0)
        >>> owners = ["strict" if label else "lax" for label in y]
        >>> classifier = PrivateClassifier({"strict": 1.0, "lax": 4.0}, classes=[0, 1])
        >>> classifier.fit(X, y, owners=owners).predict(X[:5]).shape
        (5,)
    """

    classes: Sequence[Any] | None
    calibration: Any
    repair: Any

    def __init__(
        self,
        epsilon: Any = 1.0,
        delta: Any = 1e-5,
        *,
        method: str = "sample",
        weights: str | Weights | None = "ino",
        steps: int | None = None,
        clipped_steps: float | None = None,
        epochs: float | None = None,
        batch_size: float | None = None,
        clip_norm: float | str | AdaptiveClipNorm = 1.0,
        lr: float = 0.5,
        hidden: Sequence[int] = (64,),
        model: Callable[[int, int], nn.Module] | None = None,
        classes: Sequence[Any] | None = None,
        input_range: tuple[Any, Any] | None = None,
        accountant: str = "pld",
        calibration: Any = None,
        repair: Any = None,
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
            y: class labels, [records].
            owners: owner id (int or str) of each record, or a tuple of ids for a record with
                several owners; None makes every record its own owner.
        """
        return self._fit(X, y, owners)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return scores [records, classes]; for two classes, the second score minus the first."""
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the model's class probabilities, [records, classes]."""
        return torch.from_numpy(self._outputs(X)).softmax(dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each record."""
        largest = self._outputs(X).argmax(axis=1)
        return self.classes_[largest]

    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_all_finite=False)
        check_classification_targets(y)
        return X, y

    def _public_targets(self, y: np.ndarray, problems: Problems) -> np.ndarray:
        """Return the sorted class labels; add an error message if `y` contains other labels."""
        if self.classes is None:
            return np.unique(y)
        classes = np.unique(np.asarray(self.classes))
        strange = np.flatnonzero(~np.isin(y, classes))
        if len(strange):
            problems.add(
                f"the label of {name_some(strange, 'record {}'.format)} is not in "
                f"classes={name_some(classes)}; add it to classes, or remove these records"
            )
        return classes

    def _found_in_targets(self) -> list[str]:
        """Warn if class labels are taken from the records; return the note for the run."""
        if self.classes is not None:
            return []
        warnings.warn(
            "the classes were taken from y, so the list is NOT private; pass classes=[...] from "
            "public knowledge instead",
            PrivacyWarning,
            stacklevel=4,
        )
        return ["the list of classes, found in the records"]

    def _learn_targets(self, y: np.ndarray, public: np.ndarray) -> np.ndarray:
        self.classes_ = public
        return np.searchsorted(public, y)

    def _training_loss(self) -> Loss:
        return functional.cross_entropy

    @property
    def _number_of_outputs(self) -> int:
        return len(self.classes_)
