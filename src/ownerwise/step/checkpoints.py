"""Checkpoints: a private run can be stopped at any moment and goes on within its budgets.

A checkpoint is one safetensors file: model, optimizer, and as its JSON header the plan's hash and
the steps, under one SHA-256. It is written whole or not at all. The key of a private run is never
written (who holds key and position can subtract the noise): a resumed run draws a fresh one. Beside
the checkpoints lies `steps.json`, the ledger of steps whose results may have left the process (a
history line, a checkpoint). It is brought up to date before they do, and never goes back, so steps
are never under-counted: after a crash a private run redoes the updates since its last checkpoint,
the steps spent on the lost ones stay spent, and it ends that many updates early. With a fixed seed
(not private) the lost steps are redrawn bit for bit instead. A folder holds one run.
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
from ownerwise.planning import (
    Plan,
)

LEDGER = "steps.json"
_HEADER = "ownerwise"
_HASH = "sha256"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
        updates: updates that the stored model has received.
        steps_spent: steps accounted, at least `updates`; a resumed run starts its plan here.
        seed: the fixed seed of a run that is NOT private, else None.
        private: whether the guarantee held up to here.
        plugs: {name: state} of the plugs that have one.
        path: the file.
    """

    updates: int
    steps_spent: int
    seed: int | None
    private: bool
    plugs: dict[str, Any]
    path: Path


def record_steps(folder: str | os.PathLike, plan: Plan, steps: int) -> None:
    """Write into the ledger that `steps` steps are spent, before any result of them leaves.

    The ledger never goes back: if it holds more, that stays. A folder of another plan is refused.
    """
    path = Path(folder) / LEDGER
    if path.exists():
        problems: list[str] = []
        steps = max(steps, _ledger_steps(path.parent, plan, problems))
        if problems:
            raise OwnerwiseError([*problems, f"{folder}: give every run a folder of its own"])
    content = {"format": _FORMAT, "plan": plan.hash, "steps_spent": steps}
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
    """Write a checkpoint into `folder`, the ledger first, and return its path.

    Args:
        folder: that of the run.
        plan, model, optimizer: those of the run.
        updates: that the model has received.
        steps_spent: at least as many.
        seed: of the run's stream, None if it is secret.
        private: whether the guarantee held so far.
        plugs: {name: state} of plugs that remember something, as JSON types.
    """
    record_steps(folder, plan, steps_spent)
    tensors, state = _flatten_optimizer(optimizer)
    for name, tensor in model.state_dict().items():
        tensors[f"model.{name}"] = tensor
    header = {
        "format": _FORMAT,
        "plan": plan.hash,
        "updates": updates,
        "steps_spent": steps_spent,
        "seed": seed,
        "private": private,
        "optimizer": state,
        "held": _held(model, optimizer),
        "plugs": dict(plugs or {}),
    }
    path = Path(folder) / f"checkpoint-{updates:08d}.safetensors"
    contents = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(header)
    metadata = {_HEADER: text, _HASH: _content_hash(text, contents)}
    write_whole(path, lambda file: save_file(contents, file, metadata=metadata))
    return path


def latest(folder: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint of a folder, or None."""
    found = sorted(Path(folder).glob("checkpoint-*.safetensors"))
    return found[-1] if found else None


def weights(path: str | os.PathLike) -> dict[str, Tensor]:
    """Return the model's tensors in a checkpoint, by the names of its `state_dict`."""
    return _of_model(_read(Path(path))[1])


def load(
    path: str | os.PathLike,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int | None,
) -> Checkpoint:
    """Fill model and optimizer from a checkpoint and return where the run stands.

    `seed` is that of the run which goes on, None if private; it must be the stored one's.
    """
    path = Path(path)
    header, tensors = _read(path)
    problems = []
    if header["plan"] != plan.hash:
        problems.append(
            f"{path.name} belongs to plan {header['plan'][:12]}, given was {plan.hash[:12]}: "
            "resume with the plan of the run"
        )
    if header["seed"] != seed:
        problems.append(
            f"{path.name} comes from a run with {_seed_name(header['seed'])}, this one has "
            f"{_seed_name(seed)}: resume with the same kind of stream"
        )
    spent = max(header["steps_spent"], _ledger_steps(path.parent, plan, problems))
    stored = _of_model(tensors)
    there, here = _kinds(stored), _kinds(model.state_dict())
    if wrong := sorted({name for name, _ in there.items() ^ here.items()}):
        name = wrong[0]
        problems.append(
            f"{path.name} holds another model: {name} is {there.get(name, 'missing')} in the file "
            f"and {here.get(name, 'missing')} here; build the model of the run"
        )
    elif header["held"] != _held(model, optimizer):
        problems.append(
            f"{path.name} holds the state of {header['held'][0]}, given was a "
            f"{type(optimizer).__name__} or other groups of parameters; build the optimizer of the "
            "run"
        )
    if problems:
        raise OwnerwiseError(problems)
    model.load_state_dict(stored)
    optimizer.load_state_dict(_restore_optimizer(header["optimizer"], tensors))
    steps_spent = header["steps_spent"] if seed is not None else spent
    private, plugs = header.get("private", seed is None), header.get("plugs", {})
    return Checkpoint(header["updates"], steps_spent, seed, private, plugs, path)


def _of_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def _seed_name(seed: int | None) -> str:
    return "a secret key" if seed is None else f"the fixed seed {seed} (not private)"


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of every tensor, in words."""
    return {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}


def _held(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's class, then the names of the parameters of each of its groups."""
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
            text, content = metadata[_HEADER], metadata[_HASH]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(text)
        if header["format"] != _FORMAT:
            raise OwnerwiseError(f"{path.name} has format {header['format']}, not {_FORMAT}")
        if _content_hash(text, tensors) != content:
            raise OwnerwiseError(f"{path} is damaged: its content hash differs")
        return header, tensors
    except FileNotFoundError:
        raise OwnerwiseError(f"no checkpoint at {path}") from None
    except OwnerwiseError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise OwnerwiseError(f"{path} is not a checkpoint of ownerwise, or damaged") from None


def _ledger_steps(folder: Path, plan: Plan, problems: list[str]) -> int:
    path = folder / LEDGER
    try:
        ledger = json.loads(path.read_text(encoding="utf-8"))
        plan_hash, steps = str(ledger["plan"]), int(ledger["steps_spent"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        problems.append(
            f"the ledger {LEDGER} beside the checkpoint is missing or damaged: how many steps were "
            "spent is not known, so the run cannot go on within its budgets"
        )
        return 0
    if plan_hash != plan.hash:
        problems.append(
            f"the ledger {LEDGER} belongs to plan {plan_hash[:12]}, given was {plan.hash[:12]}"
        )
    return steps


def _flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by name, and the rest as JSON types."""
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
