"""Checkpoints, which let a private run stop at any time and resume within its budgets.

A checkpoint is one safetensors file with the model, the optimizer and a JSON header (format
version, run, plan hash, step counts). One SHA-256 hash covers the header, and the header contains
another one for the tensors. Each file is written atomically, and the two newest are kept: if the
newest is corrupted, a run resumes from the previous one. The key of a private run is never stored,
because anyone who knows the key and the position in the stream can subtract the noise; a resumed
run draws a fresh key.

The account (see `account`) counts steps before they are taken. A checkpoint identifies the
account's last event, so an older copy of the account is detected. After a crash, a private run
continues from its last checkpoint; the steps whose updates were lost remain spent, so the run ends
with that many fewer updates. A run with a fixed seed (not private) repeats the lost steps bit for
bit instead. Each folder contains only one run.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.files import (
    ANYTHING,
    DIGEST,
    FLAG,
    INTEGER,
    TEXT,
    WHOLE,
    fields,
    list_of,
    mapping_of,
    or_null,
    parse_json,
    write_whole,
    writing,
)
from ownerwise.planning import Plan
from ownerwise.step.account import Balance, read_account

FORMAT = 2
"""Increase this number when the layout changes; upgrade or reject older files in `check_format`.

Format 1 (version 0.1.0) counted steps in `steps.json`, without an identity for the run."""

_HEADER = "ownerwise"
_HASH = "sha256"
_GENERATIONS = 2

_COMMON = {
    "format": WHOLE,
    "plan": DIGEST,
    "updates": WHOLE,
    "steps_spent": WHOLE,
    "seed": or_null(INTEGER),
    "optimizer": fields(
        {
            "state": mapping_of(mapping_of(ANYTHING)),
            "param_groups": list_of(fields({"params": list_of(WHOLE)})),
        }
    ),
    "held": list_of(ANYTHING),
}
_FORMATS = {
    1: fields(_COMMON, {"private": FLAG, "plugs": mapping_of(ANYTHING)}),
    FORMAT: fields(
        {
            **_COMMON,
            "private": FLAG,
            "plugs": mapping_of(ANYTHING),
            "run": TEXT,
            "account": list_of(ANYTHING, 2),
            "tensors": DIGEST,
        }
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """The data a run needs to resume.

    Attributes:
        updates: number of updates applied to the stored model.
        steps_spent: steps accounted for, at least `updates`; the resumed run starts here.
        private: whether the guarantee has held so far.
        plugs: {name: state} for the stateful plug-ins.
        path: the file.
        balance: state of the account.
        write: writes the stored tensors to the model and the optimizer.
    """

    updates: int
    steps_spent: int
    private: bool
    plugs: dict[str, Any]
    path: Path
    balance: Balance
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
    """
    tensors, state = _flatten_optimizer(optimizer)
    for name, tensor in model.state_dict().items():
        tensors[f"model.{name}"] = tensor
    contents = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
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
        "tensors": _tensors_hash(hashlib.sha256(), contents),
    }
    path = Path(folder) / f"checkpoint-{updates:08d}.safetensors"
    text = json.dumps(header)
    metadata = {_HEADER: text, _HASH: hashlib.sha256(text.encode()).hexdigest()}
    write_whole(path, lambda file: save_file(contents, file, metadata=metadata))
    with writing(folder):
        for older in stored(folder)[_GENERATIONS:]:
            older.unlink()
    return path


def stored(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(Path(folder).glob("checkpoint-*.safetensors"), reverse=True)


def latest(folder: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint in a folder, or None."""
    return next(iter(stored(folder)), None)


def newest_header(folder: str | os.PathLike, problems: Problems) -> dict[str, Any] | None:
    """Return the header of the newest checkpoint that is not corrupted; None if there is none.

    Error messages about newer, corrupted checkpoints are added to `problems`. If all checkpoints
    are corrupted, an error is raised.
    """
    found = stored(folder)
    for path in found:
        try:
            return _read_header(path)
        except OwnerwiseError as error:
            if path == found[-1]:
                raise
            problems += error.problems
    return None


def state_dict(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Return the model's `state_dict` from the newest checkpoint that is not corrupted."""
    return _model_tensors(_newest(folder)[2])


def load(
    folder: str | os.PathLike,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int | None,
) -> Checkpoint:
    """Return the state of the run from the newest checkpoint, which fits model and optimizer.

    The model and the optimizer are not changed until the caller calls `write()` on the result.

    `seed` is the seed of the resuming run (None if private) and must match the stored one.
    """
    path, header, tensors = _newest(folder)
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
    expected, actual = _kinds(model_tensors), _kinds(model.state_dict())
    if wrong := sorted({name for name, _ in expected.items() ^ actual.items()}):
        name = wrong[0]
        problems.add(
            f"{path.name} contains a different model: {name} is {expected.get(name, 'missing')} in "
            f"the file and {actual.get(name, 'missing')} here; build the same model as in the "
            "original run"
        )
    elif header["held"] != _optimizer_layout(model, optimizer):
        problems.add(
            f"{path.name} contains the state of {header['held'][0]}, but this run has "
            f"{type(optimizer).__name__} or different parameter groups; build the same optimizer "
            "as in the original run"
        )
    problems.raise_()
    assert balance is not None

    def write() -> None:
        model.load_state_dict(model_tensors)
        optimizer.load_state_dict(_restore_optimizer(header["optimizer"], tensors))

    steps_spent = header["steps_spent"] if seed is not None else balance.spent
    private = header.get("private", seed is None) and balance.private is not False
    return Checkpoint(
        header["updates"], steps_spent, private, header.get("plugs", {}), path, balance, write
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


def _model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def _seed_name(seed: int | None) -> str:
    return "a secret key" if seed is None else f"the fixed seed {seed} (not private)"


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor as text."""
    return {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}


def _optimizer_layout(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's class name, followed by the parameter names of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, *groups]


def _tensors_hash(digest: Any, tensors: Mapping[str, Tensor]) -> str:
    for name, kind in sorted(_kinds(tensors).items()):
        digest.update(f"{name} {kind}".encode())
        digest.update(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _newest(folder: str | os.PathLike) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return the path, header and tensors of the newest checkpoint that is not corrupted."""
    found = stored(folder)
    for path in found:
        try:
            return path, *_read(path)
        except OwnerwiseError as error:
            if path == found[-1]:
                raise
            warnings.warn(
                f"{error}; resuming from the older {found[found.index(path) + 1].name}. The steps "
                "since then remain spent",
                stacklevel=2,
            )
    raise OwnerwiseError(f"no checkpoint in {folder}")


def _read_header(path: Path) -> dict[str, Any]:
    """Return a checkpoint's header, without reading the tensors unless it has format 1."""
    with _opened(path) as file:
        text, stored_hash = _metadata(path, file)
    header = _parsed(path, text)
    if header["format"] == 1:
        return _read(path)[0]
    _compare(path, hashlib.sha256(text.encode()).hexdigest(), stored_hash)
    return header


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _opened(path) as file:
        text, stored_hash = _metadata(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = _parsed(path, text)
    digest = hashlib.sha256(text.encode())
    if header["format"] == 1:
        _compare(path, _tensors_hash(digest, tensors), stored_hash)
    else:
        _compare(path, digest.hexdigest(), stored_hash)
        _compare(path, _tensors_hash(hashlib.sha256(), tensors), header["tensors"])
    return header, tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise OwnerwiseError(f"no checkpoint at {path}") from None
    except OwnerwiseError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError):
        raise OwnerwiseError(f"{path} is corrupted or not an ownerwise checkpoint") from None


def _metadata(path: Path, file: Any) -> tuple[str, str]:
    metadata = file.metadata() or {}
    if not {_HEADER, _HASH} <= metadata.keys():
        raise OwnerwiseError(f"{path} is corrupted or not an ownerwise checkpoint")
    return metadata[_HEADER], metadata[_HASH]


def _parsed(path: Path, text: str) -> dict[str, Any]:
    version = parse_json(text, fields({"format": WHOLE}), str(path))["format"]
    check_format(path, version)
    return parse_json(text, _FORMATS[version], str(path))


def _compare(path: Path, digest: str, stored_hash: str) -> None:
    if digest != stored_hash:
        raise OwnerwiseError(f"{path} is corrupted: its content does not match its hash")


def check_format(path: Path, version: Any) -> None:
    """Reject a checkpoint or settings file whose format this version does not support."""
    if version not in _FORMATS:
        raise OwnerwiseError(
            f"{path} has format {version}, but this version of ownerwise reads format {FORMAT} and "
            "older ones: use the version that wrote it, or start a new run"
        )


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
