"""Check a model before the first step, and list all problems and their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.modules.lazy import LazyModuleMixin

from ownerwise.gradients.calls import call_model, map_tensors, tensors_in
from ownerwise.gradients.problems import (
    BATCH_STATISTICS,
    COMPILED,
    DEPENDS_ON_BATCH,
    RUNNING_STATISTICS,
    Problem,
    Refused,
)
from ownerwise.gradients.recomputation import uncompiled
from ownerwise.gradients.separation import Company, Trial, halves_by_copy
from ownerwise.gradients.state import State
from ownerwise.gradients.tape import Tape
from ownerwise.gradients.tracked_parameters import changed_by_data

__all__ = ["check"]

_SHARE = 1e-7  # largest change of an output in float64, relative to the record's outputs
_ROUNDED = 1e-5  # the same in the model's own precision


def check(model: nn.Module, *inputs: Any) -> list[Problem]:
    """Return all problems that prevent the computation of per-record gradients for `model`.

    Args:
        model: the model exactly as it will be trained (its mode and frozen parameters matter).
        inputs: optionally, a small sample batch (public or synthetic data) of at least two records.
            Running the model on this batch also finds problems in the model's code: calls without a
            rule, mixing of records, and parameters used where the tape does not see them. The
            model's state is restored afterwards.

    Returns:
        The problems; an empty list if the model has none.
    """
    problems = [p for name, module in model.named_modules() for p in _of_module(name, module)]
    problems += _of_parameters(model)
    if inputs and not any(isinstance(m, LazyModuleMixin) for m in model.modules()):
        problems += _of_run(model, inputs, {problem.where for problem in problems})
    return list(dict.fromkeys(problems))


def _of_module(name: str, module: nn.Module) -> Iterator[Problem]:
    where = f"{name or 'model'} ({type(module).__name__})"
    if isinstance(module, batchnorm._BatchNorm) and not isinstance(module, LazyModuleMixin):
        if module.training or module.running_mean is None:
            yield Problem(
                where,
                f"{BATCH_STATISTICS}, and running statistics are released without noise",
                f"replace it with {_instead_of(module)}",
            )
    elif isinstance(module, instancenorm._InstanceNorm):
        if module.track_running_stats and module.training:
            yield Problem(where, *RUNNING_STATISTICS)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            yield Problem(
                where,
                "max_norm rescales, in place, the rows that occur in the batch",
                "build it without max_norm",
            )
        if module.scale_grad_by_freq:
            yield Problem(
                where,
                f"scale_grad_by_freq {DEPENDS_ON_BATCH}",
                "build it with scale_grad_by_freq=False",
            )
    elif isinstance(module, torch.jit.ScriptModule):
        yield Problem(where, COMPILED, "pass the unscripted module")
    elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        yield Problem(
            where, "it reduces gradients itself, before they are clipped", "pass `.module`"
        )
    if isinstance(module, LazyModuleMixin):
        yield Problem(
            where,
            "its parameters have no shapes yet",
            "run the model once on an example before checking it",
        )


def _of_parameters(model: nn.Module) -> Iterator[Problem]:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        what = "no parameter requires a gradient"
        yield Problem("model", what, "unfreeze the parameters to train")
    for name, parameter in trainable:
        if isinstance(parameter, nn.UninitializedParameter):
            continue
        if parameter.is_complex():
            what = "complex parameters are not supported"
            yield Problem(name, what, "use separate real and imaginary parts")
        elif parameter.layout != torch.strided:
            what = f"layout {parameter.layout} is not supported"
            yield Problem(name, what, "use a dense parameter")


def _of_run(model: nn.Module, inputs: tuple[Any, ...], known: set[str]) -> list[Problem]:
    """Run the model on the sample; replace records to see whether others are affected."""
    count = next((len(t) for t in tensors_in(inputs) if t.dim()), 0)
    if count < 2:
        raise ValueError(f"the sample batch must have at least two records; got {count}")
    state = State(model)
    tape = Tape(model)
    tape.problems = collected = []
    mixing_is_known = any("BatchNorm" in where or "InstanceNorm" in where for where in known)
    problems: list[Problem] = []
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), uncompiled():
            torch.manual_seed(0)
            with tape:
                outputs = _called(model, inputs)
            if not mixing_is_known:
                state.restore()
                problems += _mixing_of(model, inputs, count, state)
                problems += _unseparated(tape, outputs, count)
    except Refused as refusal:
        problems.append(refusal.problem)
    finally:
        tape.reset()
        state.restore()
    return problems + _new(collected, known)


def _called(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return call_model(model, inputs[0]) if len(inputs) == 1 else model(*inputs)


def _unseparated(tape: Tape, outputs: Any, count: int) -> list[Problem]:
    """Backpropagate random losses; the tape lists the calls whose records it cannot tell apart."""
    flat = [t for t in tensors_in(outputs) if t.requires_grad and _has(t, count)]
    if not flat:
        what = f"no differentiable output has the {count} records along its first dimension"
        return [Problem("model", what, "return one output per record, along the first dimension")]
    losses = torch.zeros(count, dtype=flat[0].dtype, device=flat[0].device)
    for tensor in flat:
        losses = losses + (tensor * torch.randn_like(tensor)).reshape(count, -1).sum(dim=1)
    if not tape.problems:  # after a problem, some calls lack contributions
        tape.backward(losses)
    return []


def _new(problems: list[Problem], known: set[str]) -> list[Problem]:
    """Return the problems that the run found but the module checks did not."""
    names = [where.split(" ")[0] for where in known]
    return [p for p in problems if not any(f"({name}." in p.where for name in names)]


def _mixing_of(
    model: nn.Module, inputs: tuple[Any, ...], count: int, state: State
) -> list[Problem]:
    """Return the problems of `_mixing`; not every model takes zeros for its integers (lengths)."""
    try:
        return list(_mixing(model, inputs, count, with_zeros=True))
    except (RuntimeError, ValueError, IndexError):
        state.restore()
        return list(_mixing(model, inputs, count, with_zeros=False))


def _mixing(
    model: nn.Module, inputs: tuple[Any, ...], count: int, *, with_zeros: bool
) -> Iterator[Problem]:
    """Yield problems if replacing records changes other records' outputs or the state.

    The sample itself runs with gradients and the others without, so a model that mixes records in
    one of the two modes alone is found. The number of records never changes: a model that cannot
    process a single record is not rejected here.
    """

    def arguments(rows: list[int]) -> tuple[Any, bool]:
        def at_rows(tensor: Tensor) -> Tensor:
            return _with_another(tensor, with_zeros)[rows] if _has(tensor, count) else tensor

        return map_tensors(at_rows, inputs), rows == trial.rows

    def outputs(model: nn.Module, inputs: tuple[Any, ...], gradients: bool) -> list[Tensor]:
        with torch.set_grad_enabled(gradients):
            found = tensors_in(_called(model, inputs))
        return [tensor.detach().clone() for tensor in found if _has(tensor, count)]

    def replaced(rows: list[int], random: bool) -> list[Company]:
        kept = rows[:-1]
        return [Company([*kept, count], kept, kept), *halves_by_copy(rows)]

    trial = Trial(arguments, outputs, list(range(count)), replaced)
    runs = trial.run(model)
    for name in dict.fromkeys(runs.changed):
        yield changed_by_data(name).problem
    if not trial.outputs_agree(model, runs, _SHARE, rounded=_ROUNDED, fallback=_ROUNDED):
        yield Problem(
            "model",
            "the output for one record depends on another record in the batch",
            "make every operation treat each record separately (no statistics over dimension 0)",
        )


def _with_another(records: Tensor, with_zeros: bool) -> Tensor:
    """Return the records and, behind them, one to replace the last with.

    It is another record of the sample, or zeros if all are equal. Without `with_zeros`, integers
    that are equal in all records stay as they are.
    """
    last = records[-1:]
    others = (records != last).reshape(len(records), -1).any(dim=1).nonzero()
    if len(others):
        another = records[int(others[0]) :][:1]
    else:
        another = torch.zeros_like(last) if with_zeros or last.is_floating_point() else last
    return torch.cat([records, another * 2 if records.is_floating_point() else another])


def _has(tensor: Tensor, count: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == count


def _instead_of(module: batchnorm._BatchNorm) -> str:
    """Return the code for a layer that normalises each record separately.

    Groups have at least four channels, because without spatial dimensions the output of a
    one-channel group is always 0.
    """
    channels = module.num_features
    groups = next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels >= 4 * g), 1)
    grouped = f"nn.GroupNorm({groups}, {channels})"
    if isinstance(module, nn.BatchNorm1d):
        return f"nn.LayerNorm({channels}), or {grouped} on [records, {channels}, length]"
    return grouped
