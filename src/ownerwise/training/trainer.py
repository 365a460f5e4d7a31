"""The Trainer, which trains a model under a plan in a loop around the private step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from ownerwise.batches import Collate, NamedArrays, PoissonBatches
from ownerwise.errors import OwnerwiseError, printable
from ownerwise.evaluation import Evaluation
from ownerwise.mechanisms import (
    CLIPPING_RULES,
    ColumnStatistics,
    RegressionLoss,
    Release,
    plain_loss,
)
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.repair import PullAdjustment, closing_for
from ownerwise.runs import Run, environment, settings
from ownerwise.runs import folders as run_folders
from ownerwise.runs.reading import read_config
from ownerwise.step import PrivateStep
from ownerwise.training.averaging import Averaging
from ownerwise.training.checks import prepare
from ownerwise.training.held_out import held_out_counts
from ownerwise.training.interruption import Interrupted, Interruption
from ownerwise.training.learning_rates import factors
from ownerwise.training.outside_the_plan import not_private_reasons, note_training
from ownerwise.training.recording import Recorder
from ownerwise.training.settings import TrainerSettings
from ownerwise.wording import name_of


class Trainer(TrainerSettings):
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
        weights, clipping, performance: as for `PrivateStep`.
        device: where to train, such as "cuda"; the model is moved there. By default, the model
            stays where it is. Data may be anywhere.
        constraints: rate constraints, or another release, to train under. With rate constraints,
            targets in every data set contain the class and the cell (see `Partition.targets`). The
            plan accounts for the release (`plan(..., constraints=)`).
        calibration: the release from all records after training; by default `Calibration()` if the
            plan accounts for one (`plan(..., calibration=)`). The last history line then describes
            the calibrated model.
        repair: as for `PrivateStep`, such as `PullAdjustment(tau=1.0, counts=counts)`. Validation
            and test metrics describe the plain outputs, which are already corrected.
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
        loggers: "tensorboard", "wandb", "mlflow", or objects with start, log and finish (see
            `loggers`).
        progress: whether to show a progress bar; by default, only if the output is a terminal.
        notes: additional entries for the run's config, with JSON values. "model" and "data"
            describe the model and the data in words; "pretraining" says what they were pretrained
            on; "not_private" lists anything computed in advance without noise; "split" names the
            split of the data, so that reports compare methods split by split.
    """

    def fit(
        self,
        data: Any,
        *,
        validation: Any = None,
        validation_groups: Any = None,
        validation_owners: Any = None,
        test: Any = None,
        test_groups: Any = None,
        test_owners: Any = None,
        groups_are: str | None = None,
        num_workers: int = 0,
        collate: Collate | None = None,
        resume: bool = False,
    ) -> Run:
        """Take the planned steps and return the run.

        Args:
            data: (X, y) as tensors or arrays, or a map-style Dataset yielding (x, y); one row per
                record of the plan's owners, in the order of the owner ids passed to `Owners`. X may
                be a dict of arrays; if its keys are arguments of the model, they are passed as
                keywords.
            validation: validation data, evaluated for every history line; it is NOT covered by any
                guarantee.
            validation_groups: group of each validation record; by default its class, or the budget
                of its owner. Groups of fewer than `SMALLEST_GROUP` records are pooled by budget.
            validation_owners: owner of each validation record. Accuracy is then also measured per
                owner, and the report states how many owners are unprotected. Their ids are not
                recorded: name owners who are no people in `validation_groups`. With unit="owner",
                none of them may be in the plan.
            test, test_groups, test_owners: test data, evaluated once at the end.
            groups_are: what the groups are called; by default "owners" or "classes" if known,
                else "groups".
            num_workers, collate: as for `PoissonBatches`.
            resume: resume the run in `folder`, or start one if there is none. The settings and the
                plan must be the same. With a fixed seed, the result is bit-for-bit identical to an
                uninterrupted run, unless the data itself is random (augmentation) or the number of
                processes changes.

        Raises:
            OwnerwiseError: if there are any problems; it is raised before training and lists them
                all.
            Interrupted: on Ctrl-C or SIGTERM if the run has a folder, after a checkpoint is
                written.
        """
        data, validation, test = map(NamedArrays.of, (data, validation, test))
        validating = self._evaluation(validation, validation_groups, validation_owners, collate)
        testing = self._evaluation(test, test_groups, test_owners, collate)
        config = self._config(data, validating, testing, groups_are, num_workers)
        if reasons := not_private_reasons(self, data, {"validation": validation, "test": test}):
            config["not_private"] = reasons
        evaluated = {"validation": validating, "test": testing}
        step, stream, loggers = prepare(self, data, collate, evaluated, config, resume)
        factor = factors(self.schedule, step.plan.steps)
        with self._locked_folder():
            run = self._open(config, step, resume)
            run.model, run.to_classes = self.model, self.predict
            self.runs.append(run)
            recorder = Recorder(
                run,
                step,
                self.loss,
                lambda at: self.lr * factor(at),
                validating,
                testing,
                loggers,
                None if self.averaging is None else Averaging(self.averaging),
            )
            batches = PoissonBatches(
                data,
                step.plan,
                stream=stream,
                start=step.steps_spent,
                num_workers=num_workers,
                collate=collate,
                device=self.device,
            )
            self._train(batches, step, recorder, data, collate)
        return run

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Lock the run folder, if there is one, for the first of the processes."""
        with ExitStack() as stack:
            if self.path is not None:
                lock, processes = run_folders.FolderLock(self.path), Processes.here()
                processes.together(lambda: stack.enter_context(lock) if processes.first else None)
            yield

    def _train(
        self,
        batches: PoissonBatches,
        step: PrivateStep,
        recorder: Recorder,
        data: Any,
        collate: Collate | None,
    ) -> None:
        """Take the remaining steps, then give back those that were reserved but not begun.

        If the plan accounts for a release from all records (`data`), it follows the last step.

        After any failure, the step whose batch was being drawn or used counts as spent: if the
        batch were drawn again, the contents of batches would influence which batches are used.
        """
        spent = step.steps_spent
        try:
            with recorder, Interruption() as interruption, self._bar(step) as bar:
                if step.to_standardise:
                    spent += 1  # charged together with the statistics
                    step.standardise(data)
                recorder.record()
                spent = step.steps_spent + 1  # the first batch is drawn from here on
                for batch in batches:
                    for group in step.optimizer.param_groups:
                        group["lr"] = recorder.learning_rate(batch.step)
                    step(batch)
                    if recorder.record():
                        bar.set_postfix_str(recorder.summary)
                    bar.update()
                    requested = Processes.here().any(interruption.requested)
                    if requested and step.steps_spent < step.plan.steps:
                        raise self._stopped(step, recorder)
                    spent = step.steps_spent + 1
                if step.to_calibrate:
                    recorder.evaluate_before_calibration()
                    step.calibrate(data, collate=collate, after_sum=recorder.checkpoint)
                    recorder.record()
        finally:
            step.settle(min(spent, step.plan.steps))

    def _stopped(self, step: PrivateStep, recorder: Recorder) -> KeyboardInterrupt:
        done = f"stopped after {step.steps_spent} of {step.plan.steps} steps"
        if self.path is None:
            return KeyboardInterrupt(f"{done}; a run without folder= cannot be resumed")
        recorder.checkpoint()
        return Interrupted(
            f"{done}; no progress is lost: resume from {self.path} with fit(..., resume=True), "
            "or with --resume on the command line"
        )

    def _open(self, config: dict[str, Any], step: PrivateStep, resume: bool) -> Run:
        """Start the run, or restore the step from the run folder."""
        if self.path is None:
            self._note_training(config, step.plan)
            return Run(config, step.plan, environment=environment())
        path, processes = self.path, Processes.here()

        def check() -> bool:  # again, now that nobody else can write
            problems = run_folders.folder_problems(path, config, step.plan, resume)
            if problems:
                raise OwnerwiseError(problems)
            run_folders.drop_half_written(path)
            return run_folders.holds_a_run(path)

        run = Run(config, step.plan, environment=environment(), folder=path)
        if processes.on_first(check):
            step.restore(path)

            def read() -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
                return (
                    read_config(path)[0].get("earlier_trainings"),
                    run_folders.kept_history(path, step.run_id, step.updates),
                    run_folders.with_earlier(path, run.environment),
                )

            earlier, run.history, run.environment = processes.on_first(read)
            if earlier:
                config["earlier_trainings"] = earlier
        else:
            self._note_training(config, step.plan)
            step.open_account(path, private=run.private)
        run.identity = step.run_id
        processes.together(lambda: run_folders.begin(run) if processes.first else None)
        return run

    def _note_training(self, config: dict[str, Any], plan: Plan) -> None:
        """Record in the config how many times this process has already trained on these owners."""
        if self.seed is None and (earlier := note_training(plan)):
            config["earlier_trainings"] = earlier

    def _config(
        self,
        data: Any,
        validating: Evaluation | None,
        testing: Evaluation | None,
        groups_are: str | None,
        num_workers: int,
    ) -> dict[str, Any]:
        """Return the settings as JSON-compatible values."""
        notes, loss = self.notes or {}, plain_loss(self.loss)
        is_function = callable(self.schedule)
        config = {
            **settings.describe_pretraining(self.model),
            **notes,
            "name": self.name,
            "label": self.label,
            "seed": self.seed,
            "model": notes.get("model", settings.describe_model(self.model)),
            "data": notes.get("data", settings.describe_data(data)),
            "loss": settings.describe_function(loss),
            "optimizer": {
                "name": settings.describe_function(self.optimizer),
                "lr": self.lr,
                **(self.optimizer_options or {}),
            },
            "schedule": settings.describe_function(self.schedule) if is_function else self.schedule,
            "weights": settings.describe_plug(self.weights),
            "clipping": settings.describe_plug(self.clipping or CLIPPING_RULES.make("standard")),
            "evaluate_every": self.evaluate_every,
            "checkpoint_every": self.checkpoint_every,
            "micro_batch_size": self.performance.micro_batch_size,
            "lean": self.performance.lean,
            "num_workers": num_workers,
            "loggers": [x if isinstance(x, str) else type(x).__name__ for x in self.loggers],
            "validation_records": validating.records if validating else 0,
            "test_records": testing.records if testing else 0,
            **self._groups(validating, testing, groups_are),
        }
        evaluated = [each for each in (validating, testing) if each is not None]
        if held_out := held_out_counts(self.plan, evaluated):
            config["held_out_owners"] = held_out
        if self.device is not None:
            config["device"] = str(self.device)
        if isinstance(loss, partial):
            config["loss_options"] = loss.keywords
        if isinstance(loss, RegressionLoss):
            config["loss"], config["regression"] = str(loss), loss.settings()
        if (processes := Processes.here()).several:
            config["processes"] = processes.count
        if self.averaging is not None:
            config["averaging"] = self.averaging
        if self.constraints is not None:
            config["constraints"] = self.constraints.settings()
        if (closing := self.calibration or closing_for(self.plan)) is not None:
            config["calibration"] = closing.settings()
        if self.plan.opening_std is not None:
            config["statistics"] = ColumnStatistics().settings()
        if isinstance(self.repair, PullAdjustment):
            config["repair"] = self.repair.record(self.plan)
        return json.loads(json.dumps(config, default=str))  # tuples become lists, as in the file

    def _groups(
        self, validating: Evaluation | None, testing: Evaluation | None, groups_are: str | None
    ) -> dict[str, Any]:
        """Return the kind of groups in validation and test data, and their budgets."""
        given = [each for each in (validating, testing) if each is not None]
        names = {
            name
            for evaluation in given
            if evaluation.groups is not None
            for name in map(name_of, np.unique(evaluation.groups).tolist())
        }
        budgets = settings.owner_budgets(names, self.plan.owners)
        are_owners = bool(names) and (names == set(budgets) or all(e.by_owner for e in given))
        if groups_are is None:
            no_names = "groups" if isinstance(self.loss, RegressionLoss) else "classes"
            groups_are = "owners" if are_owners else "groups" if names else no_names
        budgets |= {name_of(group): value for group, value in (self.group_budgets or {}).items()}
        unit = self.plan.unit
        for evaluation in given:
            budgets |= evaluation.pool(budgets, unit, persons=evaluation.by_owner)
        shown = {
            name_of(name)
            for evaluation in given
            if evaluation.groups is not None
            for name in np.unique(evaluation.groups).tolist()
        }
        if names - shown:  # some were pooled, and owners who are no groups are not named either
            budgets = {name: value for name, value in budgets.items() if name in shown}
        return {
            "groups_are": "classes" if names and not shown else groups_are,
            "group_budgets": budgets,
        }

    def _evaluation(
        self, data: Any, groups: Any, owners: Any, collate: Collate | None
    ) -> Evaluation | None:
        if data is None and groups is None and owners is None:
            return None
        constraints = self.constraints
        if constraints is not None and type(constraints).measure is Release.measure:
            constraints = None  # it measures nothing, and targets contain no cells
        return Evaluation(
            data,
            groups,
            owners=owners,
            collate=collate,
            predict=self.predict,
            constraints=constraints,
        )

    def _bar(self, step: PrivateStep) -> tqdm:
        disabled = None if self.progress is None else not self.progress
        return tqdm(
            total=step.plan.steps,
            initial=step.steps_spent,
            desc=printable(self.label if self.seed is None else f"{self.label}, NOT PRIVATE"),
            unit="step",
            disable=disabled if Processes.here().first else True,
        )
