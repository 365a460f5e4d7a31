"""Chains of vector layers: as the loop over records has them, or left to the tape."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ownerwise.gradients import Chain, Refused, Segments, Tape
from ownerwise.gradients.precision import HUGE
from tools.record_loop import assert_equal, loop, wavy

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid]


def run(model, x, loss=wavy):
    chain = Chain.of(model, x)
    assert chain is not None
    return chain.backward(loss(chain.forward(x)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_gradients_norms_and_sums_are_those_of_the_loop(data):
    widths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    layers = [nn.Flatten()] if data.draw(st.booleans()) else []
    before = 4
    for width in widths:
        layers += [nn.Linear(before, width, bias=data.draw(st.booleans()))]
        layers += [data.draw(st.sampled_from(ACTIVATIONS))()] * data.draw(st.integers(0, 2))
        layers += [nn.Flatten()] * data.draw(st.booleans())
        before = width
    model = nn.Sequential(*layers[:2], nn.Sequential(*layers[2:]))
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(data.draw(st.booleans()))
    shape = (2, 2) if layers and isinstance(layers[0], nn.Flatten) else (4,)
    x = torch.randn(data.draw(st.integers(1, 5)), *shape)
    records = run(model, x)
    assert_equal(records, loop(model, x))
    assert list(records.weighted_sum(records.norms)) == [
        p for p in model.parameters() if p.requires_grad
    ]


def test_frozen_layers_at_either_end():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for frozen in (0, 4):
        partly = copy.deepcopy(model)
        partly[frozen].requires_grad_(False)
        x = torch.randn(5, 3)
        assert_equal(run(partly, x), loop(partly, x))


def test_a_single_layer_is_a_chain():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert_equal(run(model, x), loop(model, x))


def test_activations_in_place_change_no_input_and_no_gradient():
    inplace = nn.ReLU(inplace=True)
    model, x = nn.Sequential(inplace, nn.Linear(3, 4), inplace, nn.Linear(4, 2)), torch.randn(4, 3)
    before = x.clone()
    records = run(model, x)
    assert torch.equal(x, before)
    model[0] = model[2] = nn.ReLU()
    assert_equal(records, loop(model, x))


def test_outputs_are_the_models_with_and_without_gradients():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)), torch.randn(4, 3)
    chain = Chain.of(model, x)
    assert chain.forward(x).requires_grad
    with torch.no_grad():
        assert torch.equal(chain.forward(x), model(x))
        assert not chain.forward(x).requires_grad


def test_a_record_that_is_not_finite_contributes_exactly_zero():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    x[1, 2], x[3, 0] = torch.nan, torch.inf
    records = run(model, x)
    assert torch.isfinite(records.norms).tolist() == [True, False, True, False, True]
    kept = torch.tensor([0, 2, 4])
    rest = run(model, x[kept])
    for whole, part in zip(
        records.weighted_sum(torch.ones(5)).values(),
        rest.weighted_sum(torch.ones(3)).values(),
        strict=True,
    ):
        torch.testing.assert_close(whole, part)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e20, 2 * HUGE])
@pytest.mark.parametrize("sizes", [None, [2, 3], [1, 4], [1] * 6 + [40]])  # the last: in parts
def test_the_gradients_know_whether_all_norms_are_finite(bad, sizes):
    """The clipping rule receives finite norms only; a huge input counts as not finite."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5 if sizes is None else sum(sizes), 3)
    segments = None if sizes is None else Segments(torch.tensor(sizes))

    def both(x):
        with Tape(model) as tape:
            outputs = model(x)
        chain = Chain.of(model, x)
        return tape.backward(wavy(outputs), segments), chain.backward(
            wavy(chain.forward(x)), segments
        )

    assert all(records.finite and torch.isfinite(records.norms).all() for records in both(x))
    x[4, 1] = bad
    for records in both(x):
        assert records.finite == bool(torch.isfinite(records.norms).all())
        assert not records.finite or sizes is not None  # formed gradients may be huge


def test_norms_of_hundreds_of_layers_are_finite():
    """Their sum could overflow where every layer's own norm does not."""
    layers = [nn.Linear(1, 1, dtype=torch.float32) for _ in range(400)]
    x = torch.randn(4, 1, dtype=torch.float32)
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1)
            layer.bias.zero_()
    x[2] = 9.9e8

    def loss(outputs):
        return outputs[:, 0] * torch.tensor([1.0, 1.0, 9.9e8, 1.0], dtype=torch.float32)

    records = run(nn.Sequential(*layers), x, loss)
    assert torch.isfinite(records.norms).tolist() == [True, True, False, True]
    assert not records.finite


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129, 130, 251])
@pytest.mark.parametrize("width", [4, 90])
def test_sums_in_blocks_equal_sums_at_once(count, width):
    """Layers are summed in float64 if they are small, and in blocks if they are large."""
    model = nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 2)).double()
    x = torch.randn(count, width, dtype=torch.float64)
    x[count // 2, 0] = torch.nan
    records = run(model, x)
    assert len(records) == count
    factors = torch.rand(count)
    whole, blocked = (records.weighted_sum(factors, in_blocks=blocks) for blocks in (False, True))
    for parameter, values in whole.items():
        torch.testing.assert_close(values, blocked[parameter])


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def hooked():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def replaced():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].forward = lambda x: functional.linear(x, model[0].weight) * 2
    return model


def shared():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(Doubled(3, 2)),
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout()),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
        lambda: nn.Sequential(nn.Linear(3, 2).requires_grad_(False)),
        lambda: nn.Sequential(nn.Linear(3, 2, dtype=torch.float32)),
        lambda: nn.Sequential(nn.Flatten(0), nn.Linear(3, 2)),
        lambda: nn.Sequential(),
        hooked,
        replaced,
        shared,
        tied,
    ],
)
def test_what_is_not_exactly_a_chain_is_left_to_the_tape(model):
    assert Chain.of(model(), torch.randn(4, 3)) is None


def test_inputs_that_are_not_plain_vectors_are_left_to_the_tape():
    model = nn.Sequential(nn.Linear(3, 2))
    vectors = torch.randn(4, 3)
    assert Chain.of(model, vectors) is not None
    wrong = [torch.randn(4, 5, 3), vectors.clone().requires_grad_(), nn.Parameter(vectors)]
    wrong += [vectors.half(), (vectors,), torch.zeros(4, 3, dtype=torch.long)]
    assert [Chain.of(model, x) for x in wrong] == [None] * len(wrong)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Chain.of(model, vectors) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert Chain.of(model, vectors) is None
    finally:
        handle.remove()


def test_a_loss_that_uses_parameters_is_refused():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with pytest.raises(Refused, match=r"0\.weight"):
        run(model, x, lambda outputs: wavy(outputs) + model[0].weight.square().sum())
    assert model[0].weight.grad is None


def test_a_gradient_that_a_parameter_held_stays():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    held = model[0].weight.grad = torch.randn(2, 3)
    run(model, x)
    assert model[0].weight.grad is held


def test_a_loss_without_a_gradient_gives_zeros():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    records = run(model, x, lambda outputs: torch.zeros(4))
    assert not records.norms.any()
    assert not any(total.any() for total in records.weighted_sum(torch.ones(4)).values())
