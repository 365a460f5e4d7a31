"""Every network: its size, its outputs, and that the private step can train it."""

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise import models
from tools import network_tools as rules
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

CLASSES = {"mlp": 3, "text-lstm": 2}

OPTIONS = {
    "text-lstm": {"symbols": 59},
    "linear-head": {"inputs": 4096, "classes": 10},
    "mlp-head": {"inputs": 1280, "classes": 10},
}

# layer by layer
PARAMETERS = {
    "mlp": 22 * 47 + 2 * 48 * 47 + 48 * 3,
    "mnist-cnn": 26_010,
    "resnet18": 11_173_962,
    "text-lstm": 59 * 64 + 512 * (64 + 128 + 2) + 129 * 2,
    "linear-head": 4097 * 10,
    "mlp-head": 1281 * 512 + 513 * 10,
    "scattering-head": (81 * 7 * 7 + 1) * 10,
}


def records(name: str, count: int) -> torch.Tensor:
    torch.manual_seed(1)
    shapes = {
        "mlp": (21,), "mnist-cnn": (1, 28, 28), "resnet18": (3, 32, 32),
        "linear-head": (4096,), "mlp-head": (1280,), "scattering-head": (81, 7, 7),
    }  # fmt: skip
    if name in shapes:
        return torch.randn(count, *shapes[name])
    return rules.tokens(count)


def test_every_network_of_the_library_is_covered():
    own = {
        name for name, build in models.BUILDERS.items() if build.__module__.startswith("ownerwise.")
    }
    assert own == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_and_outputs(name):
    model = models.build(name, **OPTIONS.get(name, {}))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    with torch.no_grad():
        outputs = model(records(name, 3))
    assert outputs.shape == (3, CLASSES.get(name, 10))
    assert outputs.isfinite().all()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_private_step_trains_it(name):
    small = {"width": 8, "groups": 4} if name == "resnet18" else {}
    model = models.build(name, **OPTIONS.get(name, {}), **small)
    rules.assert_the_private_step_trains(model, records(name, 4), CLASSES.get(name, 10))


def test_a_head_without_biases_has_only_weights():
    head = models.build("linear-head", inputs=8, classes=3, bias=False)
    assert [tuple(p.shape) for p in head.parameters()] == [(3, 8)]
    assert (head(torch.zeros(2, 8)) == 0).all()


def test_the_full_resnet_has_no_problem():
    assert ow.check(models.build("resnet18")) == []


def test_a_hundred_classes():
    model = models.build("mnist-cnn", classes=100)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS["mnist-cnn"] + 33 * 90
    assert model(records("mnist-cnn", 2)).shape == (2, 100)


def test_padding_changes_neither_outputs_nor_gradients():
    """Pitfall 33."""
    torch.manual_seed(0)
    rules.assert_padding_has_no_effect(models.build("text-lstm", **OPTIONS["text-lstm"]))


def test_an_empty_text_has_a_finite_output():
    model = models.build("text-lstm", **OPTIONS["text-lstm"])
    assert model(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()


def test_a_tempered_sigmoid_is_tanh_by_default():
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    torch.testing.assert_close(models.TemperedSigmoid()(x), x.tanh(), rtol=0, atol=1e-15)
    values = models.TemperedSigmoid(1.5, 3.0, 0.5)(x)
    expected = 1.5 / (1 + np.exp(-3.0 * x.numpy())) - 0.5
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-15)
    assert repr(models.TemperedSigmoid(1.5)) == (
        "TemperedSigmoid(scale=1.5, temperature=2.0, offset=1.0)"
    )


def test_tanh_and_the_tempered_sigmoid_make_the_same_network():
    rules.assert_tempered_sigmoids_generalise_tanh(models.mnist_cnn, records("mnist-cnn", 2))


@pytest.mark.parametrize("name", ["mlp", "mnist-cnn"])
def test_the_private_step_trains_tempered_sigmoids(name):
    torch.manual_seed(0)
    model = models.build(name, activation=rules.TEMPERED)
    rules.assert_sums_are_those_of_the_loop(model, records(name, 6), CLASSES.get(name, 10))


def test_groups_divide_the_width():
    model = models.ResNet18(width=24)
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {
        (24, 24), (24, 48), (32, 96), (32, 192),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mnist_cnn", {}, ["model is 'mnist_cnn'", "did you mean 'mnist-cnn'", "text-lstm"]),
        ("resnet", {}, ["did you mean 'resnet18'"]),
        ("mnist-cnn", {"clases": 3}, ["no option clases", "did you mean 'classes'"]),
        ("linear-head", {}, ["2 problems", "needs the option inputs", "option classes"]),
        ("mnist-cnn", {"activation": "tann"}, ["'tann'", "did you mean 'tanh'"]),
        ("mnist-cnn", {"activation": {"heat": 1.0}}, ["no parameter heat", "temperature"]),
    ],
)
def test_an_unknown_name_or_option_is_refused_with_the_nearest(name, options, words):
    with pytest.raises(ow.OwnerwiseError) as refusal:
        models.build(name, **options)
    assert all(word in str(refusal.value) for word in words)
