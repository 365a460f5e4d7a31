"""An audited run: the canaries train through the real sampler, step and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.audit.alike import refuse_unlike
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.network import (
    AuditedData,
    AuditedLoss,
    AuditedModel,
    AuditedRelease,
    CanaryBlock,
    CanaryOptimizer,
    canary_columns,
    linear_loss,
)
from ownerwise.batches import Batch, PoissonBatches
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import ClippingRule, Loss, Release, Weights, per_record
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream
from ownerwise.step import PrivateStep, unwrapped, wrapper_problems

MakeOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class Training:
    """What the audited run trains besides the canaries, and how.

    Args:
        model: the network; None trains the canaries alone.
        data: its data, one row per record of the plan.
        loss: its loss.
        optimizer: makes its optimizer from parameters; by default SGD with learning rate 0.1.
        weights, clipping, release: as for `PrivateStep`.
    """

    model: nn.Module | None = None
    data: Any = None
    loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    weights: Weights | None = None
    clipping: ClippingRule | None = None
    release: Release | None = None

    def __post_init__(self):
        given = [part is not None for part in (self.model, self.data, self.loss)]
        if any(given) and not all(given):
            raise OwnerwiseError(
                "expected a model with its data and loss, or none of them (then the canaries train "
                "alone)"
            )
        if self.release is not None and self.model is None:
            raise OwnerwiseError(
                "the release is computed from the outputs of a model: pass model, data and loss"
            )

    @property
    def alone(self) -> bool:
        """Whether the canaries are the only records."""
        return self.model is None


@dataclass(frozen=True, eq=False)
class Observations:
    """NOT PRIVATE: what an attacker with every model sees of the canaries, and what happened.

    Attributes:
        canaries: the canaries.
        sums: the noised sum of each step in each canary's direction, divided by the clip scale,
            float64 [steps, canaries].
        drawn: how many rows of each canary (with owner sampling: 0 or 1) were drawn at each step,
            [steps, canaries].
        expected: what the canaries' drawn rows add to the sums without noise, if the plan
            determines it; NaN where it depends on other records or on secret coins.
        noise_std: std of the noise in `sums` at each step, [steps].
        losses: of canaries that are ordinary records, before and after training [2, canaries].
    """

    canaries: Canaries
    sums: np.ndarray = field(repr=False)
    drawn: np.ndarray = field(repr=False)
    expected: np.ndarray = field(repr=False)
    noise_std: np.ndarray = field(repr=False)
    losses: np.ndarray | None = field(default=None, repr=False)

    @property
    def scores(self) -> np.ndarray:
        """One score per canary: the sum of its projections, weighted by each step's precision.

        Steps after a canary has retired (individual accounting) would add nothing but noise.
        """
        weights = (self.noise_std.min() / self.noise_std) ** 2
        return weights @ (self.canaries.paid * self.sums)


class AuditedRun:
    """The sampler and the step of one audited run.

    Args:
        canaries: the canaries, with their coins.
        training: what is trained with them.
        stream: the run's secret stream.
    """

    def __init__(self, canaries: Canaries, training: Training, stream: SecretStream):
        self.canaries = canaries
        self.plan = plan = canaries.plan
        self.block = block = CanaryBlock(len(canaries))
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        self.records = len(plan.owners.record_owner_index) - len(canaries.row_canary)
        self.processes = Processes.here()
        release = training.release
        self._own_loss = training.loss
        model, own = self.processes.together(lambda: _copied(training, self.processes))
        if model is None or training.loss is None:
            self.model: nn.Module = block
            index, level, slope = canary_columns(canaries, 0)
            self.data: Any = (index, torch.stack([level, slope], dim=1))
            loss: Loss = _loss_alone
        else:
            self.model = AuditedModel(model, block)
            self.data = AuditedData(training.data, canaries, self.records)
            plain = training.loss if release is None else release.penalised(training.loss)
            loss = AuditedLoss(plain)
            release = None if release is None else AuditedRelease(release)
        self.step = PrivateStep(
            self.model,
            plan,
            CanaryOptimizer(block, own),
            loss,
            weights=training.weights,
            clipping=training.clipping,
            release=release,
            stream=stream,
        )
        self.stream = stream
        self.alone = training.alone

    def batches(self) -> PoissonBatches:
        """Return the run's batches."""
        return PoissonBatches(self.data, self.plan, stream=self.stream)

    def take(self, batch: Batch) -> np.ndarray:
        """Take a step; return the noised sums in the canaries' directions, over the clip scale."""
        factor, steering = self.plan.expected_batch_size, self.step.steering
        if steering is not None:
            factor *= steering.keep_probability / steering.clip_scale
        before = self.block.values()
        self.step(batch)
        return ((before - self.block.values()) * factor).numpy()

    def drawn(self, batch: Batch) -> np.ndarray:
        """Return how many elements of each canary the whole batch contains."""
        owners = batch.all_owners()
        first = int(self.canaries.owner[0])
        return np.bincount(owners[owners >= first] - first, minlength=len(self.canaries))

    def expected(self, batch: Batch, drawn: np.ndarray) -> np.ndarray:
        """Return what a batch's canaries add to the sums, or NaN if the plan does not say."""
        if self.step.steering is not None or self.canaries.records is not None:
            return np.full(len(drawn), np.nan)
        weight = np.ones(len(drawn))
        if self.step.weights is not None:
            if not self.alone:
                return np.full(len(drawn), np.nan)
            weight = self._weights(batch)
        weight = weight * self.canaries.paid[batch.step]
        return weight * drawn * self.canaries.clip_norm / (1 + self.step.slack)

    def losses(self) -> np.ndarray | None:
        """Return the user's loss of each canary that is an ordinary record."""
        if self.canaries.records is None or self._own_loss is None:
            return None
        assert isinstance(self.model, AuditedModel)
        inputs, targets = self.canaries.records
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            losses = per_record(self._own_loss)(self.model.model(inputs), targets)
        self.model.train(training)
        return losses.double().numpy()

    def _weights(self, batch: Batch) -> np.ndarray:
        """Return each drawn canary's weight, recomputed from the canaries' levels."""
        assert self.step.weights is not None
        owners = batch.all_owners()
        weight = np.zeros(len(self.canaries))
        if len(owners):
            level = (
                self.canaries.level[owners].astype(np.float32).astype(np.float64)
            )  # canaries come alone
            clip_norms = self.plan.clip_norms[owners]
            weight[owners] = self.step.weights.weights(level, clip_norms, owners)
        return weight


def _copied(
    training: Training, processes: Processes
) -> tuple[nn.Module, Optimizer] | tuple[None, None]:
    """Return a copy of the model and its optimizer; None if canaries train alone."""
    if training.model is None:
        return None, None
    make = _plain_sgd if training.optimizer is None else training.optimizer
    model = copy.deepcopy(unwrapped(training.model))
    optimizer = make(model.parameters())
    if problems := list(wrapper_problems(model, optimizer, processes)):
        raise OwnerwiseError(problems)
    return model, optimizer


def observe(canaries: Canaries, training: Training, stream: SecretStream) -> Observations:
    """Train once and return what can be seen of the canaries; see `AuditedRun`.

    Several processes that train together see the same, bit for bit. An error in one of them is
    raised in all.
    """
    run = AuditedRun(canaries, training, stream)
    processes = run.processes
    before = processes.together(run.losses)
    steps, count = canaries.plan.steps, len(canaries)
    sums, expected = np.zeros((steps, count)), np.zeros((steps, count))
    drawn = np.zeros((steps, count), dtype=np.int64)
    for at, batch in enumerate(run.batches()):
        drawn[at] = run.drawn(batch)
        expected[at] = processes.together(partial(run.expected, batch, drawn[at]))
        sums[at] = run.take(batch)
    refuse_unlike(processes, "the noised sums", sums)
    noise_std = np.array([canaries.plan.noise_std_at(step) for step in range(steps)])
    after = processes.together(run.losses)
    losses = None
    if before is not None and after is not None:
        losses = np.stack([before, after])
        refuse_unlike(processes, "the losses of the canaries", losses)
    return Observations(canaries, sums, drawn, expected, noise_std, losses)


def _loss_alone(value: Tensor, targets: Tensor) -> Tensor:
    return linear_loss(value, targets[:, 0], targets[:, 1])


def _plain_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
