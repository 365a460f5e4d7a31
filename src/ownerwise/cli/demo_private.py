"""The private model in `ownerwise demo`: one person per image, and secret randomness.

The clip norm and the learning rate are fixed in advance and not tuned on these records, so the
epsilon of the plan covers everything that is computed from them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ownerwise import models
from ownerwise.cli.demo_comparison import Demo
from ownerwise.owners import Owners
from ownerwise.planning import plan
from ownerwise.repair import CALIBRATIONS
from ownerwise.runs import CARD, REPORT, Run
from ownerwise.training import Trainer

CLIP_NORM, LEARNING_RATE = 1.0, 4.0


def train_privately(demo: Demo, folder: Path) -> Run:
    """Train one calibrated model on the first split, and write its run folder with report and card.

    Args:
        demo: supplies the data, the budgets of the digits, and the number of steps.
        folder: a run folder that does not exist yet (see `unused_folder`).
    """
    train, validation, test = demo.splits[0]
    people = [f"person {number:04d}" for number in range(1, len(train) + 1)]
    epsilon = np.array([demo.assignment.group_budgets[str(label)] for label in train.targets])
    trainer = Trainer(
        models.mlp(64, 10, hidden=(64,)),
        plan(
            Owners(people, dict(zip(people, epsilon, strict=True))),
            "sample",
            steps=demo.search.steps,
            batch_size=demo.search.batch_size,
            clip_norm=CLIP_NORM,
            calibration=CALIBRATIONS.make("classes"),
        ),
        lr=LEARNING_RATE,
        folder=folder,
        progress=False,
        notes={"model": "64-64-10 with ReLU", "data": "digits from scikit-learn"},
    )
    run = trainer.fit(train.tensors(), validation=validation.tensors(), test=test.tensors())
    run.card(folder / CARD)
    run.report(folder / REPORT)
    return run


def unused_folder(folder: Path) -> Path:
    """Return the folder, or its name with a number if it exists: a run is never overwritten."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
