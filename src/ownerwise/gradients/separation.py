"""Whether a record's result depends on other records: the method behind every check of this.

Clipping bounds a record's own gradient. It bounds the record's influence only if the contributions
of other records do not depend on that record. A loss divided by the largest loss in its batch, for
instance, lets one record change the sum by hundreds of times the clip norm.

The method: a function computes the results of the same records twice, in the company of different
records. The results must *agree* up to a *share* of what a record may contribute.

- `preflight`: the model, on a sample; records of the sample are replaced
- `step.loss_separation`, `step.plug_separation`: losses, and user-defined clipping rules and
  releases, at every step; on a secret part of a micro-batch and on all of it
- `step.model_separation`: the model and `collate`, on parts of a batch

Rounding: a share of a contribution may be below the precision of the results. If the results
differ, both are therefore recomputed and compared in float64, so legitimate functions pass at any
batch size. The results in the original precision must also agree, up to a larger share. This rules
out functions such as (x + k) - k, where k is the largest number in the batch: the result equals x
in float64, but not in lower precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ownerwise.gradients.calls import map_tensors, tensors_in
from ownerwise.gradients.state import State, differing

__all__ = [
    "Company",
    "Trial",
    "agree_in_float64",
    "close",
    "halves",
    "halves_by_copy",
    "in_float64",
    "machine_epsilon",
    "rows_agree",
    "rows_at",
    "same_outputs",
    "separate",
]

_AT_ONCE = 1 << 20  # numbers that are compared at once

Agree = Callable[[Any, Any, float], bool]  # whether two results agree up to a share


def separate(
    agree: Agree,
    pair: tuple[Any, Any],
    exact: Callable[[], tuple[Any, Any]],
    share: float,
    *,
    rounded: float,
    fallback: float,
) -> bool:
    """Return whether two results for the same records agree; see `agree_in_float64`."""
    return agree(*pair, share) or agree_in_float64(
        agree, pair, exact, share, rounded=rounded, fallback=fallback
    )


def agree_in_float64(
    agree: Agree,
    pair: tuple[Any, Any],
    exact: Callable[[], tuple[Any, Any]],
    share: float,
    *,
    rounded: float,
    fallback: float,
) -> bool:
    """Return whether results that differ by more than `share` agree once rounding is allowed for.

    Args:
        agree: whether two results agree up to a share.
        pair: the results, in the function's own precision.
        exact: recomputes both in float64, or raises any exception.
        share: the largest difference in float64.
        rounded: the largest difference in the function's own precision.
        fallback: the largest difference if the function cannot run in float64.
    """
    same = agree(*pair, max(share, rounded))
    try:
        pair = exact()
    except Exception:
        share = max(share, fallback)
    return same and agree(*pair, share)


def rows_agree(first: Tensor, second: Tensor, room: float | Tensor) -> bool:
    """Return True if no row differs by more than `room`. Two non-finite rows count as equal."""
    if first.shape != second.shape:
        return False
    first, second = first.double().flatten(1), second.double().flatten(1)
    distances = torch.linalg.vector_norm(first - second, dim=1)
    bad = ~torch.isfinite(first).all(dim=1) & ~torch.isfinite(second).all(dim=1)
    return bool(((distances <= room) | bad).all())


def close(first: Tensor, second: Tensor, share: float) -> bool:
    """Return True if no row differs by more than a fraction `share` of its own norm."""
    count = len(first) if first.dim() else 1
    first, second = first.reshape(count, -1), second.reshape(count, -1)
    if first.shape != second.shape:
        return False
    at_once = max(1, _AT_ONCE // max(1, first.shape[1]))  # copies in float64 are large
    for some, others in zip(first.split(at_once), second.split(at_once), strict=True):
        some, others = some.double(), others.double()
        sizes = torch.linalg.vector_norm(some, dim=1).nan_to_num(0.0, 0.0, 0.0)
        if not rows_agree(some, others, share * (sizes + 1e-3)):
            return False
    return True


def same_outputs(first: list[Tensor], second: list[Tensor], share: float) -> bool:
    """Return True if two lists of outputs have the same shapes, and all are `close`."""
    return len(first) == len(second) and all(
        one.shape == other.shape and close(one, other, share)
        for one, other in zip(first, second, strict=True)
    )


def rows_at(values: Any, index: Tensor, rows: int) -> Any:
    """Return copies of the rows at `index` of every tensor that has one row per record."""

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != rows:
            return tensor.detach()
        return tensor.detach().index_select(0, index.to(tensor.device))

    return take(values) if isinstance(values, Tensor) else map_tensors(take, values)


def in_float64(values: Any) -> Any:
    """Return values with every floating-point tensor in float64."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, values)


def machine_epsilon(outputs: Any) -> float:
    """Return the machine epsilon of the least precise output; 0 if none is floating-point."""
    kinds = [tensor.dtype for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


@dataclass(frozen=True)
class Company:
    """Records with which a model runs again.

    Attributes:
        rows: the rows of these records; a row may occur twice.
        compared: places of the records to compare, in the first run.
        found_at: places of the same records in this run.
    """

    rows: list[int]
    compared: list[int]
    found_at: list[int]


def halves(rows: list[int], random: bool) -> list[Company]:
    """Return the records at even and at odd places, each half in reverse order.

    A model that draws random numbers (dropout) must draw the same masks, so it runs on the same
    number of records instead (`halves_by_copy`).

    Example: a b c d run again as c a, then as d b; with dropout, as a a c c, then as b b d d.
    """
    if random:
        return halves_by_copy(rows)
    return [
        Company([rows[place] for place in half[::-1]], half, [*range(len(half))][::-1])
        for half in _every_other(rows)
    ]


def halves_by_copy(rows: list[int]) -> list[Company]:
    """Return the records at even and at odd places, with copies in place of the other half."""
    return [
        Company([rows[half[min(p // 2, len(half) - 1)]] for p in range(len(rows))], half, half)
        for half in _every_other(rows)
    ]


def _every_other(rows: list[int]) -> list[list[int]]:
    return [list(range(parity, len(rows), 2)) for parity in (0, 1)]


class Runs(NamedTuple):
    """The results for the same records in two companies, and the state that differed."""

    together: list[Tensor]
    apart: list[Tensor]
    changed: list[str]  # names of parameters, buffers and numbers

    @property
    def pair(self) -> tuple[list[Tensor], list[Tensor]]:
        """The results alone."""
        return self.together, self.apart


@dataclass(frozen=True)
class Trial:
    """A model's results for some records, computed in different companies.

    Attributes:
        arguments: returns the arguments of `results` for the records in these rows.
        results: `results(model, *arguments)` returns tensors, usually with one row per record.
        rows: the records that run together.
        companies: the companies in which they run again, given their rows and whether the model
            draws random numbers.
    """

    arguments: Callable[[list[int]], tuple[Any, ...]]
    results: Callable[..., list[Tensor]]
    rows: list[int]
    companies: Callable[[list[int], bool], list[Company]] = halves

    def run(self, model: nn.Module) -> Runs:
        """Run the model on all records together, then in each company; restore its state."""
        return self._run(model, self.arguments)

    def run_in_float64(self, model: nn.Module) -> Runs:
        """Run a float64 copy of the model on float64 arguments."""
        return self._run(
            copy.deepcopy(model).double(), lambda rows: in_float64(self.arguments(rows))
        )

    def outputs_agree(
        self, model: nn.Module, runs: Runs, share: float, *, rounded: float, fallback: float
    ) -> bool:
        """Return whether no record's results changed with its company, by the module's method."""
        return separate(
            same_outputs, runs.pair, lambda: self.run_in_float64(model).pair, share,
            rounded=rounded, fallback=fallback,
        )  # fmt: skip

    def _run(self, model: nn.Module, arguments: Callable[[list[int]], tuple[Any, ...]]) -> Runs:
        state = State(model)

        def run(rows: list[int]) -> tuple[list[Tensor], dict[str, Tensor], bool]:
            torch.default_generator.manual_seed(0)  # torch.manual_seed is much slower
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(0)
            before = torch.get_rng_state()
            try:
                results = self.results(model, *arguments(rows))
                return results, state.changed(), not torch.equal(before, torch.get_rng_state())
            finally:
                state.restore()

        count = len(self.rows)
        together, after_all, random = run(self.rows)
        runs = Runs([], [], [])
        for company in self.companies(self.rows, random):
            apart, after, _ = run(company.rows)
            runs.changed.extend(differing(after_all, after))
            for one, other in zip(together, apart, strict=True):
                by_row = one.dim() > 0 and len(one) == count and len(other) == len(company.rows)
                runs.together.append(one[company.compared] if by_row else one)
                runs.apart.append(other[company.found_at] if by_row else other)
        return runs
