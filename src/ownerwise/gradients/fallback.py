"""Any other per-record call: the call itself is differentiated, record by record, by vmap.

``output = func(..., parameter, data, ...)``. For record i the call is repeated on slices of the
data arguments that have the batch dimension of the output; the vector-Jacobian product with the
record's output gradient is its parameter gradient. Before it is relied on, the repeated calls and
their gradients are compared with those of the whole call: a call that is not per-record is refused.

An argument may have as many entries as the batch has records by chance, in some batches and not in
others. Constants are therefore sliced only if it does not work without, every choice of slices is
compared anew, and the weighted sum is made of the very gradients whose norms were taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ownerwise.gradients.contributions import (
    Contribution,
    Policy,
    Saved,
    accumulation_dtype,
    masked,
)
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.sources import Source, name_of

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["fallback"]


class Call:
    """A call with its tensor arguments taken out, to be repeated with others in their places."""

    def __init__(self, func: Callable[..., Any], leaves: list[Any], spec: Any, where: str) -> None:
        self.func = func
        self.spec = spec
        self.where = where
        self.leaves = [Saved(v, where) if isinstance(v, Tensor) else v for v in leaves]

    def values(self, dtype: torch.dtype) -> list[Any]:
        """All arguments, floating tensors in the dtype of accumulation."""
        values = [v.get() if isinstance(v, Saved) else v for v in self.leaves]
        return [
            v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
        ]

    def __call__(self, values: list[Any]) -> Tensor:
        """The call on other arguments."""
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return self.func(*args, **kwargs)


class Repeated(Contribution):
    """The use of argument ``place`` in a call; arguments at ``fixed`` places are never sliced."""

    def __init__(
        self,
        call: Call,
        place: int,
        fixed: set[int],
        gradient: Tensor,
        layout: Layout,
        count: int,
        policy: Policy,
    ) -> None:
        self.call, self.place, self.gradient, self.layout = call, place, gradient, layout
        self.count, self.policy = count, policy
        self.dtype = accumulation_dtype(gradient.dtype)
        self.bad: Tensor | None = None
        self.told = True  # whether a comparison had gradients to compare
        values = call.values(self.dtype)
        self.shape = tuple(values[place].shape)
        dim = layout.dim
        self.sliced = [
            i
            for i, v in enumerate(values)
            if isinstance(v, Tensor)
            and i not in fixed
            and (layout.fold == "whole" or (v.dim() > dim and v.shape[dim] == gradient.shape[dim]))
        ]

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        values = self.call.values(self.dtype)
        gradient = self.layout.records(self.gradient, self.count)[start:stop].to(self.dtype)
        parts = [self.layout.records(values[i], self.count)[start:stop] for i in self.sliced]
        if self.bad is not None:
            gradient = masked(gradient, self.bad[start:stop])
            parts = [masked(p, self.bad[start:stop]) if p.is_floating_point() else p for p in parts]
        parameter = values[self.place]
        in_dims = (0, *[0] * len(parts))
        try:
            with warnings.catch_warnings():  # torch tells where a batching rule is missing
                warnings.filterwarnings("ignore", "There is a performance drop")
                return torch.func.vmap(self._one(values, parameter), in_dims)(gradient, *parts)
        except RuntimeError:  # no batching rule for this call
            one = self._one(values, parameter)
            return torch.stack(
                [one(gradient[i], *[p[i] for p in parts]) for i in range(stop - start)]
            )

    def _put_back(self, part: Tensor) -> Tensor:
        """One record's slice as a batch of one."""
        return part.unsqueeze(self.layout.dim) if self.layout.fold == "none" else part

    def _one(self, values: list[Any], parameter: Tensor) -> Callable[..., Tensor]:
        def one(gradient: Tensor, *parts: Tensor) -> Tensor:
            def run(p: Tensor) -> Tensor:
                arguments = list(values)
                arguments[self.place] = p
                for i, part in zip(self.sliced, parts, strict=True):
                    arguments[i] = self._put_back(part)
                return self.call(arguments)

            back = torch.func.vjp(run, parameter)[1]
            return back(self._put_back(gradient))[0]

        return one

    def works(self) -> bool:
        """Whether calls on single records, and their gradients, add up to the whole."""
        values = self.call.values(self.dtype)
        whole = self.layout.records(self.call(values), self.count)
        try:
            for index in {0, self.count // 2, self.count - 1}:
                arguments = list(values)
                for i in self.sliced:
                    arguments[i] = self._put_back(self.layout.records(values[i], self.count)[index])
                if not _close(self.call(arguments), self._put_back(whole[index]), 1e-4, 1e-5):
                    return False
            # gradients of length 1 with weights of their own: each must be right for the sum to be
            squares = self.squared_norms()
            usable = torch.isfinite(squares) & (squares > 0)
            weights = torch.linspace(0.5, 1.5, self.count).to(squares)
            weights = torch.where(usable, weights * squares.rsqrt(), 0.0)
            alone = self.weighted_sum(weights)
        except (RuntimeError, ValueError, IndexError):
            return False
        self.told = bool(usable.any()) and bool(torch.isfinite(squares).all())
        return _close(alone, self._whole_sum(values, weights), 1e-3, 1e-3)

    def _whole_sum(self, values: list[Any], factors: Tensor) -> Tensor:
        """The weighted sum by one product over the whole batch with scaled gradients."""
        moved = self.layout.records(self.gradient.to(self.dtype).clone(), self.count)
        scaled = torch.empty_like(self.gradient, dtype=self.dtype)
        target = self.layout.records(scaled, self.count)
        rows = factors.reshape(-1, *[1] * (moved.dim() - 1))
        target.copy_(torch.where(rows != 0, moved * rows, 0.0))
        with torch.enable_grad():
            parameter = values[self.place].detach().requires_grad_()
            values = [*values[: self.place], parameter, *values[self.place + 1 :]]
            return torch.autograd.grad(self.call(values), parameter, scaled)[0]

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Some records after others, with their gradients ``[records, entries]``."""
        size = 4 * max(1, self.gradient[0].numel(), torch.Size(self.shape).numel())
        step = max(1, 8 * self.policy.chunk_bytes // size)
        for start in range(0, self.count, step):
            formed = self.per_record(start, min(start + step, self.count))
            yield slice(start, start + len(formed)), formed.reshape(len(formed), -1)

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        norm = torch.linalg.vector_norm
        return torch.cat([norm(formed, dim=1).square_() for _, formed in self._chunks()])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        parts = [factors[rows].to(formed) @ formed for rows, formed in self._chunks()]
        return torch.stack(parts).sum(dim=0).reshape(self.shape)

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.bad = bad


def _close(found: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=rtol, atol=atol, equal_nan=True
    )


def fallback(
    tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Rule of calls without a rule."""
    from ownerwise.gradients.tape import writes

    leaves, spec = pytree.tree_flatten((args, kwargs))
    found = [(i, tape.source(v)) for i, v in enumerate(leaves) if isinstance(v, Tensor)]
    sources = [(i, source) for i, source in found if source is not None]
    where = f"{name_of(func)}({', '.join(source.name for _, source in sources)})"
    if writes(func) or kwargs.get("out") is not None:
        raise Refused(
            where,
            "a parameter is written into a tensor of the batch in place",
            "use an out-of-place call (torch.cat, torch.where, +)",
        )
    if func in UNDIFFERENTIATED or name_of(func) == "__get__":
        return func(*args, **kwargs)
    if func is Tensor.to and tape.source(args[0]) is None:  # x.to(parameter): its type only
        return func(*args, **kwargs)
    values = [tape.value(v) if isinstance(v, Tensor) else v for v in leaves]
    inner_args, inner_kwargs = pytree.tree_unflatten(values, spec)
    output = func(*inner_args, **inner_kwargs)
    if not isinstance(output, Tensor):
        raise Refused(
            where,
            "the call gives several results, and no rule covers it",
            "use layers with a rule, or freeze the parameter",
        )
    if not (output.is_floating_point() or output.is_complex()):
        return output  # comparisons and the like carry no gradient
    if output._is_view() or any(output is value for value in values):
        output = output.clone()  # what is tapped must be the call's own
    call = Call(func, values, spec, where)
    parametric = {i for i, _ in sources}
    constant = {i for i, v in enumerate(leaves) if tape.is_constant(v)}
    plain = tuple(repr(v) for v in leaves if not isinstance(v, Tensor))
    policy = tape.policy
    checked = tape.checked

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        for place, source in sources:
            if not values[place].is_floating_point():
                continue
            found = None
            for fixed in (parametric | constant, parametric):
                use = Repeated(call, place, fixed, gradient, layout, count, policy)
                key = (func, plain, place, source.key, layout, tuple(use.sliced))
                works = checked[key] if key in checked else use.works()
                if use.told:
                    checked[key] = works
                if works:
                    found = use
                    break
            if found is None:
                raise Refused(
                    where,
                    "the call on one record alone differs from its part of the call on the batch",
                    "use a layer with a rule, or a call that works on each record alone",
                )
            yield source, found

    return tape.tap(func, output, [source for _, source in sources], range(output.dim()), build)


# Calls that look at a tensor without computing with it.
UNDIFFERENTIATED = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.type),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full),
        *(Tensor.new_tensor, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.type_as),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.is_tensor, torch.numel),
    )
)
