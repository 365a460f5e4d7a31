"""The Trainer, which trains a model under a plan in a loop around the private step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from tqdm import tqdm

from ownerwise.batches import PoissonBatches
from ownerwise.errors import OwnerwiseError, printable
from ownerwise.evaluation import Collate, Evaluation, Predict, group_name, predicted_classes
from ownerwise.mechanisms import ClippingRule, Loss, Release, Weights, plain_loss
from ownerwise.planning import NO_CONSTRAINTS, Plan
from ownerwise.runs import Run, default_label, environment, settings
from ownerwise.runs import folders as run_folders
from ownerwise.runs.reading import read_config
from ownerwise.step import PrivateStep
from ownerwise.training.averaging import Averaging
from ownerwise.training.checks import prepare
from ownerwise.training.interruption import Interrupted, Interruption
from ownerwise.training.learning_rates import LearningRateSchedule, factors
from ownerwise.training.loggers import Logger
from ownerwise.training.outside_the_plan import not_private_reasons, note_training
from ownerwise.training.recording import Recorder

_EVALUATIONS = 20  # approximate default number per run


class Trainer:
    """Trains a model under a plan: `run = Trainer(model, plan, lr=0.5).fit((X, y))`.

    Formal guarantee: `fit` has the guarantee of `PrivateStep` with `PoissonBatches` for the same
    plan and one secret stream. Nothing else about the training records is released: history lines
    come from validation and test data, which are NOT covered by any guarantee; no training loss is
    recorded or used to choose a checkpoint or a learning rate. Training times are recorded and
    depend slightly on the batch sizes. All arguments below and the model's initial weights are
    public.

    Args:
        model: an ordinary module, trained in place and in its current mode (train or eval).
        plan: the plan, with owners and their records.
        lr: learning rate.
        optimizer: optimizer class, called as optimizer(parameters, lr=lr, **options).
        optimizer_options: other options of the optimizer, such as {"momentum": 0.9}.
        schedule: factor applied to the learning rate over the plan's steps: "constant", "linear",
            "cosine" or "step"; with options, {"name": "cosine", "warmup": 100, "floor": 0.1}; or a
            function from the step to the factor.
        averaging: decay of an exponential average of the parameters over steps, such as 0.99. This
            is post-processing and has no privacy cost. The history, the final checkpoint and the
            trained model then use the average.
        loss: as for `PrivateStep`.
        weights, clipping, micro_batch_size, lean: as for `PrivateStep`.
        constraints: rate constraints to train under. The targets in all data then contain the class
            and the cell (see `Partition.targets`); the plan accounts for the histogram (`plan(...,
            constraints=)`).
        seed: None means secret randomness. A number makes the run repeatable and NOT PRIVATE.
        folder: run folder, created if needed; None keeps the run in memory, so it cannot be
            resumed.
        name: name of the run; by default the folder's name.
        label: method name in reports; by default derived from the plan and the weights.
        evaluate_every: steps between history lines; by default about 20 lines in all.
        checkpoint_every: steps between checkpoints; by default `evaluate_every`.
        group_budgets: epsilon of validation groups, for reports; not needed for groups named after
            owners.
        predict: function from the model's outputs to classes; by default the largest output, or the
            sign of a single output.
        loggers: "tensorboard", "wandb", or objects with start, log and finish (see `loggers`).
        progress: whether to show a progress bar; by default, only if the output is a terminal.
        notes: additional entries for the run's config, as JSON types. "model" and "data" describe
            the model and the data in words; "pretraining" says what they were pretrained on;
            "not_private" lists anything computed in advance without noise.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        lr: float,
        optimizer: Callable[..., Optimizer] = torch.optim.SGD,
        optimizer_options: Mapping[str, Any] | None = None,
        schedule: LearningRateSchedule = "constant",
        averaging: float | None = None,
        loss: Loss = functional.cross_entropy,
        weights: Weights | None = None,
        clipping: ClippingRule | None = None,
        constraints: Release | None = None,
        micro_batch_size: int | None = None,
        lean: bool = False,
        seed: int | None = None,
        folder: str | PathLike | None = None,
        name: str | None = None,
        label: str | None = None,
        evaluate_every: int | None = None,
        checkpoint_every: int | None = None,
        group_budgets: Mapping[Any, float] | None = None,
        predict: Predict = predicted_classes,
        loggers: Sequence[str | Logger] = (),
        progress: bool | None = None,
        notes: Mapping[str, Any] | None = None,
    ):
        if constraints is not None and not isinstance(constraints, Release):
            raise OwnerwiseError(NO_CONSTRAINTS.format(constraints))
        self.model = model
        self.plan = plan
        self.lr = lr
        self.optimizer = optimizer
        self.optimizer_options = dict(optimizer_options or {})
        self.schedule = schedule
        self.averaging = averaging
        self.loss = loss if constraints is None else constraints.penalised(loss)
        self.weights = weights
        self.clipping = clipping
        self.constraints = constraints
        self.micro_batch_size = micro_batch_size
        self.lean = lean
        self.seed = seed
        self.folder = None if folder is None else Path(folder)
        self.name = name or (self.folder.resolve().name if self.folder else "run")
        self.label = label or default_label(plan, settings.describe_plug(weights))
        if constraints is not None and label is None:
            self.label += " constrained"
        default_interval = max(1, plan.steps // _EVALUATIONS)
        self.evaluate_every = default_interval if evaluate_every is None else evaluate_every
        self.checkpoint_every = (
            self.evaluate_every if checkpoint_every is None else checkpoint_every
        )
        self.group_budgets = group_budgets
        self.predict = predict
        self.loggers = loggers
        self.progress = progress
        self.notes = dict(notes or {})
        self.begun = False

    def fit(
        self,
        data: Any,
        *,
        validation: Any = None,
        validation_groups: Any = None,
        test: Any = None,
        test_groups: Any = None,
        groups_are: str | None = None,
        num_workers: int = 0,
        collate: Collate | None = None,
        resume: bool = False,
    ) -> Run:
        """Take the planned steps and return the run.

        Args:
            data: (X, y) as tensors or arrays, or a map-style Dataset yielding (x, y); one row per
                record of the plan's owners, in the owners' order.
            validation: validation data, evaluated for every history line; it is NOT covered by any
                guarantee.
            validation_groups: group of each validation record; by default its class.
            test, test_groups: test data, evaluated once at the end.
            groups_are: a word for the groups; by default "owners" or "classes" if known.
            num_workers, collate: as for `PoissonBatches`.
            resume: resume the run in `folder`, or start one if there is none. The settings and the
                plan must be the same. With a fixed seed, the result is bit-for-bit identical to an
                uninterrupted run, unless the data itself is random (augmentation).

        Raises:
            OwnerwiseError: if there are any problems; it is raised before training and lists them
                all.
            Interrupted: on Ctrl-C or SIGTERM if the run has a folder, after a checkpoint is
                written.
        """
        validating = self._evaluation(validation, validation_groups, collate)
        testing = self._evaluation(test, test_groups, collate)
        config = self._config(data, validating, testing, groups_are, num_workers)
        if reasons := not_private_reasons(self, data, {"validation": validation, "test": test}):
            config["not_private"] = reasons
        step, stream, loggers = prepare(self, data, collate, validating, testing, config, resume)
        self.plan = step.plan  # the verified copy
        with nullcontext() if self.folder is None else run_folders.FolderLock(self.folder):
            run = self._open(config, step, resume)
            self.begun = True
            factor = factors(self.schedule, self.plan.steps)
            average = None if self.averaging is None else Averaging(self.averaging)
            recorder = Recorder(
                run,
                step,
                self.loss,
                lambda at: self.lr * factor(at),
                validating,
                testing,
                loggers,
                average,
            )
            batches = PoissonBatches(
                data,
                self.plan,
                stream=stream,
                start=step.steps_spent,
                num_workers=num_workers,
                collate=collate,
            )
            self._train(batches, step, recorder)
        return run

    def _train(self, batches: PoissonBatches, step: PrivateStep, recorder: Recorder) -> None:
        """Take the remaining steps, then give back those that were reserved but not begun.

        After any failure, the step whose batch was being drawn or used counts as spent: if the
        batch were drawn again, the contents of batches would influence which batches are used.
        """
        spent = step.steps_spent
        try:
            with recorder, Interruption() as interruption, self._bar(step) as bar:
                recorder.record()
                spent += 1  # the first batch is drawn from here on
                for batch in batches:
                    for group in step.optimizer.param_groups:
                        group["lr"] = recorder.learning_rate(batch.step)
                    step(batch)
                    if recorder.record():
                        bar.set_postfix_str(recorder.summary)
                    bar.update()
                    if interruption.requested and step.steps_spent < self.plan.steps:
                        raise self._stopped(step, recorder)
                    spent = step.steps_spent + 1
        finally:
            step.settle(min(spent, self.plan.steps))

    def _stopped(self, step: PrivateStep, recorder: Recorder) -> KeyboardInterrupt:
        done = f"stopped after {step.steps_spent} of {self.plan.steps} steps"
        if self.folder is None:
            return KeyboardInterrupt(f"{done}; a run without folder= cannot be resumed")
        recorder.checkpoint()
        return Interrupted(
            f"{done}; no progress is lost: resume from {self.folder} with fit(..., resume=True), "
            "or with --resume on the command line"
        )

    def _open(self, config: dict[str, Any], step: PrivateStep, resume: bool) -> Run:
        """Start the run, or restore the step from the run folder."""
        if self.folder is None:
            self._note_training(config)
            return Run(config, self.plan, environment=environment())
        # check again, now that nobody else can write
        problems = run_folders.folder_problems(self.folder, config, self.plan, resume)
        if problems:
            raise OwnerwiseError(problems)
        run_folders.drop_half_written(self.folder)
        run = Run(config, self.plan, environment=environment(), folder=self.folder)
        if run_folders.holds_a_run(self.folder):
            step.restore(self.folder)
            if earlier := read_config(self.folder)[0].get("earlier_trainings"):
                config["earlier_trainings"] = earlier
            run.history = run_folders.kept_history(self.folder, step.run_id, step.updates)
            run.environment = run_folders.with_earlier(self.folder, run.environment)
        else:
            self._note_training(config)
            step.open_account(self.folder, private=run.private)
        run_folders.begin(run, step.run_id)
        return run

    def _note_training(self, config: dict[str, Any]) -> None:
        """Record in the config how many times this process has already trained on these owners."""
        if self.seed is None and (earlier := note_training(self.plan)):
            config["earlier_trainings"] = earlier

    def _config(
        self,
        data: Any,
        validating: Evaluation | None,
        testing: Evaluation | None,
        groups_are: str | None,
        num_workers: int,
    ) -> dict[str, Any]:
        """Return the settings as JSON types."""
        is_function = callable(self.schedule)
        config = {
            **settings.describe_pretraining(self.model),
            **self.notes,
            "name": self.name,
            "label": self.label,
            "seed": self.seed,
            "model": self.notes.get("model", settings.describe_model(self.model)),
            "data": self.notes.get("data", settings.describe_data(data)),
            "loss": settings.describe_function(plain_loss(self.loss)),
            "optimizer": {
                "name": settings.describe_function(self.optimizer),
                "lr": self.lr,
                **self.optimizer_options,
            },
            "schedule": settings.describe_function(self.schedule) if is_function else self.schedule,
            "weights": settings.describe_plug(self.weights),
            "clipping": settings.describe_plug(self.clipping) or {"kind": "Standard"},
            "evaluate_every": self.evaluate_every,
            "checkpoint_every": self.checkpoint_every,
            "micro_batch_size": self.micro_batch_size,
            "lean": self.lean,
            "num_workers": num_workers,
            "loggers": [x if isinstance(x, str) else type(x).__name__ for x in self.loggers],
            "validation_records": validating.records if validating else 0,
            "test_records": testing.records if testing else 0,
            **self._groups(validating, testing, groups_are),
        }
        if self.averaging is not None:
            config["averaging"] = self.averaging
        if self.constraints is not None:
            config["constraints"] = self.constraints.settings()
        return json.loads(json.dumps(config, default=str))  # tuples become lists, as in the file

    def _groups(
        self, validating: Evaluation | None, testing: Evaluation | None, groups_are: str | None
    ) -> dict[str, Any]:
        """Return the kind of groups in validation and test data, and their budgets."""
        names = {
            name
            for evaluation in (validating, testing)
            if evaluation is not None and evaluation.groups is not None
            for name in map(group_name, np.unique(evaluation.groups).tolist())
        }
        budgets = settings.owner_budgets(names, self.plan.owners)
        if groups_are is None:
            known = "owners" if names == set(budgets) else "groups"
            groups_are = known if names else "classes"
        given = {group_name(group): value for group, value in (self.group_budgets or {}).items()}
        return {"groups_are": groups_are, "group_budgets": budgets | given}

    def _evaluation(self, data: Any, groups: Any, collate: Collate | None) -> Evaluation | None:
        if data is None and groups is None:
            return None
        return Evaluation(
            data, groups, collate=collate, predict=self.predict, constraints=self.constraints
        )

    def _bar(self, step: PrivateStep) -> tqdm:
        return tqdm(
            total=self.plan.steps,
            initial=step.steps_spent,
            desc=printable(self.label if self.seed is None else f"{self.label}, NOT PRIVATE"),
            unit="step",
            disable=None if self.progress is None else not self.progress,
        )
