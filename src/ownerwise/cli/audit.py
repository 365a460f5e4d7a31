"""`ownerwise audit`: attack a run's plan, or a configuration's model, with canaries."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ownerwise.cli.configuration import add_changes, read
from ownerwise.errors import OwnerwiseError, printable

if TYPE_CHECKING:
    from ownerwise.audit import Audit
    from ownerwise.processes import Processes
    from ownerwise.registry import Registry
    from ownerwise.runs import Run

_ATTACKS = ("white-box", "loss", "loss difference")


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "audit",
        help="attack a run or a configuration with canaries",
        description="Train made-up records (canaries) through the real sampler, step and "
        "optimizer, guess which of them took part, and compare the run with its plan. Given a run "
        "folder, canaries train alone under the run's plan, and its report and card state the "
        "result. Given a configuration, its model trains again with its data and the canaries. "
        "The exit code is 2 if a promise or a comparison with the plan fails.",
    )
    command.set_defaults(command=_run)
    command.add_argument("target", type=Path, metavar="RUN|CONFIG", help="run folder, or TOML file")
    command.add_argument(
        "--canaries", type=int, default=1000, help="number of canaries [1000]", metavar="N"
    )
    command.add_argument(
        "--attack",
        choices=_ATTACKS,
        default=_ATTACKS[0],
        help="what the attacker sees: every model, or the losses of the trained model (needs a "
        "configuration) [white-box]",
    )
    add_changes(command)


def _run(options: argparse.Namespace) -> None:
    from ownerwise.processes import joined

    with joined(None) as processes:
        run = processes.on_first(lambda: _stored(options.target))
        if run is None:
            audit, run = _audit_model(options, processes)
        else:
            audit = _audit_plan(run, options)
        processes.together(lambda: _told(audit, run) if processes.first else None)


def _stored(target: Path) -> Run | None:
    """Return the run in a folder; None for a configuration."""
    from ownerwise.audit import load_audits
    from ownerwise.runs import Run

    if not target.is_dir():
        return None
    run = Run.load(target)
    load_audits(target)  # refuses a damaged file before the work is done
    return run


def _told(audit: Audit, run: Run | None) -> None:
    """Store the result in the run folder if there is one, and print it; raise what it found."""
    if run is not None:
        assert run.folder is not None
        audit.save(run.folder)
    for line in audit.describe().splitlines():
        print(printable(line))
    if run is not None:
        from ownerwise.audit.results import FILE
        from ownerwise.cli.train import write_pages

        for reason in run.not_private:
            print(printable(f"The run itself is NOT PRIVATE: {reason}"))
        print(f"Written to {run.folder}: {', '.join([FILE, *write_pages(run)])}")
    if not audit.passed:
        raise OwnerwiseError(
            [*(f"{group.name}: {group.finding}" for group in audit.groups if group.violated),
             *audit.alarms]
        )  # fmt: skip


def _audit_plan(run: Run, options: argparse.Namespace) -> Audit:
    """Audit the plan of a run with its weights and its clipping rule; no record takes part."""
    from ownerwise.audit import one_run
    from ownerwise.mechanisms import CLIPPING_RULES, WEIGHTS

    if options.changes or options.data_dir:
        raise OwnerwiseError("--set and --data-dir apply only to a configuration")
    if run.config.get("constraints"):
        raise OwnerwiseError(
            "the run has rate constraints, which need a model: audit its configuration instead"
        )
    return one_run(
        None,
        run.plan,
        canaries=options.canaries,
        attack=options.attack,
        weights=_made_again(WEIGHTS, run.config.get("weights")),
        clipping=_made_again(CLIPPING_RULES, run.config.get("clipping")),
    )


def _made_again(registry: Registry[Any], settings: Mapping[str, Any] | None) -> Any:
    """Return a mechanism from the settings that a run stores, or None if there are none."""
    if not settings:
        return None
    kinds = {getattr(registry[name], "__name__", name): name for name in registry}
    name = kinds.get(settings["kind"])
    if name is None:
        raise OwnerwiseError(
            f"the run uses {settings['kind']}, which cannot be made from stored settings: audit "
            "it with ow.audit.one_run"
        )
    options = {key: value for key, value in settings.items() if key != "kind"}
    return registry.make({**options, "name": name})


def _audit_model(options: argparse.Namespace, processes: Processes) -> tuple[Audit, Run | None]:
    """Audit the model of a configuration; return the result, and its run if there is one."""
    from ownerwise.audit import one_run
    from ownerwise.config import prepare_run
    from ownerwise.mechanisms import plain_loss
    from ownerwise.runs import Run, holds_a_run

    config = read(options.target, options.changes)
    prepared = processes.together(
        lambda: prepare_run(config, data_dir=options.data_dir, resume=True, progress=False)
    )
    trainer = prepared.trainer
    audit = one_run(
        trainer.model,
        prepared.plan,
        prepared.training_data,
        canaries=options.canaries,
        attack=options.attack,
        loss=plain_loss(trainer.loss),
        optimizer=partial(
            trainer.optimizer, lr=trainer.lr, **dict(trainer.optimizer_options or {})
        ),
        weights=trainer.weights,
        clipping=trainer.clipping,
        release=trainer.constraints,
    )
    folder = prepared.folder
    return audit, processes.on_first(lambda: Run.load(folder) if holds_a_run(folder) else None)
