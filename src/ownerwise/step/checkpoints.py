"""Checkpoints: a private run can stop at any time and resume within its budgets.

A checkpoint is one safetensors file with the model, the optimizer and a JSON header (format
version, plan hash, step counts), all covered by one SHA-256. Each file is written atomically. The
key of a private run is never stored, because anyone who has the key and the position can subtract
the noise; a resumed run draws a fresh key.

Next to the checkpoints, `steps.json` is the ledger of steps whose results may have left the process
through a history line or a checkpoint. It is updated before anything leaves and never decreases, so
steps are never under-counted. After a crash, a private run continues from its last checkpoint; the
steps whose updates were lost stay spent, so the run ends that many updates early. A run with a
fixed seed (not private) repeats the lost steps bit for bit instead. A folder holds one run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_json, write_whole
from ownerwise.planning import Plan

LEDGER = "steps.json"
_HEADER = "ownerwise"
_HASH = "sha256"
FORMAT = 1
"""Increase it when the layout changes, and upgrade or refuse older files in `check_format`."""
OWN_FOLDER = "give each run its own folder"


@dataclass(frozen=True)
class Checkpoint:
    """The data a run needs to resume.

    Attributes:
        updates: number of updates applied to the stored model.
        steps_spent: steps accounted for, at least `updates`; the resumed run starts here.
        seed: the fixed seed of a run that is NOT private, else None.
        private: whether the guarantee has held so far.
        plugs: {name: state} for the stateful plugs.
        path: the file.
    """

    updates: int
    steps_spent: int
    seed: int | None
    private: bool
    plugs: dict[str, Any]
    path: Path


def record_steps(folder: str | os.PathLike, plan: Plan, steps: int) -> None:
    """Record in the ledger that `steps` steps are spent; call it before any result leaves.

    The ledger never decreases. A folder that belongs to another plan is refused.
    """
    path = Path(folder) / LEDGER
    if path.exists():
        problems: list[str] = []
        steps = max(steps, _ledger_steps(path.parent, plan, problems))
        if problems:
            raise OwnerwiseError([*problems, f"{folder}: {OWN_FOLDER}"])
    content = {"format": FORMAT, "plan": plan.hash, "steps_spent": steps}
    write_json(path, content, indent=None)


def save(
    folder: str | os.PathLike,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    updates: int,
    steps_spent: int,
    seed: int | None,
    private: bool = True,
    plugs: Mapping[str, Any] | None = None,
) -> Path:
    """Update the ledger, then write a checkpoint into `folder` and return its path.

    Args:
        folder: the run's folder.
        plan, model, optimizer: the run's plan, model and optimizer.
        updates: number of updates applied to the model.
        steps_spent: steps accounted for, at least `updates`.
        seed: seed of the run's stream; None if the stream is secret.
        private: whether the guarantee has held so far.
        plugs: {name: state} for the stateful plugs, as JSON types.
    """
    record_steps(folder, plan, steps_spent)
    tensors, state = _flatten_optimizer(optimizer)
    for name, tensor in model.state_dict().items():
        tensors[f"model.{name}"] = tensor
    header = {
        "format": FORMAT,
        "plan": plan.hash,
        "updates": updates,
        "steps_spent": steps_spent,
        "seed": seed,
        "private": private,
        "optimizer": state,
        "held": _optimizer_layout(model, optimizer),
        "plugs": dict(plugs or {}),
    }
    path = Path(folder) / f"checkpoint-{updates:08d}.safetensors"
    contents = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(header)
    metadata = {_HEADER: text, _HASH: _content_hash(text, contents)}
    write_whole(path, lambda file: save_file(contents, file, metadata=metadata))
    return path


def latest(folder: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint in a folder, or None."""
    paths = sorted(Path(folder).glob("checkpoint-*.safetensors"))
    return paths[-1] if paths else None


def state_dict(path: str | os.PathLike) -> dict[str, Tensor]:
    """Return the model's `state_dict` stored in a checkpoint."""
    return _model_tensors(_read(Path(path))[1])


def load(
    path: str | os.PathLike,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int | None,
) -> Checkpoint:
    """Load model and optimizer from a checkpoint and return the state of the run.

    `seed` is the seed of the resuming run (None if private) and must match the stored one.
    """
    path = Path(path)
    header, tensors = _read(path)
    problems = []
    if header["plan"] != plan.hash:
        problems.append(
            f"{path.name} belongs to plan {header['plan'][:12]}, but this run has plan "
            f"{plan.hash[:12]}: resume with the run's own plan"
        )
    if header["seed"] != seed:
        problems.append(
            f"{path.name} comes from a run with {_seed_name(header['seed'])}, but this run has "
            f"{_seed_name(seed)}: resume with the same kind of stream"
        )
    spent = max(header["steps_spent"], _ledger_steps(path.parent, plan, problems))
    stored = _model_tensors(tensors)
    expected, actual = _kinds(stored), _kinds(model.state_dict())
    if wrong := sorted({name for name, _ in expected.items() ^ actual.items()}):
        name = wrong[0]
        problems.append(
            f"{path.name} holds a different model: {name} is {expected.get(name, 'missing')} in "
            f"the file and {actual.get(name, 'missing')} here; build the run's own model"
        )
    elif header["held"] != _optimizer_layout(model, optimizer):
        problems.append(
            f"{path.name} holds the state of {header['held'][0]}, but this run has "
            f"{type(optimizer).__name__} or different parameter groups; build the run's own "
            "optimizer"
        )
    if problems:
        raise OwnerwiseError(problems)
    model.load_state_dict(stored)
    optimizer.load_state_dict(_restore_optimizer(header["optimizer"], tensors))
    steps_spent = header["steps_spent"] if seed is not None else spent
    private, plugs = header.get("private", seed is None), header.get("plugs", {})
    return Checkpoint(header["updates"], steps_spent, seed, private, plugs, path)


def _model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def _seed_name(seed: int | None) -> str:
    return "a secret key" if seed is None else f"the fixed seed {seed} (not private)"


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor as text."""
    return {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}


def _optimizer_layout(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's class name, then the parameter names of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def _content_hash(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name, kind in sorted(_kinds(tensors).items()):
        digest.update(f"{name} {kind}".encode())
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text, stored_hash = metadata[_HEADER], metadata[_HASH]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(text)
        check_format(path, header["format"])
        if _content_hash(text, tensors) != stored_hash:
            raise OwnerwiseError(f"{path} is damaged: its content does not match its hash")
        return header, tensors
    except FileNotFoundError:
        raise OwnerwiseError(f"no checkpoint at {path}") from None
    except OwnerwiseError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise OwnerwiseError(f"{path} is damaged or not an ownerwise checkpoint") from None


def check_format(path: Path, version: Any) -> None:
    """Refuse a checkpoint, ledger or settings file whose format this version does not know."""
    if version != FORMAT:
        raise OwnerwiseError(
            f"{path} has format {version}, but this version of ownerwise reads format {FORMAT}: "
            "use the version that wrote it, or start a new run"
        )


def _ledger_steps(folder: Path, plan: Plan, problems: list[str]) -> int:
    path = folder / LEDGER
    try:
        ledger = json.loads(path.read_text(encoding="utf-8"))
        plan_hash, steps = str(ledger["plan"]), int(ledger["steps_spent"])
        check_format(path, ledger["format"])
    except OwnerwiseError as error:
        problems += error.problems
        return 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        problems.append(
            f"the ledger {LEDGER} next to the checkpoint is missing or damaged: the number of "
            "spent steps is unknown, so the run cannot resume within its budgets"
        )
        return 0
    if plan_hash != plan.hash:
        problems.append(
            f"the ledger {LEDGER} belongs to plan {plan_hash[:12]}, but this run has plan "
            f"{plan.hash[:12]}"
        )
    return steps


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
