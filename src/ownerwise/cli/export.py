"""`ownerwise export`: write the model of a run for use without ownerwise, with its card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "export",
        help="write a trained model as torch.export and ONNX files, with its card",
        description="Write the model of a run of `ownerwise train` as model.pt2 (torch.export) and "
        "model.onnx, with model.json (its inputs and classes) and the privacy card. The files "
        "include all corrections and need no ownerwise.",
    )
    command.set_defaults(command=_run)
    command.add_argument("run", type=Path, metavar="RUN", help="run folder")
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder to write to [RUN/exported]"
    )
    command.add_argument(
        "--format",
        action="append",
        dest="formats",
        metavar="FORMAT",
        help="torch or onnx; may be repeated [both]",
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.runs import Run

    out = options.out or options.run / "exported"
    if out.is_file():
        raise OwnerwiseError(f"--out {out} is a file; expected a folder")
    run = Run.load(options.run)
    written = run.export(out, formats=options.formats or ("torch", "onnx"))
    print(f"Written to {out}: {', '.join(path.name for path in written)}")
    if not run.private:
        print(f"NOT PRIVATE: {'; '.join(run.not_private)}")
