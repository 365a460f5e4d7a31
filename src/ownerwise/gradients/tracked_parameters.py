"""Track tensors computed from trainable parameters, and propagate gradients to the parameters.

While a model runs, each tensor is one of three kinds: *parametric* (a trainable parameter, or a
tensor computed only from parameters and constants, such as a transposed, normalised or cast
weight), *constant* (a buffer, or a tensor created without data), or *data*. A call with both
parametric and data arguments counts as a use of a parameter and is tapped. A derived parametric
tensor keeps its autograd graph, so one vector-Jacobian product propagates sums back to the
parameters. No operation in that graph is computed in half precision (`derivations`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.gradients.calls import Function, name_of, tensors_in, writes_in_place
from ownerwise.gradients.derivations import is_half, repeated_wide, runs_in_half
from ownerwise.gradients.problems import Refused

__all__ = ["FACTORIES", "ParameterTracker", "TrackedParameter", "changed_by_data"]

# Calls that only move entries around, so that norms are unchanged.
ISOMETRIC = frozenset(
    (
        *("t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint"),
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("view_as", "reshape_as", "contiguous", "clone"),
    )
)
# Calls that create constants. torch.tensor and random calls are left out: they may return data.
FACTORIES = frozenset(
    (
        *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange),
        *(torch.linspace, torch.logspace, torch.tril_indices, torch.triu_indices),
        *(torch.hann_window, torch.hamming_window, torch.blackman_window, torch.scalar_tensor),
    )
)
ISOMETRIC_PROPERTIES = frozenset((Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]


def _walk(model: nn.Module) -> tuple[list[int], list[Any]]:
    """Return a fingerprint of a model's structure, and the model's modules.

    The fingerprint lists the ids of modules, parameters (with `requires_grad`) and buffers.
    """
    marks: list[int] = []
    modules: list[Any] = [model]
    for module in modules:  # grows during the loop
        marks.append(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                marks += (id(parameter), parameter.requires_grad)
        if module._buffers:
            marks += map(id, module._buffers.values())
        if module._modules:
            modules += [m for m in module._modules.values() if m is not None]
    return marks, modules


class TrackedParameter:
    """A parametric tensor and its roots, the parameters from which it is computed.

    Attributes:
        part: the tensor of which this one is a repetition, if it is one (`repetition`).
        rows: if the tensor consists of rows of a parameter: the parameter, the ids of the rows, and
            the id whose row receives no gradient.
    """

    __slots__ = ("is_root", "isometric", "key", "name", "part", "roots", "rows", "tensor", "wide")

    def __init__(
        self,
        tensor: Tensor,
        name: str,
        roots: tuple[nn.Parameter, ...],
        isometric: bool,
        wide: tuple[Tensor, tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.tensor = tensor
        self.name = name
        self.roots = roots
        self.isometric = isometric  # if true, there is one root, with the same norms
        # the tensor and its roots in float32 or better, joined by a graph of that precision
        self.wide = (tensor, roots) if wide is None else wide
        self.is_root = len(roots) == 1 and roots[0] is tensor  # a parameter itself
        self.key = tuple([id(root) for root in roots])
        self.part: TrackedParameter | None = None
        self.rows: tuple[TrackedParameter, Tensor, int | None] | None = None

    @property
    def value(self) -> Tensor:
        """The detached tensor, for which autograd computes no batch gradient."""
        return self.tensor.detach()

    def pull_back(self, gradients: Tensor, batched: bool) -> list[Tensor | None]:
        """Turn gradients of this tensor, per record if `batched`, into gradients of its roots."""
        tensor, roots = self.wide
        with torch.enable_grad():
            back = torch.autograd.grad(
                tensor,
                roots,
                gradients.to(tensor.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        return list(back)


class ParameterTracker:
    """The parametric and constant tensors seen so far in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._marks: list[int] = []  # the state of the model from which the maps below were built
        self._modules: list[Any] = []
        self._trained: dict[int, TrackedParameter] = {}
        self._fixed: dict[int, Tensor] = {}
        self._wide_roots: dict[int, Tensor] = {}
        self.parametric: dict[int, TrackedParameter] = {}
        self.constant: dict[int, Tensor] = {}
        self.restart(model)

    def restart(self, model: nn.Module) -> None:
        """Begin a forward pass; the model's parameters may have changed since the last pass."""
        marks, modules = _walk(model)
        if marks != self._marks:
            self._marks = marks
            self._modules = modules  # held, so that their ids stay valid
            named = dict(model.named_parameters())
            trained = {name: p for name, p in named.items() if p.requires_grad}
            frozen = [p for name, p in named.items() if name not in trained]
            self._trained = {id(p): TrackedParameter(p, n, (p,), True) for n, p in trained.items()}
            self._fixed = {id(t): t for t in (*frozen, *model.buffers())}
        self.parametric = self._trained.copy()
        self.constant = self._fixed.copy()
        self._wide_roots = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [tracked.roots[0] for tracked in self._trained.values()]

    def derive(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Register the output that `func` computed from parametric and constant tensors."""
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(output)
        parents = [self.parametric[id(t)] for t in inputs if id(t) in self.parametric]
        roots = {id(root): root for parent in parents for root in parent.roots}
        isometric = (
            len(inputs) == 1
            and parents[0].isometric
            and (name_of(func) in ISOMETRIC or func in ISOMETRIC_PROPERTIES)
        )
        wide = outputs
        if any(p.wide[0] is not p.tensor for p in parents) or runs_in_half([*inputs, *outputs]):
            replaced = {id(parent.tensor): self._widened(parent) for parent in parents}
            wide = repeated_wide(func, args, kwargs, output, replaced)
        wide_roots = tuple(self._wide_roots.get(key, root) for key, root in roots.items())
        unchanged = set() if writes_in_place(func) else {id(parent.tensor) for parent in parents}
        for tensor, precise in zip(outputs, wide, strict=True):
            if id(tensor) in unchanged:  # such as `to` without effect
                continue
            if tensor.requires_grad:
                name = f"{name_of(func)}({', '.join(p.name for p in parents)})"
                same = isometric and tensor.numel() == parents[0].tensor.numel()
                self.parametric[id(tensor)] = TrackedParameter(
                    tensor, name, tuple(roots.values()), same, (precise, wide_roots)
                )
            else:
                self.constant[id(tensor)] = tensor

    def _widened(self, tracked: TrackedParameter) -> Tensor:
        """Return a parametric tensor in at least float32 precision, with its graph."""
        if not (tracked.is_root and is_half(tracked.tensor)):
            return tracked.wide[0]
        key = id(tracked.tensor)
        if key not in self._wide_roots:
            self._wide_roots[key] = tracked.tensor.detach().float().requires_grad_()
        return self._wide_roots[key]

    def refuse_write(self, func: Function, written: Tensor) -> None:
        """Reject a call that writes data into the model: the data would be released without noise.

        A view or the `.data` of a buffer shares the buffer's memory, so addresses are compared.
        The addresses are looked up on every call, because `model.to` changes them.
        """
        if not written.numel():
            return
        place = written.untyped_storage().data_ptr()
        model: nn.Module = self._modules[0]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.untyped_storage().data_ptr() == place:
                raise changed_by_data(name, name_of(func))
        for tracked in self.parametric.values():
            if tracked.tensor.untyped_storage().data_ptr() == place:
                raise _changed_in_place(func, tracked, "data are written into it")
        for key, tensor in list(self.constant.items()):
            if tensor.untyped_storage().data_ptr() == place:
                del self.constant[key]

    def refuse_shared_write(
        self, func: Function, written: Any, used: set[TrackedParameter]
    ) -> None:
        """Reject an in-place change of a derived tensor that other tensors or taps refer to.

        The change gives the tensor another graph, but its views and parts, and the taps that have
        already used it, would keep or receive the wrong one.

        Args:
            func: the call.
            written: the tensor that it changes.
            used: the tensors whose uses are tapped.
        """
        if not isinstance(written, Tensor) or not written.numel():
            return
        place = written.untyped_storage().data_ptr()
        everything = self.parametric.values()
        parts = {id(tracked.part) for tracked in everything if tracked.part is not None}
        for tracked in everything:
            if tracked.is_root or tracked.tensor.untyped_storage().data_ptr() != place:
                continue
            if tracked.tensor is not written:
                raise _changed_in_place(func, tracked, "a view of it is changed in place")
            if tracked in used or id(tracked) in parts:
                raise _changed_in_place(func, tracked, "it is changed in place after its use")
            tracked.part = tracked.rows = None

    def refuse_replaced(self) -> None:
        """Raise an error if the forward pass replaced a parameter or assigned data to a buffer."""
        for module in self._modules:
            for name, parameter in module._parameters.items():
                key = id(parameter)
                if parameter is not None and key not in self._trained and key not in self._fixed:
                    raise changed_by_data(name, "assignment")
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in self._fixed or id(buffer) in self.constant:
                    continue
                raise changed_by_data(name, "assignment")


def _changed_in_place(func: Function, tracked: TrackedParameter, what: str) -> Refused:
    return Refused(
        f"{name_of(func)}({tracked.name})",
        f"the tensor is computed from parameters, and {what}",
        "use an out-of-place call (torch.cat, torch.where, +)",
    )


def changed_by_data(name: str, how: str = "a call") -> Refused:
    """Return the error for a parameter or buffer to which a forward pass writes data."""
    return Refused(
        name,
        f"it is changed by {how} based on the records in the batch, and the change would "
        "be released without noise",
        "do not keep batch statistics in the model (use GroupNorm instead of BatchNorm), and "
        "initialise parameters from public values",
    )
