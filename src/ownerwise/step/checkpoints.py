"""Checkpoints, which let a private run stop at any time and resume within its budgets.

A checkpoint (`checkpoint_file`) contains the model, the optimizer, the states of plugs and the step
counts. The key of a private run is never stored, because anyone who knows the key and the position
in the stream can subtract the noise; a resumed run draws a fresh key.

The account (see `account`) counts steps before they are taken. A checkpoint identifies the
account's last event, so an older copy of the account is detected. After a crash, a private run
continues from its last checkpoint; the steps whose updates were lost remain spent, so the run ends
with that many fewer updates. A run with a fixed seed (not private) repeats the lost steps bit for
bit instead. Each folder contains only one run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.planning import Plan
from ownerwise.repair import subtract_in_hook
from ownerwise.step.account_file import Balance, read_account
from ownerwise.step.checkpoint_file import (
    FORMAT,
    check_format,
    kinds,
    latest,
    newest,
    newest_header,
    stored,
    write,
)
from ownerwise.step.spends_file import drop_older, load_spends

__all__ = [
    "FORMAT",
    "Checkpoint",
    "Progress",
    "account_problems",
    "check_format",
    "individual_spends",
    "latest",
    "load",
    "load_model",
    "newest_header",
    "save",
    "spends_identity",
    "state_dict",
    "stored",
]


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        updates: number of updates applied to the stored model.
        steps_spent: steps accounted for, at least `updates`; the resumed run starts here.
        private: whether the guarantee has held so far.
        plugs: {name: state} for the stateful plug-ins.
        plug_settings: {name: settings} for the same plug-ins; empty in older files.
        file: name of the file.
    """

    updates: int
    steps_spent: int
    private: bool
    plugs: dict[str, Any]
    plug_settings: dict[str, Any]
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """The data a run needs to resume.

    Attributes:
        progress: how far the run has come.
        path: the file.
        balance: state of the account.
        steps_charged: the steps that the stored spends include.
        spends: the hash that names the file of spends; None without individual accounting.
        write: writes the stored tensors to the model and the optimizer.
    """

    progress: Progress
    path: Path
    balance: Balance
    steps_charged: int
    spends: str | None
    write: Callable[[], None]


def save(
    folder: str | os.PathLike,
    balance: Balance,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    updates: int,
    steps_spent: int,
    seed: int | None,
    private: bool = True,
    plugs: Mapping[str, Any] | None = None,
    plug_settings: Mapping[str, Any] | None = None,
    subtracted: Tensor | None = None,
    spends: str | None = None,
) -> Path:
    """Write a checkpoint into `folder`, delete all but the two newest, and return its path.

    Args:
        folder: the run's folder.
        balance: state of the run's account, which counts at least `steps_spent` steps.
        model, optimizer: the run's model and optimizer.
        updates: number of updates applied to the model.
        steps_spent: steps accounted for, at least `updates`.
        seed: seed of the run's stream; None if the stream is secret.
        private: whether the guarantee has held so far.
        plugs: {name: state} for the stateful plug-ins, as JSON types.
        plug_settings: {name: settings} for the same plug-ins.
        subtracted: what a forward hook subtracts from the model's outputs, [classes].
        spends: the hash that names the file of spends, with individual accounting.
    """
    tensors, state = _flatten_optimizer(optimizer)
    for name, tensor in model.state_dict().items():
        tensors[f"model.{name}"] = tensor
    header = {
        "run": balance.run,
        "account": balance.head,
        "plan": balance.plan,
        "updates": updates,
        "steps_spent": steps_spent,
        "seed": seed,
        "private": private,
        "optimizer": state,
        "held": _optimizer_layout(model, optimizer),
        "plugs": dict(plugs or {}),
        "plug_settings": dict(plug_settings or {}),
    }
    if subtracted is not None:
        header["subtracted"] = subtracted.tolist()
    if spends is None:
        return write(folder, updates, header, tensors)
    path = write(folder, updates, {**header, "spends": spends}, tensors)
    drop_older(path, spends)
    return path


def individual_spends(folder: str | os.PathLike) -> np.ndarray:
    """NOT PRIVATE: return the spends that belong to the newest checkpoint, int64."""
    path, header, _ = newest(folder)
    if "spends" not in header:
        raise OwnerwiseError(f"{path.name} has no spends: the plan has no individual accounting")
    return load_spends(path, header["spends"])


def spends_identity(balance: Balance, plan: Plan) -> str:
    """Return what a file of spends belongs to: the run, the plan and the order of the records."""
    assert plan.owners is not None
    assert plan.owners.record_owner_index is not None
    order = np.ascontiguousarray(plan.owners.record_owner_index, dtype="<i8").tobytes()
    return f"{balance.run} {plan.hash} {hashlib.sha256(order).hexdigest()}"


def state_dict(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Return the model's `state_dict` from the newest checkpoint that is not corrupted."""
    return _model_tensors(newest(folder)[2])


def load_model(folder: str | os.PathLike, model: nn.Module) -> None:
    """Load the newest checkpoint that is not corrupted into a model of the same architecture."""
    path, header, tensors = newest(folder)
    model_tensors = _model_tensors(tensors)
    if problems := _model_problems(path, model_tensors, model):
        raise OwnerwiseError(problems)
    model.load_state_dict(model_tensors)
    if "subtracted" in header:
        subtract_in_hook(model, torch.tensor(header["subtracted"]).double(), again=True)


def load(
    folder: str | os.PathLike,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int | None,
) -> Checkpoint:
    """Return the run's state from the newest checkpoint, which must fit the model and optimizer.

    The model and the optimizer are not changed until the caller calls `write()` on the result.

    `seed` is the seed of the resuming run (None if private) and must match the stored one.
    """
    path, header, tensors = newest(folder)
    problems = Problems()
    if header["plan"] != plan.hash:
        problems.add(
            f"{path.name} belongs to plan {header['plan'][:12]}, but this run has plan "
            f"{plan.hash[:12]}: resume with the run's original plan"
        )
    if header["seed"] != seed:
        problems.add(
            f"{path.name} comes from a run with {_seed_name(header['seed'])}, but this run has "
            f"{_seed_name(seed)}: resume with the same kind of stream"
        )
    balance = None
    with problems.guard():
        balance = read_account(path.parent)
        problems += account_problems(balance, header, path.name)
    model_tensors = _model_tensors(tensors)
    if wrong := _model_problems(path, model_tensors, model):
        problems += wrong
    elif header["held"] != _optimizer_layout(model, optimizer):
        problems.add(
            f"{path.name} contains the state of {header['held'][0]}, but this run has "
            f"{type(optimizer).__name__} or different parameter groups; build the same optimizer "
            "as in the original run"
        )
    problems.raise_()
    assert balance is not None

    def write_to_model() -> None:
        model.load_state_dict(model_tensors)
        optimizer.load_state_dict(_restore_optimizer(header["optimizer"], tensors))

    steps_spent = header["steps_spent"] if seed is not None else balance.spent
    private = header.get("private", seed is None) and balance.private is not False
    progress = Progress(
        header["updates"],
        steps_spent,
        private,
        header.get("plugs", {}),
        header.get("plug_settings", {}),
        path.name,
    )
    return Checkpoint(
        progress, path, balance, header["steps_spent"], header.get("spends"), write_to_model
    )


def account_problems(balance: Balance | None, header: dict[str, Any], name: str) -> list[str]:
    """Return every reason why an account does not belong to a checkpoint called `name`."""
    if balance is None or (balance.head is None and header["format"] > 1):
        return [
            f"the account next to {name} is missing, so the number of spent steps is unknown and "
            "the run cannot be used within its budgets"
        ]
    problems = []
    if balance.plan != header["plan"]:
        problems.append(
            f"the account belongs to plan {balance.plan[:12]}, but {name} belongs to "
            f"plan {header['plan'][:12]}: one of them is from another run"
        )
    if header["format"] > 1 and balance.run != header["run"]:
        problems.append(
            f"the account belongs to run {balance.run[:12]}, but {name} belongs to "
            f"run {header['run'][:12]}: one of them is from another folder"
        )
    elif header["format"] > 1 and not balance.holds(header["account"]):
        problems.append(
            f"the account is older than {name}: an old copy that lacks the newest steps was "
            "restored. Restore the newest account"
        )
    spent = max(header["steps_spent"], header["updates"])
    if balance.spent < spent and not problems:
        problems.append(
            f"the account counts {balance.spent} steps, but {name} records {spent}: an old copy of "
            "the account was restored. Restore the newest account"
        )
    return problems


def _model_problems(path: Path, stored: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return a problem if the model has other tensors than the checkpoint."""
    expected, actual = kinds(stored), kinds(model.state_dict())
    wrong = sorted({name for name, _ in expected.items() ^ actual.items()})
    return [
        f"{path.name} contains a different model: {name} is {expected.get(name, 'missing')} in the "
        f"file and {actual.get(name, 'missing')} here; build the same model as in the original run"
        for name in wrong[:1]
    ]


def _model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def _seed_name(seed: int | None) -> str:
    return "a secret key" if seed is None else f"the fixed seed {seed} (not private)"


def _optimizer_layout(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's class name, followed by the parameter names of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def _flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by name, and the rest of its state as JSON types."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        plain[str(number)] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                plain[str(number)][name] = value
    groups = [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
        }
        for group in state["param_groups"]
    ]
    return tensors, {"state": plain, "param_groups": groups}


def _restore_optimizer(plain: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(n): dict(v) for n, v in plain["state"].items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, entry = name.split(".", 2)
            state.setdefault(int(number), {})[entry] = tensor
    groups = [
        {
            name: tuple(value) if isinstance(value, list) and name != "params" else value
            for name, value in group.items()
        }
        for group in plain["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
