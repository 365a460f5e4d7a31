"""The private step: the one place where private data becomes a model update."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.batches import (
    Batch,
)
from ownerwise.errors import OwnerwiseError, PlanError
from ownerwise.gradients import check
from ownerwise.mechanisms import (
    INO,
    AdaptiveRelease,
    ClippingRule,
    Loss,
    Peek,
    Randomness,
    Release,
    Score,
    Standard,
    Stateful,
    Steered,
    Weights,
    loss_problems,
)
from ownerwise.planning import (
    Plan,
)
from ownerwise.randomness import (
    LayerRandomness,
    Noise,
    SecretStream,
)
from ownerwise.step import checkpoints
from ownerwise.step.checks import optimizer_problems, release_problems
from ownerwise.step.clipped_sums import ClippedSums
from ownerwise.step.micro_batches import MEMORY_TARGET


class PrivateStep:
    """Takes one accounted step for every batch: `for batch in PoissonBatches(...): step(batch)`.

    Phases of a step, in this order: forward over the logical batch, noised release (optional),
    per-record loss, score, clipping rule, weights, sum, noise, division by the expected batch,
    optimizer. One forward pass, unless the batch is cut into micro-batches and something needs
    all of it: then a first pass is forward only.

    Formal guarantee: with batches from `PoissonBatches` of the same plan, each record of owner o
    moves the sum by at most `plan.clip_norms[o]`, Gaussian noise of std `plan.noise_std_at(step)`
    is added once to the sum, and at most `plan.steps` steps are taken: the mechanism that the plan
    accounts for. A rule that steers scales clip norms and noise alike, and lowers rates, by past
    outputs alone: never dearer. Public: the plan, the architecture, the optimizer's settings.
    Micro-batch size and device change speed only.

    Args:
        model: an ordinary module; it stays one. A pre-flight check lists all its problems.
        plan: the plan, with owners.
        optimizer: any torch optimizer that needs no closure.
        loss: `loss(outputs, targets)`, asked for `reduction="none"` (see `losses.per_record`);
            `loss(outputs, targets, released)` if there is a release.
        weights: weights over the whole batch, such as INO; bound to the plan here.
        clipping: the clipping rule. One that steers (`ImportanceSampling`) releases a noisy count
            in every step, for which the plan needs `release_std`.
        release: what to release besides, from the outputs; the plan needs `release_std`.
        stream: the run's secret stream (one root for batches and noise). A private one if not
            given; one with a fixed seed makes the run NOT private.
        start: number of steps already spent, when a run is resumed.
        micro_batch_size: records computed at once; chosen from `memory_target` if not given.
        memory_target: bytes that activations of one micro-batch may take.
        lean: less memory, more time.
        noise_draws: normals summed into one, 4 against floating-point attacks (see `noise`).
        not_private: keep losses, norms and factors of the last batch in `peek`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Optimizer,
        loss: Loss,
        *,
        weights: Weights | None = None,
        clipping: ClippingRule | None = None,
        release: Release | None = None,
        stream: SecretStream | None = None,
        start: int = 0,
        micro_batch_size: int | None = None,
        memory_target: int = MEMORY_TARGET,
        lean: bool = False,
        noise_draws: int = 1,
        not_private: bool = False,
    ):
        problems = [str(problem) for problem in check(model)]
        problems += optimizer_problems(model, optimizer)
        problems += loss_problems(loss, model)
        if not 0 <= start <= plan.steps:
            problems.append(f"start={start}: expected 0 to {plan.steps}, the planned steps")
        rule: ClippingRule = Standard() if clipping is None else clipping
        steering = rule.steering(plan) if isinstance(rule, Steered) else None
        problems += release_problems(rule, steering, release, plan)
        if micro_batch_size is not None and micro_batch_size < 1:
            problems.append(f"micro_batch_size={micro_batch_size}: expected at least 1")
        if noise_draws < 1:
            problems.append(f"noise_draws={noise_draws}: expected at least 1")
        if problems:
            raise OwnerwiseError(problems)
        self.model = model
        self.plan = plan
        self.optimizer = optimizer
        self.weights = None if weights is None else weights.bind(plan)
        self.clipping = rule
        self.steering = steering
        self.release = release.bind(plan) if isinstance(release, AdaptiveRelease) else release
        self.not_private = not_private
        self._sums = ClippedSums(
            model,
            plan,
            loss,
            rule,
            weights=self.weights,
            release=self.release,
            steering=steering,
            micro_batch_size=micro_batch_size,
            memory_target=memory_target,
            lean=lean,
            not_private=not_private,
        )
        root = SecretStream() if stream is None else stream
        self._seed = root.seed
        self._noise = Noise(root, draws=noise_draws)
        self._release_noise = Noise(root, purpose="release", draws=noise_draws)
        self._rule_stream = root.child("clipping rule") if self.clipping.randomised else None
        self._layer_stream = root.child("layers")
        self._spent = start
        self._updates = start
        self._private_so_far = True
        self._ledger: Path | None = None

    @property
    def _score(self) -> Score | None:
        """What puts the records in order, if something does."""
        return self.weights.score_by if isinstance(self.weights, INO) else None

    @property
    def private(self) -> bool:
        """Whether the guarantee holds: secret randomness, and nothing un-noised kept."""
        secret = self._noise.private and self._private_so_far and not self.not_private
        return secret and getattr(self.weights, "private", True)

    @property
    def peek(self) -> Peek | None:
        """What the last batch showed: NOT private, and None unless that was asked for."""
        return self._sums.peek

    @property
    def steps_spent(self) -> int:
        """Steps accounted so far; step `plan.steps` + 1 raises."""
        return self._spent

    @property
    def updates(self) -> int:
        """Updates that the model has received; fewer than `steps_spent` after a crash."""
        return self._updates

    def epsilon(self) -> np.ndarray:
        """Return what every owner's records have spent so far."""
        return self.plan.epsilon(steps=self._spent)

    def save(self, folder: str | PathLike, *, count_steps: bool = True) -> Path:
        """Write a checkpoint: model, optimizer, plan hash, steps. Never the key.

        Args:
            folder: one for each run.
            count_steps: count every further step of a private run in the folder's ledger before
                it is taken, for the caller has the model after each (some milliseconds a step).
                False is for callers that count what leaves by themselves, as the Trainer does.
        """
        path = checkpoints.save(
            folder,
            self.plan,
            self.model,
            self.optimizer,
            updates=self._updates,
            steps_spent=self._spent,
            seed=self._seed,
            private=self.private,
            plugs={name: plug.state() for name, plug in self._stateful().items()},
        )
        self._ledger = Path(folder) if count_steps else None
        return path

    def restore(self, folder: str | PathLike, *, count_steps: bool = True) -> None:
        """Go on from the newest checkpoint of `folder`, with every spent step counted.

        Call it before the first step, then iterate `PoissonBatches(..., start=steps_spent)`. With a
        fixed seed the run goes on bit for bit, if its micro-batches have the same size: give
        `micro_batch_size` where a batch does not fit the memory target. `count_steps` is that of
        `save`.
        """
        if self._updates or self._spent:
            raise OwnerwiseError("restore comes before the first step of a fresh PrivateStep")
        path = checkpoints.latest(folder)
        if path is None:
            raise OwnerwiseError(f"no checkpoint in {folder}")
        stored = checkpoints.load(path, self.plan, self.model, self.optimizer, self._seed)
        stateful = self._stateful()
        if stored.plugs.keys() != stateful.keys():
            raise OwnerwiseError(
                f"{path.name} holds the state of {', '.join(stored.plugs) or 'no plug'}, this step "
                f"has {', '.join(stateful) or 'none'}: build the step of the run"
            )
        for name, plug in stateful.items():
            plug.load_state(stored.plugs[name])
        self._updates, self._spent = stored.updates, stored.steps_spent
        self._private_so_far &= stored.private
        self._ledger = Path(folder) if count_steps else None

    def _stateful(self) -> dict[str, Stateful]:
        """Return the plugs that remember something, by name."""
        plugs = {
            "weights": self.weights,
            "score": self._score,
            "clipping": self.clipping,
            "steering": self.steering,
            "release": self.release,
        }
        return {name: plug for name, plug in plugs.items() if isinstance(plug, Stateful)}

    def __call__(self, batch: Batch) -> None:
        """Take one step. The optimizer changes the model; nothing else leaves."""
        if not isinstance(batch, Batch):
            raise OwnerwiseError(
                f"a {type(batch).__name__} was given; expected a Batch: iterate "
                "PoissonBatches(data, plan), whose batches follow the owners' rates, not a "
                "DataLoader"
            )
        step = self._spent
        if step >= self.plan.steps:
            raise PlanError(
                f"all {self.plan.steps} planned steps are taken; a further one would overspend. "
                "Make a plan with more steps"
            )
        if batch.step != step:
            raise PlanError(
                f"the batch is for step {batch.step}, the next step is {step}: take every batch of "
                "PoissonBatches in order, each once (PoissonBatches(..., start=) when resuming)"
            )
        if batch.plan_hash not in (None, self.plan.hash):
            raise PlanError(
                f"the batch was drawn by plan {batch.plan_hash[:12]}, the step accounts for plan "
                f"{self.plan.hash[:12]}: give PoissonBatches the step's plan"
            )
        self._private_so_far &= batch.private
        self._spent = step + 1  # a step that fails half-way counts: its noise is drawn
        if self._ledger is not None and self._noise.private:
            checkpoints.record_steps(self._ledger, self.plan, self._spent)
        randomness, steering = self._randomness(step), self.steering
        # (sums + noise) / expected batch, in the noise's memory, which is ours
        share = 1 / self.plan.expected_batch_size
        std = self.plan.noise_std_at(step)
        if steering is not None:
            assert randomness.rule is not None
            batch = steering.begin(batch, randomness.rule)
            share, std = share / steering.share, std * steering.clip_scale
        sums = self.clipped_sum(batch, randomness)
        std *= share
        totals = list(sums.values())
        noise = self._noise.gaussian(step, std, totals)
        torch._foreach_add_(noise, totals, alpha=share)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # frozen ones too, whatever they held
        for parameter, gradient in zip(sums, noise, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if steering is not None:
            count = torch.tensor([steering.count], dtype=torch.float64)
            steering.learn(float(randomness.release(count)))
        self._updates += 1

    def clipped_sum(
        self, batch: Batch, randomness: Randomness | None = None
    ) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients. NOT private before noise is added."""
        return self._sums(batch, Randomness() if randomness is None else randomness)

    def _randomness(self, step: int) -> Randomness:
        """Open the random numbers of one step."""

        def noised(total: Tensor) -> Tensor:
            std = self.plan.release_std_at(step)
            if self.plan.release_noise == "laplace":
                return total + self._release_noise.laplace(step, std / math.sqrt(2), [total])[0]
            return total + self._release_noise.gaussian(step, std, [total])[0]

        return Randomness(
            layers=LayerRandomness(lambda: self._layer_stream.at_step(step)),
            rule=self._rule_stream.at_step(step) if self._rule_stream else None,
            release=noised,
        )

    def __repr__(self) -> str:
        kind = "private" if self.private else "NOT PRIVATE"
        done = f"{self._spent} of {self.plan.steps} steps"
        return f"PrivateStep({done}, {kind}, plan {self.plan.hash[:12]})"
