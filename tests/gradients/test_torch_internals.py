"""Internals of torch that the gradients rely on; each test says what to do when they change."""

import inspect
import re
import tomllib
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import ownerwise as ow
from ownerwise import torch_internals as internals
from ownerwise.gradients.calls import map_tensors, tensors_in

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "ownerwise").rglob("*.py"))


def test_the_declared_version_is_the_tested_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = (d for d in project["dependencies"] if re.match(r"torch\b", d))
    major, minor = map(int, internals.TESTED.split("."))
    assert declared == f"torch>={internals.TESTED},<{major}.{minor + 1}"
    assert f"torch=={internals.TESTED}." in (ROOT / "constraints.txt").read_text()
    assert torch.__version__.startswith(f"{internals.TESTED}."), (
        "the tests run with another torch than TESTED: read each test here, then raise both"
    )


def test_nothing_is_missing_and_no_warning_is_due():
    assert internals.missing() == []
    with warnings.catch_warnings(record=True) as seen:
        internals.check()
    assert seen == []


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("torch.nn.modules.module._no_such_hook", "find hooks"),
        ("torch.no_such_module._function", "walk"),
        ("torch.Tensor._no_such_counter", "notice changes"),
        ("torch.ops.aten.no_such_backward.default", "derivative"),
        ("torch.ops.aten.tanh_backward.no_such_overload", "derivative"),
    ],
)
def test_a_missing_internal_is_named_with_its_use_and_the_tested_version(path, use):
    with pytest.raises(ImportError, match=f"relies on: {re.escape(path)}") as error:
        internals.check("2.5.0", {**internals.INTERNALS, path: use})
    assert f"({use})" in str(error.value)
    assert f"pip install 'torch=={internals.TESTED}.*'" in str(error.value)


@pytest.mark.parametrize("names", ["MODULE_STATE", "OPTIMIZER_STATE"])
def test_a_missing_attribute_is_named_too(names, monkeypatch):
    monkeypatch.setattr(internals, names, {"_no_such_dictionary": "find hooks"})
    with pytest.raises(ImportError, match=r"_no_such_dictionary \(find hooks\)"):
        internals.check()


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "3.0.0+cpu", "2.1.3"])
def test_an_untested_version_is_warned_of(version):
    with pytest.warns(ow.PrivacyWarning, match=f"tested with torch {internals.TESTED}"):
        internals.check(version)


def test_every_private_name_of_torch_in_the_sources_is_listed():
    """A private name is an import from torch or an attribute of its objects, with an underscore."""
    named = {part for path in internals.INTERNALS for part in path.split(".")}
    named |= {*internals.MODULE_STATE, *internals.OPTIMIZER_STATE}
    objects = r"tensor|output|parameter|args\[0\]|module|layer|optimizer"
    private = re.compile(
        r"\b(?:torch|nn|functional|batchnorm|instancenorm|optim)(?:\.\w+)*\.(_[a-zA-Z]\w*)"
        r"|^from torch\S* import .*?\b(_\w+)"
        rf"|\b(?:{objects})\.(_[a-z]\w*)"
        r"|\bstate\[\"(_\w+)\"\]",
        re.MULTILINE,
    )
    found = {}
    for path in SOURCES:
        if path.name != "torch_internals.py":
            for match in private.finditer(path.read_text()):
                found[next(filter(None, match.groups()))] = path.name
    assert {"_version", "_is_view", "_BatchNorm", "_buffers", "_forward_hooks"} <= found.keys()
    assert found.keys() - named == set(), found
    imported = re.compile(r"^(?:from|import) torch\S*\._", re.MULTILINE)
    assert [p.name for p in SOURCES if imported.search(p.read_text())] == []


def test_step_hooks_are_in_the_dictionaries_of_optimizers():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    remedy = "torch keeps step hooks elsewhere: adapt `step_hooks` in step/parameter_watch.py"
    assert not any(vars(optimizer)[name] for name in internals.OPTIMIZER_STATE), remedy
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert all(vars(optimizer)[name] for name in internals.OPTIMIZER_STATE), remedy
    assert not any(internals.global_step_hooks), remedy
    handles = [
        register(lambda *_: None)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        assert all(internals.global_step_hooks), remedy
    finally:
        for handle in handles:
            handle.remove()


def test_flat_noise_takes_the_shapes_of_the_parameters():
    like = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(4)]
    shaped = internals.unflatten_dense_tensors(torch.arange(11.0), like)
    remedy = "torch._utils._unflatten_dense_tensors changed: adapt randomness/noise.py"
    assert [tuple(part.shape) for part in shaped] == [(2, 3), (), (4,)], remedy
    assert torch.equal(torch.cat([part.flatten() for part in shaped]), torch.arange(11.0)), remedy


def test_fused_optimizers_and_data_do_not_count_versions():
    """Why the watch over the parameters compares values as well."""
    parameter = nn.Parameter(torch.ones(2))
    version = parameter._version
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    parameter.data.add_(1)
    assert parameter._version == version
    torch.optim.SGD([parameter], lr=0.0).step()
    assert parameter._version > version


def test_attention_is_plain_python_that_dispatches_once():
    forward = functional.multi_head_attention_forward
    remedy = (
        "torch changed multi_head_attention_forward: read its body, then adapt `_body` in "
        "gradients/rules/attention.py so that its inner calls reach the tape"
    )
    assert inspect.isfunction(forward), remedy
    assert "has_torch_function" in forward.__code__.co_names, remedy
    assert "has_torch_function" in forward.__globals__, remedy
    assert "linear" in forward.__code__.co_names, remedy
    assert forward.__code__.co_freevars == (), remedy
    assert not forward.__kwdefaults__, remedy
    names = list(inspect.signature(forward).parameters)
    assert names == [
        *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
        *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight"),
        *("out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask"),
        *("use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        *("static_k", "static_v", "average_attn_weights", "is_causal"),
    ], remedy + "; a new argument may also matter to `_is_plain`"
    assert len(forward.__defaults__) == 12, remedy


def test_a_function_mode_can_be_entered_again_inside_itself():
    calls = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            if func is torch.relu:
                TorchFunctionMode.__enter__(self)
                try:
                    return torch.exp(*args)
                finally:
                    TorchFunctionMode.__exit__(self, None, None, None)
            return func(*args, **(kwargs or {}))

    ones = torch.ones(1)
    with Mode():
        torch.relu(ones)
    assert calls == [torch.relu, torch.exp], (
        "a TorchFunctionMode no longer nests in itself: find another way for `Tape.watch` to see "
        "the calls inside a rule"
    )


def test_exchanges_in_either_direction_are_dispatched():
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            dist.all_reduce(gradient := gradient.clone())
            return gradient

    seen = []

    class Mode(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ones = torch.ones(3, requires_grad=True)
        for exchange in (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_gather_object([None], 0),
            lambda: Exchange.apply(ones).sum().backward(),
        ):
            seen.clear()
            with Mode():
                exchange()
            assert "c10d" in seen, "exchanges bypass the dispatcher: adapt processes/apart.py"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "overloads"),
    [
        ("tanh_backward", ("default", "grad_input")),
        ("sigmoid_backward", ("default", "grad_input")),
        ("threshold_backward", ("default",)),
        ("convolution_backward", ("default",)),
    ],
)
def test_aten_operators(name, overloads):
    operator = getattr(torch.ops.aten, name)
    assert set(overloads) <= set(operator.overloads()), (
        f"aten::{name} lost an overload: chain.py, rules/lstm.py and contributions/convolved.py "
        "must form this derivative with another call"
    )


def test_the_values_of_aten_derivatives():
    gradient, output = torch.tensor([2.0]), torch.tensor([0.25])
    remedy = "an aten derivative changed its arguments: adapt chain.py and rules/lstm.py"
    aten = torch.ops.aten
    assert aten.tanh_backward(gradient, output).item() == 2 * (1 - 0.25**2), remedy
    assert aten.sigmoid_backward(gradient, output).item() == 2 * 0.25 * 0.75, remedy
    assert aten.threshold_backward(gradient, output, 0).item() == 2, remedy
    assert aten.threshold_backward(gradient, -output, 0).item() == 0, remedy


def test_global_hooks_are_seen():
    remedy = (
        "torch.nn.modules.module._has_any_global_hook changed: Chain.of must find global hooks in "
        "another way, since a chain does not run them"
    )
    assert not nn.modules.module._has_any_global_hook(), remedy
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert nn.modules.module._has_any_global_hook(), remedy
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("register", "slot"),
    [
        ("register_forward_hook", "_forward_hooks"),
        ("register_forward_pre_hook", "_forward_pre_hooks"),
        ("register_full_backward_hook", "_backward_hooks"),
        ("register_full_backward_pre_hook", "_backward_pre_hooks"),
    ],
)
def test_hooks_of_a_module_are_in_its_dictionary(register, slot):
    module = nn.Linear(1, 1)
    assert not module.__dict__[slot]
    getattr(module, register)(lambda *_: None)
    assert module.__dict__[slot], f"{slot} no longer holds hooks: adapt `_unroll` in chain.py"


def test_parameters_buffers_and_children_are_in_dictionaries():
    module = nn.Sequential(nn.BatchNorm1d(2))
    remedy = "torch stores the state of modules elsewhere: adapt tracked_parameters.py and state.py"
    assert list(module._modules) == ["0"], remedy
    assert list(module[0]._parameters) == ["weight", "bias"], remedy
    assert list(module[0]._buffers) == ["running_mean", "running_var", "num_batches_tracked"], (
        remedy
    )


def test_versions_count_in_place_changes_also_through_views_and_detached_copies():
    tensor = torch.zeros(2)
    detached, version = tensor.detach(), tensor._version
    tensor[:1].add_(1)
    assert detached._version == version + 1, (
        "Tensor._version no longer counts changes of shared memory: `Saved` in saved.py must "
        "notice them in another way"
    )


def test_views_are_recognised():
    base = torch.zeros(2)
    assert base[:1]._is_view(), "adapt rules/pointwise.py and rules/fallback.py"
    assert not base._is_view(), "adapt rules/pointwise.py and rules/fallback.py"
    assert base[:1]._base is base, "adapt rules/context.py"
    assert base._base is None, "adapt rules/context.py"


def test_classes_that_the_check_looks_for():
    remedy = "a private class of torch.nn changed: adapt `_of_module` in preflight.py"
    assert issubclass(nn.SyncBatchNorm, nn.modules.batchnorm._BatchNorm), remedy
    assert issubclass(nn.InstanceNorm2d, nn.modules.instancenorm._InstanceNorm), remedy
    assert issubclass(nn.LazyLinear, nn.modules.lazy.LazyModuleMixin), remedy


def test_checkpoints_transformations_and_the_backward_call_are_seen():
    remedy = "adapt gradients/recomputation.py, and run tests/gradients/test_recomputation.py"
    assert internals.saved_tensors_hook(True) is None, remedy
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert internals.saved_tensors_hook(True) is not None, remedy
    assert internals.in_transform() is None, remedy
    inside = []
    torch.vmap(lambda t: inside.append(internals.in_transform()) or t)(torch.ones(2))
    assert inside[0] is not None, remedy

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func, args, kwargs))
            return func(*args, **(kwargs or {}))

    loss = torch.ones(2, requires_grad=True) * 2
    with Mode():
        torch.autograd.backward(loss, torch.ones(2), retain_graph=True)
        with internals.without_functions():
            loss.sin()
    ((_, (losses,), given),) = (call for call in seen if call[0] is torch.autograd.backward)
    assert losses == (loss,), remedy
    assert given["grad_tensors"].shape == (2,), remedy
    assert given["retain_graph"] is True, remedy
    assert torch.Tensor.sin not in [func for func, *_ in seen], remedy

    stack = []
    code = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    torch.utils.checkpoint.checkpoint(
        lambda t: stack.extend(frame.frame.f_code for frame in inspect.stack(0)) or t,
        loss,
        use_reentrant=True,
    )
    assert code in stack, remedy


def test_properties_of_tensors_are_dispatched_as_getters():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert torch.zeros(2, 3).mT.shape == (3, 2)
    assert torch.Tensor.mT.__get__ in seen, (
        "torch dispatches Tensor.mT differently: adapt ISOMETRIC_PROPERTIES in "
        "tracked_parameters.py"
    )


def test_trees_are_walked_through_all_containers():
    class Output(dict):
        pass

    class Stack(list):
        pass

    Pair = namedtuple("Pair", "a b")
    tensors = [torch.full((1,), float(n)) for n in range(7)]
    largest = torch.return_types.max((tensors[5], tensors[6]))
    tree = [
        Output(x=tensors[0]),
        {"y": (tensors[1], "text")},
        Pair(tensors[2], Stack([tensors[3]])),
        tensors[4],
        largest,
        None,
    ]
    remedy = "torch.utils._pytree changed: adapt calls.py, or tensors are overlooked"
    assert [t.item() for t in tensors_in(tree)] == list(range(7)), remedy
    changed = map_tensors(lambda tensor: tensor + 1, tree)
    assert [t.item() for t in tensors_in(changed)] == list(range(1, 8)), remedy
    leaves, spec = pytree.tree_flatten(((tensors[0], 2), {"key": tensors[1]}))
    assert pytree.tree_unflatten(leaves, spec) == ((tensors[0], 2), {"key": tensors[1]}), remedy
