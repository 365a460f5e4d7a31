"""Count the fits of an estimator and its copies, because each fit spends the budgets again."""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar
from uuid import uuid4
from weakref import WeakValueDictionary

from ownerwise.errors import PrivacyWarning


@dataclass(eq=False)
class Lineage:
    """The clones and fits of an estimator.

    All clones and copies of an estimator in a process share the same counts, even after unpickling.
    In another process, counting continues from the pickled counts.
    """

    key: str = field(default_factory=lambda: uuid4().hex)
    clones: int = 0
    fits: int = 0
    warned: bool = False
    living: ClassVar[WeakValueDictionary[str, Lineage]] = WeakValueDictionary()

    def __post_init__(self) -> None:
        self.living[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, astuple(self)

    def note_fit(self) -> None:
        """Count a fit. Warn about repeated fits only once, here rather than in the Trainer."""
        if (self.clones > 1 or self.fits) and not self.warned:
            self.warned = True
            warnings.warn(
                "this estimator or a copy of it has been fitted or cloned several times (a search, "
                "cross-validation, an ensemble). Each fit spends every owner's budget again, and "
                "choosing among fits by their scores on private records is not accounted for: "
                "the epsilon of a single fit does not cover it. Tune on public data, or add up "
                "the epsilons",
                PrivacyWarning,
                stacklevel=3,
            )
        self.fits += 1


def _restored(key: str, *counts: Any) -> Lineage:
    """Return the existing lineage with this key, or a new one with these counts."""
    return Lineage.living.get(key) or Lineage(key, *counts)
