"""What loaders return: records, their labels, and other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError, Problems, name_some
from ownerwise.marks import mark, marks_of


@dataclass(frozen=True, eq=False, repr=False)
class Records:
    """The records in one part of a data set.

    Attributes:
        inputs: the model's inputs, [records, ...]; or texts (str, of dtype object), [records], for
            a feature extractor.
        targets: the class of each record, as a position in `DataSet.classes`, int64 [records].
        columns: other attributes of each record (sex, subject, owner, ...), by name, [records].
        not_private: descriptions of anything in the inputs or targets that was computed from
            training records without noise; the arrays are marked with them (see `marks`).
    """

    inputs: np.ndarray
    targets: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    not_private: tuple[str, ...] = ()

    def __post_init__(self):
        lengths = {"inputs": len(self.inputs), "targets": len(self.targets)}
        lengths |= {f"column {name}": len(values) for name, values in self.columns.items()}
        problems = Problems()
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{what} {length}" for what, length in lengths.items())
            problems.add(
                f"the numbers of records differ (not private): {given}; expected equal numbers"
            )
        if self.targets.dtype != np.int64 or self.targets.ndim != 1:
            problems.add(
                f"targets are {self.targets.dtype} {list(self.targets.shape)}; expected int64 "
                "[records], the position of each record's class"
            )
        problems.raise_()
        for array in (self.inputs, self.targets):
            mark(array, *self.not_private)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, which: np.ndarray) -> Records:
        """Return the records at these positions, or those where a mask is true."""
        columns = {name: values[which] for name, values in self.columns.items()}
        return Records(self.inputs[which], self.targets[which], columns, self.not_private)

    @property
    def are_texts(self) -> bool:
        """Whether the inputs are texts."""
        return self.inputs.dtype == object

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as tensors that share the arrays' memory."""
        if self.are_texts:
            raise OwnerwiseError(
                "the inputs are texts; expected numbers: turn them into features with "
                "ow.models.features.extract(MiniLM(), records.inputs)"
            )
        return torch.from_numpy(self.inputs), torch.from_numpy(self.targets)

    def __repr__(self) -> str:
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        form = "texts" if self.are_texts else f"{self.inputs.dtype} {list(self.inputs.shape[1:])}"
        return f"Records({form}{columns})"


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """A data set, ready for training.

    Attributes:
        name: the name in `LOADERS`, or a name of your choice.
        train: the records to be protected.
        test: records for evaluation, which no guarantee covers; None if there are none.
        classes: the public list of class names; `targets` are positions in it.
        validation: validation records, which no guarantee covers; None if the source has none.
        features: for tables, the name of each column of `inputs`.
        form: a description of the inputs' shape, type and range.
        not_private: descriptions of anything computed from the training records without noise,
            which no guarantee covers. The parts of the data set carry the same marks, so a run that
            uses them is NOT PRIVATE.
        numbers: for tables with scale "released", how many columns of `inputs`, from the first on,
            a layer `Standardise` is to standardise; else 0.
        pretraining: what a network that computed the inputs was pretrained on, if any.
    """

    name: str
    train: Records
    test: Records | None
    classes: tuple[str, ...]
    validation: Records | None = None
    features: tuple[str, ...] = ()
    form: str = ""
    not_private: tuple[str, ...] = ()
    pretraining: str = ""
    numbers: int = 0

    def __post_init__(self):
        problems = Problems()
        if len(set(self.classes)) < len(self.classes):
            problems.add(f"{self.name}: a class appears twice in {name_some(self.classes)}")
        for part, records in self.parts().items():
            stray = (records.targets < 0) | (records.targets >= len(self.classes))
            if stray.any():
                problems.add(
                    f"{self.name}, {part}: the target of "
                    f"{name_some(np.flatnonzero(stray), 'record {}'.format)} is not a position in "
                    f"the list of classes; expected 0 to {len(self.classes) - 1}"
                )
        problems.raise_()
        self._share_marks()

    def _share_marks(self) -> None:
        """Copy the marks of all parts to the data set and to every part."""
        parts = self.parts()
        marks = tuple(marks_of(self, *parts.values()))
        vars(self)["not_private"] = marks
        for name, records in parts.items():
            if records.not_private != marks:
                vars(self)[name] = replace(records, not_private=marks)

    def parts(self) -> dict[str, Records]:
        """Return the parts that exist (train, validation, test), keyed by name."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: records for name, records in parts.items() if records is not None}

    def only(self, classes: Sequence[str]) -> DataSet:
        """Return only the records of these classes; the targets become 0, 1, ... in this order.

        For example, `data.only([*FISH, *VEHICLES])` keeps two of the categories of CIFAR-100.
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
        parts = ", ".join(self.parts())  # their numbers of records are private
        marked = "; NOT PRIVATE: " + "; ".join(self.not_private) if self.not_private else ""
        return f"DataSet({self.name}: {parts}; {len(self.classes)} classes; {self.form}{marked})"


def class_positions(data: DataSet, classes: Sequence[str]) -> list[int]:
    """Return the positions of classes given by name; reject unknown or repeated names."""
    unknown = [name for name in classes if name not in data.classes]
    problems = Problems()
    if unknown:
        problems.add(
            f"{data.name} has no class {name_some(unknown, repr)}; expected one of "
            f"{name_some(data.classes, repr, shown=10)}"
        )
    if len(set(classes)) < len(classes) or not classes:
        problems.add(f"classes {list(classes)!r}: expected at least one, and no duplicates")
    problems.raise_()
    return [data.classes.index(name) for name in classes]
