"""What loaders return: records, their labels, and other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError, name_some

TEST_EVERY = 5
"""If a source has no official test set, every fifth record of each class becomes one."""


@dataclass(frozen=True, eq=False, repr=False)
class Records:
    """The records in one part of a data set.

    Attributes:
        inputs: the model's inputs, [records, ...].
        targets: class of each record, a position in `DataSet.classes`, int64 [records].
        columns: further facts about each record (sex, subject, owner, ...), by name, [records].
    """

    inputs: np.ndarray
    targets: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        lengths = {"inputs": len(self.inputs), "targets": len(self.targets)}
        lengths |= {f"column {name}": len(values) for name, values in self.columns.items()}
        problems = []
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{what} {length}" for what, length in lengths.items())
            problems.append(f"numbers of records differ: {given}; expected the same for all")
        if self.targets.dtype != np.int64 or self.targets.ndim != 1:
            problems.append(
                f"targets are {self.targets.dtype} {list(self.targets.shape)}; expected int64 "
                "[records], the position of each record's class"
            )
        if problems:
            raise OwnerwiseError(problems)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, which: np.ndarray) -> Records:
        """Return the records at these positions, or those where a mask is true."""
        columns = {name: values[which] for name, values in self.columns.items()}
        return Records(self.inputs[which], self.targets[which], columns)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as tensors that share the arrays' memory."""
        return torch.from_numpy(self.inputs), torch.from_numpy(self.targets)

    def __repr__(self) -> str:
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        shape = list(self.inputs.shape[1:])
        return f"Records({len(self)} of {self.inputs.dtype} {shape}{columns})"


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """A data set, ready for training.

    Attributes:
        name: as in `LOADERS`, or as given.
        train: the records to be protected.
        test: records for evaluation; they carry no guarantee. None if there are none.
        classes: the name of each class, a public list; `targets` are positions in it.
        validation: the third part, if the source has one; it carries no guarantee either.
        features: for tables, the name of each column of `inputs`.
        form: shape, type and range of the inputs, in words.
        not_private: descriptions of anything computed from the training records without noise,
            which no guarantee covers. Empty with every loader's default options.
    """

    name: str
    train: Records
    test: Records | None
    classes: tuple[str, ...]
    validation: Records | None = None
    features: tuple[str, ...] = ()
    form: str = ""
    not_private: tuple[str, ...] = ()

    def __post_init__(self):
        problems = []
        if len(set(self.classes)) < len(self.classes):
            problems.append(f"{self.name}: a class appears twice in {name_some(self.classes)}")
        for part, records in self.parts().items():
            stray = (records.targets < 0) | (records.targets >= len(self.classes))
            if stray.any():
                problems.append(
                    f"{self.name}, {part}: targets outside the list of {len(self.classes)} "
                    f"classes, such as {records.targets[stray][0]} ({int(stray.sum())} in all); "
                    f"expected 0 to {len(self.classes) - 1}"
                )
        if problems:
            raise OwnerwiseError(problems)

    def parts(self) -> dict[str, Records]:
        """Return the existing parts by name: train, validation, test."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: records for name, records in parts.items() if records is not None}

    def only(self, classes: Sequence[str]) -> DataSet:
        """Return only the records of these classes; their targets become 0, 1, ... in this order.

        Example: two of the categories of CIFAR-100, `data.only([*FISH, *VEHICLES])`.
        """
        positions = class_positions(self, classes)
        meaning = np.full(len(self.classes), -1)
        meaning[positions] = np.arange(len(positions))
        parts = {}
        for name, records in self.parts().items():
            kept = records.take(meaning[records.targets] >= 0)
            parts[name] = replace(kept, targets=meaning[kept.targets])
        return replace(self, classes=tuple(self.classes[at] for at in positions), **parts)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {len(records)}" for name, records in self.parts().items())
        marked = "; NOT PRIVATE: " + "; ".join(self.not_private) if self.not_private else ""
        return f"DataSet({self.name}: {parts}; {len(self.classes)} classes; {self.form}{marked})"


def class_positions(data: DataSet, classes: Sequence[str]) -> list[int]:
    """Return the positions of classes given by name, each once."""
    unknown = [name for name in classes if name not in data.classes]
    problems = []
    if unknown:
        problems.append(
            f"{data.name} has no class {name_some(unknown, repr)}; expected names among "
            f"{name_some(data.classes, repr, shown=10)}"
        )
    if len(set(classes)) < len(classes) or not classes:
        problems.append(f"classes {list(classes)!r}: expected at least one, and each once")
    if problems:
        raise OwnerwiseError(problems)
    return [data.classes.index(name) for name in classes]


def test_mask(
    targets: np.ndarray,
    groups: np.ndarray | None = None,  # noqa: PT028 (this is not a test)
    every: int = TEST_EVERY,  # noqa: PT028
) -> np.ndarray:
    """Return a mask that selects as test records every fifth of each class, in source order.

    Nothing is random: the split is the same everywhere. With `groups` (one id per record, such as
    the subject) every fifth group goes to the test set as a whole; its class is that of its first
    record.
    """
    if groups is None:
        groups = np.arange(len(targets))
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    group_class = targets[first[by_appearance]]
    chosen = np.zeros(len(first), dtype=bool)
    for label in np.unique(group_class):
        chosen[by_appearance[group_class == label][every - 1 :: every]] = True
    return chosen[member]
