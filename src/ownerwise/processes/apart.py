"""Refuse exchanges between processes in code that must compute each record by itself."""

from __future__ import annotations

from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.torch_internals import DispatchMode


class Apart(DispatchMode):
    """A context in which torch.distributed exchanges nothing; it slows every operation down.

    An exchange in a model, a loss or a rule would add what other processes computed to a record's
    output or gradient, and no check within one process would see it. It would also take the place
    of an exchange of the step in a process without records.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, unless it sends something."""
        if "c10d" in func.namespace:
            raise OwnerwiseError(
                "the model, the loss or a mechanism exchanges data between processes "
                f"({func.name()}), so a record's influence cannot be bounded: compute each record "
                "by itself, and remove what synchronises processes; the step adds their sums"
            )
        return func(*args, **(kwargs or {}))
