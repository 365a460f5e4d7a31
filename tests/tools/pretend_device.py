"""A pretend device: tensors that say they are on "meta" but hold numbers, on a machine without GPU.

As on a GPU, a call that mixes tensors of two devices fails; a tensor gets to the device, and back,
only through `to`, `cpu`, `copy_` or a call with `device=`. What runs without an error here moves
everything that must be moved. Kernels, streams and pinned memory are not tested in this way.
"""

import contextlib

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PRETEND = torch.device("meta")
_aten = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.copy_.default)
_INDEX = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)  # as on GPUs


class Far(Tensor):
    """A tensor on the pretend device; `near` holds its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near):
        far = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(),
            dtype=near.dtype, layout=near.layout, device=PRETEND,
        )  # fmt: skip
        far.near = near
        return far

    def __repr__(self):
        return f"Far({self.near!r})"

    def untyped_storage(self):
        return self.near.untyped_storage()

    def __getitem__(self, index):
        return super().__getitem__(_indexing(index))

    def __setitem__(self, index, value):
        super().__setitem__(_indexing(index), value)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _indexing(index):
    """Indices as tensors: torch would make a list of them itself, on the device, without a call."""
    return torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index


class PretendDevice:
    """Within this context, `device="meta"` is the pretend device."""

    def __init__(self):
        self._modes = contextlib.ExitStack()

    def __enter__(self):
        self._modes.enter_context(_Calls())
        self._modes.enter_context(_Makers())

    def __exit__(self, *error):
        self._modes.close()


class _Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """Tensors from lists and arrays are made on the CPU and moved, for which torch has no call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if func is Tensor.new_tensor and to is None:
            to, args, func = args[0].device, (*args[1:],), torch.tensor
        if func in (torch.tensor, torch.as_tensor) and to is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(to)
        return func(*args, **kwargs)


def _run(func, args, kwargs):
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    far = [tensor for tensor in given if isinstance(tensor, Far)]
    near = [t for t in given if not isinstance(t, Far) and t.dim()]
    if any(t.device == PRETEND for t in given if not isinstance(t, Far)):
        raise RuntimeError(f"a tensor without numbers got into {func}")
    if far and near and func not in (*_MOVES, *_INDEX):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found two devices, in {func}"
        )
    to = kwargs.get("device")
    there = torch.device(to) == PRETEND if to is not None else bool(far)
    if func is _aten.copy_.default:
        there = isinstance(args[0], Far)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map(lambda leaf: leaf.near if isinstance(leaf, Far) else leaf, (args, kwargs))
    result = func(*plain[0], **plain[1])
    wrappers = {id(tensor.near): tensor for tensor in far}

    def wrap(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        return wrappers.get(id(leaf)) if id(leaf) in wrappers else Far(leaf) if there else leaf

    return tree_map(wrap, result)
