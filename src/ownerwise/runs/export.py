"""Write a trained model for use without ownerwise: torch.export, ONNX, and the card beside them.

An exported model returns the model's outputs with every correction included: a calibration, and the
shift of a repair, if one is passed. It is computed from the released model alone, so it costs no
privacy. No record is stored in the files: the example with which a model is traced is all zeros.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError, Problems, name_some, require
from ownerwise.evaluation import run_on_first
from ownerwise.files import write_text, write_whole
from ownerwise.gradients import evaluation_mode
from ownerwise.repair import shifted

DESCRIPTION = "model.json"
_ROWS = 3  # of the traced example; files accept any number of records
_TOLERANCE = 1e-4


def export_model(
    model: nn.Module,
    example: Tensor,
    shift: Tensor | None,
    folder: Path,
    formats: Sequence[str],
    description: Mapping[str, Any],
) -> list[Path]:
    """Write the model in each format, with a description of its inputs; return the paths.

    Args:
        model: the trained model, which is not changed.
        example: a few inputs; only their shape and dtype are used.
        shift: amount to subtract from the class outputs; None for nothing.
        folder: the folder to write to; it is created.
        formats: "torch" and "onnx".
        description: what is stored in `DESCRIPTION`.
    """
    problems = Problems()
    if unknown := [name for name in formats if name not in _FORMATS]:
        problems.add(f"unknown formats {name_some(unknown)}; expected {' or '.join(_FORMATS)}")
    if not formats:
        problems.add(f"no format was given; expected {' or '.join(_FORMATS)}")
    if "onnx" in formats:
        for package in ("onnx", "onnxscript"):
            with problems.guard():
                require(package, "ownerwise[export]", "the ONNX format")
    problems.raise_()
    exported = _Exported(copy.deepcopy(model).cpu(), None if shift is None else shift.cpu()).eval()
    rows = torch.zeros((_ROWS, *example.shape[1:]), dtype=example.dtype)
    with evaluation_mode(exported):
        run_on_first(exported, rows)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(formats):
        file, write = _FORMATS[name]
        try:
            write(exported, rows, folder / file)
        except OwnerwiseError:
            raise
        except Exception as error:
            raise OwnerwiseError(
                f"the model cannot be written as {file}, because torch cannot trace it: {error}"
            ) from error
        written.append(folder / file)
    write_text(folder / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    return [*written, folder / DESCRIPTION]


def example_of(settings: Mapping[str, Any], given: Any) -> Any:
    """Return inputs from which the shape of a record is known: those given, or zeros.

    Args:
        settings: the run's settings (`run.config`).
        given: a few of the model's inputs; None if the settings state how many numbers there are.
    """
    if given is not None:
        return given
    count = ((settings.get("prediction") or {}).get("sizes") or {}).get("inputs")
    if not isinstance(count, int):
        raise OwnerwiseError(
            "the shape of the model's inputs is unknown: pass a few inputs, run.export(folder, X); "
            "only their shape and dtype are used"
        )
    return torch.zeros(_ROWS, count)


class _Exported(nn.Module):
    """A model with the shift of its outputs."""

    def __init__(self, model: nn.Module, shift: Tensor | None):
        super().__init__()
        self.model = model
        self.shift: Tensor | None
        self.register_buffer("shift", shift)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        return outputs if self.shift is None else shifted(outputs, -self.shift)


def _write_torch(model: nn.Module, rows: Tensor, path: Path) -> None:
    program = _traced(model, rows)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths on this machine
    _compare(model, program.module(), rows)
    write_whole(path, lambda temporary: _save(program, temporary))


def _save(program: Any, path: str) -> None:
    with open(path, "wb") as file:  # torch refuses names that do not end in .pt2
        torch.export.save(program, file)


def _write_onnx(model: nn.Module, rows: Tensor, path: Path) -> None:
    with _quiet():
        program = torch.onnx.export(
            _traced(model, rows), input_names=["inputs"], output_names=["outputs"], verbose=False
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the exporter's stack traces, with paths on this machine
    content = program.model_proto.SerializeToString()
    write_whole(path, lambda temporary: Path(temporary).write_bytes(content))


def _traced(model: nn.Module, rows: Tensor) -> Any:
    with _quiet():
        return torch.export.export(
            model, (rows,), dynamic_shapes=({0: torch.export.Dim("records")},)
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch's exporter says about its own parts."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _compare(model: nn.Module, exported: nn.Module, rows: Tensor) -> None:
    """Refuse an exported model whose outputs are not those of the model."""
    other = rows
    if rows.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        other = torch.randn((_ROWS + 2, *rows.shape[1:]), generator=generator).to(rows.dtype)
    with torch.no_grad():
        expected, found = model(other), exported(other)
    if not torch.allclose(expected, found, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise OwnerwiseError(
            "the exported model gives other outputs than the model: it may have branches that "
            "depend on its inputs"
        )


_FORMATS: dict[str, tuple[str, Callable[[nn.Module, Tensor, Path], None]]] = {
    "torch": ("model.pt2", _write_torch),
    "onnx": ("model.onnx", _write_onnx),
}
