"""The private step: the only place where private data affects the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.batches import (
    Batch,
    Collate,
    Unloaded,
    checksum,
    device_of,
    moved,
    ownerless_problems,
    shared_rows,
)
from ownerwise.errors import OwnerwiseError, PlanError
from ownerwise.marks import marks_of
from ownerwise.mechanisms import (
    ClippingRule,
    Closing,
    ColumnStatistics,
    IndividualFilter,
    Loss,
    Peek,
    Plug,
    Randomness,
    Release,
    Standard,
    Weights,
    standardising_layers,
)
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream
from ownerwise.repair import (
    PullAdjustment,
    closing_for,
    subtract_from_outputs,
    subtract_in_hook,
)
from ownerwise.step import checkpoints
from ownerwise.step.account import Account
from ownerwise.step.account_file import OWN_FOLDER_ADVICE, read_account
from ownerwise.step.checks import (
    NO_BATCH,
    refuse_unloaded,
    refuse_unplanned,
    refuse_unshared,
    refuse_unusable,
)
from ownerwise.step.clipped_sums import ClippedSums
from ownerwise.step.closing import RECORDS_AT_ONCE, closing_sum, empty_inputs
from ownerwise.step.opening import opening_grid, opening_sum
from ownerwise.step.parameter_watch import ParameterWatch, learns, step_hooks
from ownerwise.step.performance import Performance
from ownerwise.step.plug_states import load_states, settings_of, states_of
from ownerwise.step.run_randomness import RunRandomness
from ownerwise.step.setup import NO_CLOSING, checked_setup, start_alike, take_state
from ownerwise.step.shared_account import SharedAccount
from ownerwise.step.spends_file import load_spends, save_spends
from ownerwise.step.wrappers import unwrapped

NOT_STANDARDISED = (
    "the plan accounts for column statistics, which have not been released: call "
    "step.standardise(data) once, before the first step and the first checkpoint"
)
NO_OPENING = (
    "the plan does not account for column statistics: make the plan with "
    "ow.plan(..., statistics=ow.ColumnStatistics())"
)


class PrivateStep:
    """Takes one accounted step per batch: `for batch in PoissonBatches(...): step(batch)`.

    The phases of a step are, in order: forward pass over the logical batch, noised release
    (optional), per-record loss, score, clipping rule, weights, sum, noise, division by the expected
    batch size, and optimizer. There is one forward pass; if the batch is split into micro-batches
    and a phase needs the whole batch, an additional forward-only pass comes first.

    Formal guarantee: with batches from `PoissonBatches` for the same plan, each record of owner o
    changes the sum by at most `plan.clip_norms[o]`, Gaussian noise of std `plan.noise_std_at(step)`
    is added once to the sum, and at most `plan.steps` steps are taken. This is the mechanism that
    the plan accounts for. Steering (by a plan with an adaptive clip norm, or by a clipping rule)
    scales clip norms and noise together and lowers sampling rates, based only on past outputs, so
    it never increases the privacy cost. The plan, the architecture
    and the optimizer's settings are public. The micro-batch size, the device and
    the number of processes affect only speed, the last bits of sums, and dropout masks.

    Args:
        model: an ordinary module; it is not wrapped. A pre-flight check lists all problems.
        plan: the plan, with owners. The step verifies the plan, unless this process has already
            done so, and keeps its own copy.
        optimizer: any torch optimizer that needs no closure and has no step hooks.
        loss: `loss(outputs, targets)`, called with `reduction="none"` (see `losses.per_record`);
            `loss(outputs, targets, released)` if there is a release.
        weights: weights computed from the whole batch, such as INO; the step binds them to the
            plan.
        clipping: the clipping rule. A steered rule (`ImportanceSampling`) releases a noisy count at
            every step, so the plan needs `release_std`.
        release: an additional release computed from the outputs; the plan needs `release_std`.
        calibration: the release from all records after training, made by `calibrate`; by default
            `Calibration()` if the plan accounts for one.
        repair: a shift that is added to the outputs before the loss, so that the model does not
            learn the tilt caused by the budgets. It cannot be used with weights or a release.
        stream: the run's secret stream (one root for batches and noise). The default is a new
            private stream; a stream with a fixed seed makes the run NOT private.
        performance: options that change only speed and memory, such as
            `ow.Performance(micro_batch_size=64)`.
        not_private: whether to keep the losses, norms and factors of the last batch in `peek`.
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
        calibration: Closing | None = None,
        repair: PullAdjustment | None = None,
        stream: SecretStream | None = None,
        performance: Performance | None = None,
        not_private: bool = False,
    ):
        self._processes = processes = Processes.here()
        model = unwrapped(model)
        rule: ClippingRule = Standard() if clipping is None else clipping
        performance = Performance() if performance is None else performance
        setup = processes.together(
            lambda: checked_setup(
                model, plan, optimizer, loss, rule,
                weights=weights, release=release, calibration=calibration, repair=repair,
                performance=performance, processes=processes,
            )
        )  # fmt: skip
        plan = setup.plan
        self.model = model
        self.plan = plan
        self.optimizer = optimizer
        self.weights = setup.weights
        self.clipping = rule
        self.steering = setup.steering
        self.release = None if release is None else release.bind(plan)
        closing = closing_for(plan) if calibration is None else calibration
        self.calibration = None if closing is None else closing.bind(plan)
        self.statistics = None if plan.opening_std is None else ColumnStatistics().bind(plan)
        self.repair = repair
        if repair is not None:
            repair.warn_if_clip_norms_differ(plan)
        self.performance = performance
        self.not_private = not_private
        self._sums = ClippedSums(
            model,
            plan,
            loss,
            rule,
            weights=self.weights,
            release=self.release,
            steering=setup.steering,
            shift=None if repair is None else repair.shift(plan),
            performance=performance,
            not_private=not_private,
            processes=processes,
        )
        start_alike(processes, model, optimizer, plan, self._plugs(), not_private=not_private)
        root = SecretStream() if stream is None else stream
        root.share(processes)
        draws = rule.randomised
        self._randomness = RunRandomness(plan, root, rule_draws=draws, rank=processes.rank)
        self._tried = False  # whether the model and the loss accept a batch
        self._spent = 0
        self._updates = 0
        self._opened = False  # whether the column statistics were drawn by this object
        self._private_so_far = not marks_of(model)
        self._account: Account | SharedAccount | None = None
        self._lock = threading.RLock()  # one thread at a time
        self._watch: ParameterWatch | None = None  # set in the first step

    @property
    def private(self) -> bool:
        """True if the guarantee holds: all randomness is secret, and no unnoised data is kept."""
        secret = self._randomness.noise.private and self._private_so_far and not self.not_private
        return secret and (self.weights is None or self.weights.private)

    @property
    def slack(self) -> float:
        """Fraction that rounding may add to a contribution; clip norms are divided by 1 + slack."""
        return self._sums.rounding.slack

    @property
    def filter(self) -> IndividualFilter | None:
        """NOT private: what each record has spent, if the plan has individual accounting."""
        return self._sums.filter

    @property
    def peek(self) -> Peek | None:
        """NOT private: details of the last batch, or None without `not_private=True`."""
        return self._sums.peek

    @property
    def steps_spent(self) -> int:
        """Number of steps accounted for so far; exceeding `plan.steps` raises an error."""
        return min(self._spent, self.plan.steps)

    @property
    def to_calibrate(self) -> bool:
        """Whether `calibrate` must still be called after the last step."""
        closing = self.calibration
        return closing is not None and closing.released < self.plan.closing_count

    @property
    def to_standardise(self) -> bool:
        """Whether `standardise` must still be called before the first step."""
        return self.statistics is not None and not self.statistics.released

    @property
    def updates(self) -> int:
        """Number of updates applied to the model; fewer than `steps_spent` after a crash."""
        return self._updates

    @property
    def run_id(self) -> str:
        """Identity of the run in its account; "" if it has no account yet."""
        return "" if self._account is None else self._account.run

    def epsilon(self) -> np.ndarray:
        """Return the epsilon spent so far for each owner's records."""
        return self.plan.epsilon(steps=self.steps_spent)

    def open_account(
        self, folder: str | PathLike, *, private: bool = True
    ) -> Account | SharedAccount:
        """Open the account of this run in `folder`: from now on, steps are counted there.

        `save` does this if there is no account yet. Each later step is recorded on disk before its
        noise is drawn. A folder that contains another run is rejected.

        Args:
            folder: the run's own folder.
            private: False if the caller computed something from the data without noise.
        """
        folder = Path(folder)
        private = private and self.private

        def opened() -> Account:
            balance = read_account(folder)
            if checkpoints.latest(folder) is not None or (balance and balance.spent):
                raise OwnerwiseError(
                    f"{folder} already contains a run: restore it with step.restore, or "
                    f"{OWN_FOLDER_ADVICE}"
                )
            return Account.open(folder, self.plan, private=private, spent=self._spent)

        self._account = self._accounted(opened)
        return self._account

    def _accounted(self, opened: Callable[[], Account]) -> Account | SharedAccount:
        """Return the account, which the first of several processes opens for all."""
        return SharedAccount(self._processes, opened) if self._processes.several else opened()

    def save(self, folder: str | PathLike, *, stays_open: bool = False) -> Path:
        """Write a checkpoint with the model, optimizer, plan hash and step counts, without the key.

        Steps that were reserved in the account but not begun are given back to it.

        Args:
            folder: the run's own folder, which must be the same in every call.
            stays_open: whether to keep the reserved steps and leave the account's file open, for
                callers such as the Trainer that call `settle` when they stop.
        """
        with self._lock:
            self._processes.agreed(self._to_save, ("the parameters of the model",), 0)
            account = self._account or self.open_account(folder)
            return self._processes.on_first(lambda: self._saved(account, Path(folder), stays_open))

    def _to_save(self) -> tuple[list[int], tuple[()]]:
        """Refuse a state that cannot be saved; return what the processes must agree on."""
        self._refuse_undeclared_changes()
        if self.to_standardise:
            raise OwnerwiseError(NOT_STANDARDISED)
        several = self._processes.several
        return [checksum(list(self.model.parameters())) if several else 0], ()

    def _saved(self, account: Account | SharedAccount, folder: Path, stays_open: bool) -> Path:
        """Write a checkpoint."""
        if account.folder != folder.resolve():
            raise OwnerwiseError(
                f"this run belongs to {account.folder}, but {folder} was passed: the steps of "
                "a run are counted in a single folder. Copy the checkpoint if you need it "
                "elsewhere"
            )
        if not stays_open:
            account.settle(self._counted)
            account.close()
        closing = self.calibration
        spends = None
        if self.filter is not None:
            identity = checkpoints.spends_identity(account.balance, self.plan)
            spends = save_spends(account.folder, self._updates, identity, self.filter.spent)
        return checkpoints.save(
            folder,
            account.balance,
            self.model,
            self.optimizer,
            updates=self._updates,
            steps_spent=self._spent,
            seed=self._randomness.seed,
            private=self.private,
            plugs=states_of(self._plugs()),
            plug_settings=settings_of(self._plugs()),
            subtracted=closing.shift if closing is not None and closing.outside else None,
            spends=spends,
        )

    def settle(self, steps: int) -> None:
        """Count the first `steps` steps in the account, and give back any reserved beyond them."""
        with self._lock:
            if self._account is not None:
                try:
                    self._account.settle(max(steps, self._counted))
                finally:
                    self._account.close()

    def restore(self, folder: str | PathLike) -> None:
        """Resume from the newest checkpoint in `folder`, counting every spent step.

        Call this before the first step, then iterate over `PoissonBatches(..., start=steps_spent)`.
        With a fixed seed, the run is repeated bit for bit as long as the micro-batch size and the
        number of processes stay the same: set `micro_batch_size` if a batch exceeds the memory
        target. Afterwards, no other process or PrivateStep can take steps in this run.
        """
        with self._lock:
            self._restore(Path(folder))

    def _restore(self, folder: Path) -> None:
        if self._updates or self._spent or self._account is not None:
            raise OwnerwiseError("call restore on a new PrivateStep, before its first step")
        processes, seed = self._processes, self._randomness.seed
        loaded: list[checkpoints.Checkpoint] = []

        def load() -> checkpoints.Progress:
            loaded.append(checkpoints.load(folder, self.plan, self.model, self.optimizer, seed))
            return loaded[0].progress

        stored = processes.on_first(load)
        processes.together(
            lambda: load_states(self._plugs(), stored.plugs, stored.plug_settings, stored.file)
        )
        if self.filter is not None:  # in one process
            self._restore_spends(self.filter, loaded[0])
        self._private_so_far &= stored.private
        self._account = self._accounted(
            lambda: Account.resume(folder, self.plan, loaded[0].balance, private=self.private)
        )
        self._updates, self._spent = stored.updates, stored.steps_spent
        if loaded:
            loaded[0].write()  # last, so that a rejected run leaves the model unchanged
        take_state(processes, self.model, self.optimizer)
        if (closing := self.calibration) is not None and closing.outside:
            assert closing.shift is not None
            subtract_in_hook(self.model, closing.shift, again=True)
        self._watch = ParameterWatch(self.model)

    def _restore_spends(self, individual: IndividualFilter, stored: checkpoints.Checkpoint) -> None:
        """Continue from the stored spends, and charge the steps since then as if all were clipped.

        What those steps released is unknown, and so are the gradients that they used.
        """
        identity = checkpoints.spends_identity(stored.balance, self.plan)
        if stored.spends is None:
            raise OwnerwiseError(f"{stored.path.name} does not say what each record has spent")
        try:
            individual.load(load_spends(stored.path, stored.spends, identity))
        except ValueError as error:
            raise OwnerwiseError(f"the spends of {stored.path.name} do not fit: {error}") from None
        individual.charge_lost(stored.progress.steps_spent - stored.steps_charged)

    @contextmanager
    def data_free_changes(self) -> Iterator[None]:
        """Declare that changes to the model within the context use no private data.

        From the first step on, a private run refuses to continue if anything but the step has
        changed the parameters, such as an optimizer step on un-noised gradients. Changes that use
        only public or released values have no privacy cost. Make such changes in this context, for
        instance to clamp or average weights, load public weights or replace a layer. Example: `with
        step.data_free_changes(), torch.no_grad(): weight.clamp_(-1, 1)`.
        """
        self._refuse_undeclared_changes()
        try:
            yield
        finally:
            self._private_so_far &= not marks_of(self.model)
            if self._watch is not None:
                self._watch = ParameterWatch(self.model)

    def _refuse_undeclared_changes(self) -> None:
        if self._watch is None or not self._watch.changed() or not self.private:
            return
        raise OwnerwiseError(
            "the model's parameters have been changed since the last private step by something "
            "other than the step. If the change used private records, the model is NOT private: "
            "make such updates only through the step. If it used no private records (clamping, "
            "averaging, public weights), make it inside `with step.data_free_changes():`"
        )

    def _plugs(self) -> dict[str, Plug]:
        """Return the plugs by name."""
        plugs = {
            "weights": self.weights,
            "clipping": self.clipping,
            "steering": self.steering,
            "release": self.release,
            "calibration": self.calibration,
            "statistics": self.statistics,
            "repair": self.repair,
        }
        return {name: plug for name, plug in plugs.items() if plug is not None}

    def __call__(self, batch: Batch, *others: Any) -> None:
        """Take one step. The optimizer updates the model; nothing else is released.

        Threads may share a PrivateStep: they enter it one at a time, and a batch for a step that
        was already taken is rejected. Before the first step, the dtypes and shapes of the batch are
        checked, so a mistake in them costs no step.
        """
        if others:
            raise OwnerwiseError(NO_BATCH.format(f"{1 + len(others)} arguments"))
        with self._lock:
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        step, processes = self._spent, self._processes
        names = ("the step", "the batch", "the parameters of the model")
        unloaded, marked = processes.agreed(lambda: self._admitted(batch), names, 2)
        self._private_so_far &= not marked
        if self._watch is None:
            self._watch = ParameterWatch(self.model)
        if self._account is not None:
            self._account.take(step, self.private)  # on disk before any noise is drawn
        self._spent = step + 1  # a step that fails midway counts: its noise may have been drawn
        if unloaded:
            processes.together(lambda: refuse_unloaded(batch))
        randomness, steering = self._randomness.of_step(step), self.steering
        scale, clip_scale = 1 / self.plan.expected_batch_size, 1.0
        if steering is not None:
            batch = steering.select(batch, randomness.rule)
            scale, clip_scale = scale / steering.keep_probability, steering.clip_scale
        sums = self.clipped_sum(batch, randomness)
        if self.filter is not None:
            self.filter.commit()  # before the noise, so that every release is charged
        self._update(self._randomness.noised(step, sums, clip_scale, scale), self._watch)
        if steering is not None:
            shrink = 1 + self._sums.rounding.release_slack
            total = torch.tensor([steering.total], dtype=torch.float64)
            (total,) = processes.summed(lambda: [total], [total])
            steering.update(float(randomness.release(total / shrink)) * shrink)
        self._updates += 1

    def _admitted(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Refuse a batch before anything is spent.

        Returns:
            The numbers that must be the same in all processes: the step, and checksums of the
            whole batch and of the parameters; and whether the records could not be loaded, and
            whether the run is not private in this process.
        """
        if self.to_standardise:
            raise OwnerwiseError(NOT_STANDARDISED)
        refuse_unplanned(batch, self._spent, self.plan)
        refuse_unshared(batch, self._processes)
        self._refuse_undeclared_changes()
        unloaded = isinstance(batch.data, Unloaded)
        if not self._tried and len(batch) and not unloaded:
            with self._processes.apart():
                refuse_unusable(self.model, self._sums.passes.plain_loss, batch)
            self._tried = True
        if self.private and batch.private and step_hooks(self.optimizer):
            raise OwnerwiseError(
                "the optimizer has step hooks, and what they write to the model cannot be "
                "distinguished from the private update: remove them, and do their work after "
                "step(batch)"
            )
        same = [0, 0, 0]
        if batch.share is not None:
            smallest = min(self.model.parameters(), key=Tensor.numel)
            same = [batch.step, batch.share.checksum, checksum([smallest])]
        private = self._private_so_far and batch.private
        return same, [int(unloaded), int(not private)]

    def _update(self, gradients: dict[nn.Parameter, Tensor], watch: ParameterWatch) -> None:
        """Let the optimizer update the model, and check that nothing else has changed it."""
        if self.private and not watch.covers(gradients):
            raise OwnerwiseError(
                "the model no longer has the parameters it had at the last step: replace layers "
                "inside `with step.data_free_changes():`, and add their parameters to the optimizer"
            )
        if watch.written():
            self._refuse_undeclared_changes()  # by the forward pass, the loss or a hook
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # for frozen parameters too
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        updated = True
        try:
            self.optimizer.step()
            updated = watch.changed() or not gradients or not learns(self.optimizer)
        finally:
            watch.note()
        for parameter in gradients:
            parameter.grad = None
        if not updated:
            raise OwnerwiseError(
                f"{type(self.optimizer).__name__}.step() did not update the model, but the step "
                "counts as spent. A wrapper that accumulates gradients over several calls skips "
                "updates; a private step always uses a whole batch: remove the accumulation, and "
                "set micro_batch_size if memory is limited"
            )

    def standardise(self, data: Any) -> None:
        """Make the plan's release of column statistics, and set the model's layer `Standardise`.

        Call this once, before the first step; the Trainer does so automatically. If the run has an
        account, its first step is charged before the noise is drawn: a run that fails before its
        first checkpoint cannot be repeated in the same folder.

        Args:
            data: the records, (X, y) in memory, as encoded with `scale="released"`.
        """
        with self._lock:
            self._standardise(data)

    def _standardise(self, data: Any) -> None:
        statistics, plan = self.statistics, self.plan
        if statistics is None:
            raise PlanError(NO_OPENING)
        if statistics.released or self._opened or self._spent:
            raise PlanError(
                "the column statistics have already been released, and the plan accounts for only "
                "one release"
            )
        if problems := ownerless_problems(plan):
            raise OwnerwiseError(problems)
        shared_rows(self._processes, data, plan)
        self._private_so_far &= not self._processes.any(bool(marks_of(data)))
        (layer,) = standardising_layers(self.model)
        total = opening_sum(plan, layer, data, self._processes)
        self._opened = True  # even if something fails from here on
        if self._account is not None:
            self._account.take(0, self.private)
        statistics.observe(self._randomness.opening(total, opening_grid(plan, layer)), layer)

    @property
    def _counted(self) -> int:
        """Number of steps that the account must count at least."""
        return max(self._spent, 1) if self._opened else self._spent

    def calibrate(
        self,
        data: Any,
        *,
        collate: Collate | None = None,
        after_sum: Callable[[], Any] | None = None,
    ) -> None:
        """Make the plan's release from all records, and use it to correct the model.

        Call this once, after the last step; the Trainer does so automatically. Steps that were not
        taken count as spent. After a crash, a sum that was charged but not saved is lost.

        Args:
            data, collate: as for `PoissonBatches`.
            after_sum: called after every sum but the last, for example to save a checkpoint.
        """
        with self._lock:
            self._calibrate(data, collate, after_sum)

    def _calibrate(
        self, data: Any, collate: Collate | None, after_sum: Callable[[], Any] | None
    ) -> None:
        closing, plan = self.calibration, self.plan
        if closing is None:
            raise PlanError(NO_CLOSING)
        if not self.to_calibrate:
            raise PlanError(
                "the model has already been calibrated, and the plan accounts for "
                "only one calibration"
            )
        if problems := ownerless_problems(plan):
            raise OwnerwiseError(problems)
        processes = self._processes
        rows = shared_rows(processes, data, plan, collate)
        processes.together(self._refuse_undeclared_changes)
        self._private_so_far &= not processes.any(bool(marks_of(data)))
        self._spent = spent = max(self._spent, plan.steps)
        if (account := self._account) is not None:
            processes.together(lambda: account.settle(spent))
        charged = self._spent - plan.steps
        for _ in range(closing.released, charged):
            closing.observe(None)  # lost in a crash
        at_once = self.performance.micro_batch_size or RECORDS_AT_ONCE
        for number in range(charged, plan.closing_count):
            if closing.released != number:  # it decides how much a record may contribute
                raise OwnerwiseError(
                    f"{type(closing).__name__}.released is {closing.released}; expected {number}, "
                    "the number of calls of `observe` so far"
                )
            if self._account is not None:
                self._account.take(plan.steps + number, self.private)
            self._spent = plan.steps + number + 1
            streams = self._randomness.of_closing(number)
            total = closing_sum(self.model, plan, closing, rows, *streams, at_once, processes)
            closing.observe(self._randomness.closing(number, total))
            if after_sum is not None and number + 1 < plan.closing_count:
                after_sum()
        if (shift := closing.shift) is not None:
            with self.data_free_changes():
                inputs = moved(empty_inputs(rows), device_of(self.model))
                closing.outside = not subtract_from_outputs(self.model, shift, inputs)

    def clipped_sum(
        self, batch: Batch, randomness: Randomness | None = None
    ) -> dict[nn.Parameter, Tensor]:
        """Return the weighted sum of clipped gradients; it is NOT private until noise is added."""
        with self._lock:  # a sum during a step would undo the charges of that step
            return self._sums(batch, Randomness() if randomness is None else randomness)

    def __repr__(self) -> str:
        kind = "private" if self.private else "NOT PRIVATE"
        done = f"{self._spent} of {self.plan.steps} steps"
        return f"PrivateStep({done}, {kind}, plan {self.plan.hash[:12]})"
