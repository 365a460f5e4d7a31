"""What the scikit-learn estimators share: budgets, the plan, training, and what they warn of."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from ownerwise.batches import device_problems
from ownerwise.data.splits import hold_out, split_by_problems
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems
from ownerwise.estimators.budgets import fit_owners, owner_ids
from ownerwise.estimators.pipelines import warn_of_fitted_steps
from ownerwise.estimators.repeated_fits import Lineage
from ownerwise.marks import marks_of
from ownerwise.mechanisms import WEIGHTS, Loss, Weights
from ownerwise.models import hidden_problems, mlp
from ownerwise.owners import as_ids, flat_ids
from ownerwise.planning import PlanRequest, make_plan
from ownerwise.repair import as_calibration, as_repair
from ownerwise.training import TRAINED_BEFORE, Trainer
from ownerwise.training.settings import setting_problems
from ownerwise.training.values import is_number

STEPS = 200
"""Number of steps if neither `steps` nor `epochs` is given."""
_LARGEST_DEFAULT_BATCH = 512


class PrivateEstimator(BaseEstimator):
    """The base of the estimators; a subclass says what targets are, and what the loss is."""

    n_features_in_: int  # set by validate_data
    epsilon: Any
    delta: Any
    method: str
    weights: str | Weights | None
    steps: int | None
    epochs: float | None
    batch_size: float | None
    clip_norm: Any
    lr: float
    hidden: Sequence[int]
    model: Callable[[int, int], nn.Module] | None
    input_range: tuple[Any, Any] | None
    accountant: str
    unit: str
    sampling: str | None
    records_per_owner: int | None
    clipped_steps: float | None
    max_records: int | None
    validation_fraction: float | None
    split_by: str | None
    device: str | None
    verbose: bool
    random_state: Any

    def _keep(self, given: Mapping[str, Any]) -> None:
        """Store the arguments of `__init__` unchanged, as scikit-learn expects."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    @abstractmethod
    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets as arrays, or raise scikit-learn's errors."""

    @abstractmethod
    def _public_targets(self, y: np.ndarray, problems: Problems) -> Any:
        """Return what is assumed public about the targets; add problems with them."""

    @abstractmethod
    def _found_in_targets(self) -> list[str]:
        """Warn if that was taken from the records; return the note for the run."""

    @abstractmethod
    def _learn_targets(self, y: np.ndarray, public: Any) -> np.ndarray:
        """Store fitted attributes about targets, and return the targets to train with."""

    @abstractmethod
    def _training_loss(self) -> Loss:
        """Return the loss."""

    @property
    @abstractmethod
    def _number_of_outputs(self) -> int:
        """Number of outputs of the model."""

    def _fit(self, X: Any, y: Any, owners: Any) -> Self:
        """Train on private records; see `fit`."""
        marked = marks_of(X, y)
        fitted_before = warn_of_fitted_steps(self)
        X, y = self._validated(X, y)
        problems = Problems()
        problems.add(*_missing_problems(X))
        public = self._public_targets(y, problems)
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
        if batch_size is None and self.method != "individual":
            batch_size = max(1.0, min(elements / 4, _LARGEST_DEFAULT_BATCH))
        calibration = repair = None
        with problems.guard():
            calibration = as_calibration(getattr(self, "calibration", None))
        with problems.guard():
            repair = as_repair(getattr(self, "repair", None))
        steps = STEPS if self.steps is None and self.epochs is None else self.steps
        request = PlanRequest(
            method=self.method,
            steps=steps,
            epochs=self.epochs,
            batch_size=batch_size,
            clip_norm=self.clip_norm,
            accountant=self.accountant,
            calibration=calibration,
            unit=self.unit,
            sampling=self.sampling,
            records_per_owner=self.records_per_owner,
            clipped_steps=self.clipped_steps,
        )
        problems.add(*request.problems(elements), *self._parameter_problems())
        problems.raise_()
        assert budgets is not None
        seed = self._seed()
        if seed is None:
            self._relatives.note_fit()
        reasons = [*self._found_in_targets(), *fitted_before, *marked]
        self.plan_ = make_plan(budgets, request)
        targets = self._learn_targets(y, public)
        self.model_ = self._fresh_model(seed)
        trainer = Trainer(
            self.model_,
            self.plan_,
            lr=self.lr,
            loss=self._training_loss(),
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
            evaluated: dict[str, Any] = {}
            if held.any():
                evaluated["validation"] = _tensors(inputs[held], targets[held])
                evaluated["validation_owners"] = None if ids is None else ids[held]
            self.run_ = trainer.fit(_tensors(inputs[used], targets[used]), **evaluated)
        self.model_.cpu().eval()
        self.epsilon_ = self.run_.epsilon()
        self.private_ = self.run_.private
        return self

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False, ensure_all_finite=False)
        X = np.asarray(X)
        if problems := _missing_problems(X):
            raise OwnerwiseError(problems)
        inputs = torch.tensor(self._scaled(X, Problems()), dtype=torch.float64)
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
                return self.model(self.n_features_in_, self._number_of_outputs)
            return mlp(self.n_features_in_, self._number_of_outputs, self.hidden, activation="tanh")

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
