"""A scikit-learn classifier that trains within each owner's budget."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from ownerwise.batches import device_problems
from ownerwise.data.splits import hold_out, split_by_problems
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems, name_some
from ownerwise.estimators.budgets import fit_owners, owner_ids
from ownerwise.estimators.pipelines import warn_of_fitted_steps
from ownerwise.estimators.repeated_fits import Lineage
from ownerwise.marks import marks_of
from ownerwise.mechanisms import WEIGHTS, Weights
from ownerwise.models import hidden_problems, mlp
from ownerwise.owners import as_ids, flat_ids
from ownerwise.planning import RECORDS_PER_OWNER, PlanRequest, make_plan
from ownerwise.repair import as_calibration, as_repair
from ownerwise.training import TRAINED_BEFORE, Trainer
from ownerwise.training.settings import setting_problems
from ownerwise.training.values import is_number

_LARGEST_DEFAULT_BATCH = 512


class PrivateClassifier(ClassifierMixin, BaseEstimator):
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
        method: how to plan the budgets: "uniform", "sample", "scale" or "both" (see `plan`).
        weights: a name, such as "ino", an object, such as `INO(tail=0.2)`, or None.
        steps: number of steps.
        batch_size: expected number of records per step; None uses a quarter of the records, but
            at most 512.
        clip_norm: bound on a record's gradient norm (the average over records if bounds differ).
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

    n_features_in_: int  # set by validate_data

    def __init__(
        self,
        epsilon: Any = 1.0,
        delta: Any = 1e-5,
        *,
        method: str = "sample",
        weights: str | Weights | None = "ino",
        steps: int = 200,
        batch_size: float | None = None,
        clip_norm: float = 1.0,
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
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.weights = weights
        self.steps = steps
        self.batch_size = batch_size
        self.clip_norm = clip_norm
        self.lr = lr
        self.hidden = hidden
        self.model = model
        self.classes = classes
        self.input_range = input_range
        self.accountant = accountant
        self.calibration = calibration
        self.repair = repair
        self.unit = unit
        self.sampling = sampling
        self.records_per_owner = records_per_owner
        self.max_records = max_records
        self.validation_fraction = validation_fraction
        self.split_by = split_by
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any, owners: Any = None) -> Self:
        """Train on private records.

        Args:
            X: [records, features].
            y: class labels, [records].
            owners: owner id (int or str) of each record, or a tuple of ids for a record with
                several owners; None makes every record its own owner.
        """
        marked = marks_of(X, y)
        fitted_before = warn_of_fitted_steps(self)
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_all_finite=False)
        check_classification_targets(y)
        problems = Problems()
        problems.add(*_missing_problems(X))
        classes = self._known_classes(y, problems)
        budgets = ids = None
        held = np.zeros(len(X), dtype=bool)
        with problems.guard():
            ids = None if owners is None else owner_ids(owners)
            held = self._held_out(X, y, ids)
        used = np.flatnonzero(~held)
        with problems.guard():
            budgets = fit_owners(len(X), ids, self.epsilon, self.delta, held)
            if self.max_records is not None:
                budgets, kept = budgets.bound(self.max_records)
                used = used[kept]
        inputs = self._scaled(X, problems)
        batch_size = self.batch_size
        by_owner = (self.sampling or self.unit) == "owner" and budgets is not None
        elements = len(budgets) if by_owner else len(used)
        if batch_size is None:
            batch_size = max(1.0, min(elements / 4, _LARGEST_DEFAULT_BATCH))
        calibration = repair = None
        with problems.guard():
            calibration = as_calibration(self.calibration)
        with problems.guard():
            repair = as_repair(self.repair)
        request = PlanRequest(
            method=self.method,
            steps=self.steps,
            batch_size=batch_size,
            clip_norm=self.clip_norm,
            accountant=self.accountant,
            calibration=calibration,
            unit=self.unit,
            sampling=self.sampling,
            records_per_owner=self.records_per_owner,
        )
        problems.add(*request.problems(elements), *self._parameter_problems())
        problems.raise_()
        assert budgets is not None
        seed = self._seed()
        if seed is None:
            self._relatives.note_fit()
        reasons = [*self._found_classes(), *fitted_before, *marked]
        self.plan_ = make_plan(budgets, request)
        self.classes_ = classes
        self.model_ = self._fresh_model(seed)
        trainer = Trainer(
            self.model_,
            self.plan_,
            lr=self.lr,
            weights=WEIGHTS.make(self.weights) if isinstance(self.weights, str) else self.weights,
            repair=repair,
            seed=seed,
            name=type(self).__name__,
            device=self.device,
            progress=self.verbose,
            notes={"not_private": reasons} if reasons else None,
        )
        with warnings.catch_warnings():
            if self._relatives.warned:
                warnings.filterwarnings("ignore", TRAINED_BEFORE, PrivacyWarning)
            targets = np.searchsorted(classes, y)
            evaluated: dict[str, Any] = {}
            if held.any():
                evaluated["validation"] = _tensors(inputs[held], targets[held])
                evaluated["validation_owners"] = None if ids is None else ids[held]
            self.run_ = trainer.fit(_tensors(inputs[used], targets[used]), **evaluated)
        self.model_.cpu().eval()
        self.epsilon_ = self.run_.epsilon()
        self.private_ = self.run_.private
        return self

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

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False, ensure_all_finite=False)
        X = np.asarray(X)
        if problems := _missing_problems(X):
            raise OwnerwiseError(problems)
        inputs = torch.from_numpy(self._scaled(X, Problems())).double()
        # in float64, the effect of other records on a record's outputs is negligible
        model = copy.deepcopy(self.model_).double()
        with torch.no_grad():
            return model(inputs).numpy()

    def _held_out(self, X: np.ndarray, y: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        """Return a mask of the records to hold out for validation."""
        fraction, by = self.validation_fraction, self.split_by
        problems = Problems(split_by_problems(by, self.unit))
        if fraction is not None and not (is_number(fraction) and 0 < fraction < 1):
            problems.add(
                f"validation_fraction {fraction!r}; expected a number between 0 and 1, or None"
            )
        problems.raise_()
        unusable = Problems()  # `fit_owners` reports them
        if ids is not None:
            as_ids(flat_ids(ids)[0], "owners", unusable)
        if fraction is None or len(unusable) or (ids is not None and len(ids) != len(X)):
            return np.zeros(len(X), dtype=bool)
        if by is None:
            by = "record" if ids is None else self.unit
        return hold_out([X, y], ids, fraction, "validation", by=by)

    def _known_classes(self, y: np.ndarray, problems: Problems) -> np.ndarray:
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

    def _found_classes(self) -> list[str]:
        """Warn if class labels are taken from the records; return the note for the run."""
        if self.classes is not None:
            return []
        warnings.warn(
            "the classes were taken from y, so the list is NOT private; pass classes=[...] from "
            "public knowledge instead",
            PrivacyWarning,
            stacklevel=3,
        )
        return ["the list of classes, found in the records"]

    def _scaled(self, X: np.ndarray, problems: Problems) -> np.ndarray:
        """Return inputs clipped to the public range and scaled to [-1, 1]."""
        if self.input_range is None:
            return X
        try:
            ends = [np.broadcast_to(end, X.shape[1:]) for end in self.input_range]
            low, high = np.asarray(ends, dtype=np.float32)
            usable = bool((np.isfinite(high - low) & (low < high)).all())
        except (TypeError, ValueError):
            usable, low, high = False, 0, 0
        if not usable:
            problems.add(
                f"input_range={self.input_range!r}: expected finite (low, high) with low < high, "
                f"each a number or one per feature ({X.shape[1]} here)"
            )
            return X
        return np.clip(2 * (X - low) / (high - low) - 1, -1, 1)

    def _parameter_problems(self) -> list[str]:
        problems = [*setting_problems({"lr": self.lr}), *device_problems(self.device)]
        if isinstance(self.weights, str):
            problems += WEIGHTS.problems(self.weights)
        return problems if self.model is not None else problems + hidden_problems(self.hidden)

    def _seed(self) -> int | None:
        """Return the fixed seed given by `random_state`, or None for secret randomness."""
        if self.random_state is None:
            return None
        warnings.warn(
            f"random_state={self.random_state!r} makes noise and batches repeatable: this fit is "
            "NOT private. Use random_state=None for private data",
            PrivacyWarning,
            stacklevel=3,
        )
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _fresh_model(self, seed: int | None) -> nn.Module:
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            if self.model is not None:
                return self.model(self.n_features_in_, len(self.classes_))
            return mlp(self.n_features_in_, len(self.classes_), self.hidden, activation="tanh")

    @property
    def _relatives(self) -> Lineage:
        """The counts shared with all copies; not a parameter, and created on first use."""
        return vars(self).setdefault("_lineage", Lineage())

    def __getstate__(self) -> Any:
        """Return the state for copies and pickles, which share this estimator's counts."""
        _ = self._relatives
        return super().__getstate__()

    def __sklearn_clone__(self) -> Self:
        """Return an unfitted copy whose fits are counted together with this estimator's."""
        relatives = self._relatives
        relatives.clones += 1
        copied: Any = super().__sklearn_clone__()
        vars(copied)["_lineage"] = relatives
        return copied


def _tensors(inputs: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _missing_problems(X: np.ndarray) -> list[str]:
    if np.isfinite(X).all():
        return []
    return [
        "X contains NaN or infinite values; expected finite numbers. Replace them with a public "
        "constant, as SimpleImputer(strategy='constant') does. An imputer that is fitted to the "
        "records (mean, median, neighbours) releases their statistics without noise"
    ]
