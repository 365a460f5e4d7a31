"""Contributions of any per-record call, which vmap differentiates record by record.

The call is `output = func(..., parameter, data, ...)`. For each record, the call is repeated on
the record's slices of the data arguments that share the batch dimension of the output. The
vector-Jacobian product with the record's output gradient is the record's parameter gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function
from ownerwise.gradients.contributions.contribution import Contribution
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import accumulation_dtype, masked, row_norms
from ownerwise.gradients.saved import Saved
from ownerwise.torch_internals import pytree

__all__ = ["Call", "Repeated"]


class Call:
    """A call that can be repeated with different tensors as its arguments."""

    def __init__(self, func: Function, leaves: list[Any], spec: Any, where: str) -> None:
        self.func = func
        self.spec = spec
        self.where = where
        self.leaves = [Saved(v, where) if isinstance(v, Tensor) else v for v in leaves]

    def values(self, dtype: torch.dtype) -> list[Any]:
        """Return all arguments, with floating-point tensors in the accumulation type."""
        values = [v.get() if isinstance(v, Saved) else v for v in self.leaves]
        return [
            v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
        ]

    def __call__(self, values: list[Any]) -> Tensor:
        """Run the call on the given arguments."""
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return self.func(*args, **kwargs)


class Repeated(Contribution):
    """A call's use of argument number `place`; the `fixed` arguments are not sliced.

    Args:
        call: the call.
        place: the place of the parameter among the arguments.
        fixed: the places of arguments that are not sliced.
        gradient, layout: the gradient of the output, and where it has the records.
        count: the number of records.
        budget: how much memory may be used.
        parts: for arguments that repeat a part for each record, the part that takes their place in
            a call on a single record. The contribution is then that of the part.
        dims: for each argument, the dimension along which it may have the records.
    """

    def __init__(
        self,
        call: Call,
        place: int,
        fixed: set[int],
        gradient: Tensor,
        layout: Layout,
        count: int,
        budget: MemoryBudget,
        parts: Mapping[int, Tensor] | None = None,
        dims: Mapping[int, int] | None = None,
    ) -> None:
        self.call, self.place, self.gradient, self.layout = call, place, gradient, layout
        self.parts = parts or {}
        self.count, self.budget = count, budget
        self.dtype = accumulation_dtype(gradient.dtype)
        self.bad: Tensor | None = None
        values = call.values(self.dtype)
        self.shape = tuple(self._part(place, values).shape)
        size = gradient.shape[layout.dim]
        dims = dims or {}
        self.layouts = {i: replace(layout, dim=dims.get(i, layout.dim)) for i in range(len(values))}
        self.sliced = [
            i
            for i, v in enumerate(values)
            if isinstance(v, Tensor)
            and i not in fixed
            and (layout.fold == "whole" or v.shape[self.layouts[i].dim :][:1] == (size,))
        ]

    def per_record(self, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        values = self.call.values(self.dtype)
        rows = [self._records(self.gradient.to(self.dtype)), *self._slices(values)]
        rows = [row[start:stop] for row in rows]
        if self.bad is not None:
            bad = self.bad[start:stop]
            rows = [masked(row, bad) if row.is_floating_point() else row for row in rows]

        def gradient_of(gradient: Tensor, *parts: Tensor) -> Tensor:
            def run(parameter: Tensor) -> Tensor:
                return self._run_alone(self._with_parameter(values, parameter), parts)

            back = torch.func.vjp(run, self._part(self.place, values))[1]
            return back(self._put_back(gradient))[0]

        try:
            with warnings.catch_warnings():  # torch warns where a batching rule is missing
                warnings.filterwarnings("ignore", "There is a performance drop")
                return torch.func.vmap(gradient_of)(*rows)
        except RuntimeError:  # there is no batching rule for this call
            return torch.stack([gradient_of(*parts) for parts in zip(*rows, strict=True)])

    def _records(self, tensor: Tensor) -> Tensor:
        return self.layout.records(tensor, self.count)

    def _slices(self, values: list[Any]) -> list[Tensor]:
        return [self.layouts[i].records(values[i], self.count) for i in self.sliced]

    def _part(self, place: int, values: list[Any]) -> Tensor:
        """Return the argument at a place, as it is used for a single record."""
        part = self.parts.get(place)
        return values[place] if part is None else part.to(self.dtype)

    def _with_parameter(self, values: list[Any], parameter: Tensor) -> list[Any]:
        return [*values[: self.place], parameter, *values[self.place + 1 :]]

    def _run_alone(self, values: list[Any], parts: Iterable[Tensor]) -> Tensor:
        """Run the call on one record's slices of its arguments."""
        arguments = list(values)
        for i in self.parts:
            if i != self.place:
                arguments[i] = self._part(i, values)
        for i, part in zip(self.sliced, parts, strict=True):
            arguments[i] = self._put_back(part, self.layouts[i])
        return self.call(arguments)

    def _put_back(self, part: Tensor, layout: Layout | None = None) -> Tensor:
        """Return one record's slice as a batch of one."""
        layout = layout or self.layout
        return part.unsqueeze(layout.dim) if layout.fold == "none" else part

    def compare(self) -> tuple[bool, bool]:
        """Compare calls on single records with the call on the batch.

        Returns:
            Whether outputs and gradients are the same, and whether there were gradients to compare.
        """
        values = self.call.values(self.dtype)
        whole = self._records(self.call(values))
        try:
            slices = self._slices(values)
            for index in {0, self.count // 2, self.count - 1}:
                given = self._with_parameter(values, self._part(self.place, values))
                alone = self._run_alone(given, [part[index] for part in slices])
                if not _close(alone, self._put_back(whole[index]), 1e-4, 1e-5):
                    return False, True
            # unit gradients with different weights: their sum is correct only if each of them is
            squares = self.squared_norms()
            finite = torch.isfinite(squares)
            usable = finite & (squares > 0)
            weights = torch.linspace(0.5, 1.5, self.count).to(squares)
            weights = torch.where(usable, weights * squares.rsqrt(), 0.0)
            total = self.weighted_sum(weights).to(self.dtype)
        except (RuntimeError, ValueError, IndexError):
            return False, True
        same = _close(total, self._whole_sum(values, weights), 1e-3, 1e-3)
        return same, bool(usable.any()) and bool(finite.all())

    def _whole_sum(self, values: list[Any], weights: Tensor) -> Tensor:
        """Return the weighted sum by backpropagating the scaled gradients through the call once."""
        rows = self._records(self.gradient.to(self.dtype))
        weights = weights.reshape(-1, *[1] * (rows.dim() - 1))
        scaled = torch.empty_like(self.gradient, dtype=self.dtype)
        self._records(scaled).copy_(torch.where(weights != 0, rows * weights, 0.0))
        with torch.enable_grad():
            parameter = self._part(self.place, values).detach().requires_grad_()
            whole = values[self.place].shape  # repeat the part, if it is one
            copies = [full // size for size, full in zip(parameter.shape, whole, strict=True)]
            repeated = parameter.repeat(copies) if max(copies, default=1) > 1 else parameter
            output = self.call(self._with_parameter(values, repeated))
            return torch.autograd.grad(output, parameter, scaled)[0]

    def _chunks(self, first: int, last: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of a range of records with their gradients `[records, entries]`."""
        size = 4 * max(1, self.gradient[0].numel(), torch.Size(self.shape).numel())
        step = max(1, 8 * self.budget.chunk_bytes // size)
        for start in range(first, last, step):
            formed = self.per_record(start, min(start + step, last))
            yield slice(start, start + len(formed)), formed.reshape(len(formed), -1)

    def squared_norms(self) -> Tensor:
        """See `Contribution`."""
        return torch.cat([row_norms(formed).square_() for _, formed in self._chunks(0, self.count)])

    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        total = torch.zeros((), dtype=self.dtype, device=weights.device)
        for rows, formed in self._chunks(start, stop):
            total = total + weights[rows.start - start : rows.stop - start].to(formed) @ formed
        return total.reshape(self.shape)

    def drop(self, bad: Tensor) -> None:
        """See `Contribution`."""
        self.bad = bad


def _close(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True
    )
