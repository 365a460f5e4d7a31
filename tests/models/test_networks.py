"""Every network: its size, its outputs, and that the private step can train it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise import models
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

CLASSES = {"mlp": 3, "text-lstm": 2, "surnames-lstm": 18, "imdb-lstm": 2}

OPTIONS = {
    "text-lstm": {"symbols": 59},
    "linear-head": {"inputs": 4096, "classes": 10},
    "mlp-head": {"inputs": 1280, "classes": 10},
}

# layer by layer
PARAMETERS = {
    "mlp": 22 * 47 + 2 * 48 * 47 + 48 * 3,
    "mnist-cnn": 26_010,
    "cifar-cnn": 550_570,
    "resnet18": 11_173_962,
    "text-lstm": 59 * 64 + 512 * (64 + 128 + 2) + 129 * 2,
    "surnames-lstm": 59 * 64 + 512 * (64 + 128 + 2) + 129 * 18,
    "imdb-lstm": 20_000 * 100 + 101 * 32 + 2 * 128 * (32 + 32 + 2) + 65 * 16 + 17 * 2,
    "linear-head": 4097 * 10,
    "mlp-head": 1281 * 512 + 513 * 10,
    "scattering-head": (81 * 7 * 7 + 1) * 10,
}


def records(name: str, count: int) -> torch.Tensor:
    torch.manual_seed(1)
    shapes = {
        "mlp": (21,), "mnist-cnn": (1, 28, 28), "cifar-cnn": (3, 32, 32), "resnet18": (3, 32, 32),
        "linear-head": (4096,), "mlp-head": (1280,), "scattering-head": (81, 7, 7),
    }  # fmt: skip
    if name in shapes:
        return torch.randn(count, *shapes[name])
    tokens = torch.randint(1, 59, (count, 7))
    tokens[0, 3:] = 0
    return tokens


def test_every_name_is_covered():
    assert set(models.BUILDERS) == set(PARAMETERS)


@pytest.mark.parametrize("name", models.BUILDERS)
def test_size_and_outputs(name):
    model = models.build(name, **OPTIONS.get(name, {}))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    with torch.no_grad():
        outputs = model(records(name, 3))
    assert outputs.shape == (3, CLASSES.get(name, 10))
    assert outputs.isfinite().all()


@pytest.mark.parametrize("name", models.BUILDERS)
def test_the_private_step_trains_it(name):
    small = {"resnet18": {"width": 8, "groups": 4}, "imdb-lstm": {"words": 200}}
    model = models.build(name, **OPTIONS.get(name, {}), **small.get(name, {}))
    inputs = records(name, 4)
    assert ow.check(model, inputs) == []
    labels = torch.randint(0, CLASSES.get(name, 10), (4,))
    # a sum within the clip norms, and an update of every parameter
    step = tools.make_step(model, functional.cross_entropy)
    batch = tools.batch_of(inputs, labels)
    clip_norms = step.plan.clip_norms[batch.owner_index]
    expected = tools.loop_over_records(model, functional.cross_entropy, batch, step)
    found = step.clipped_sum(batch)
    assert 0 < float(tools.flat(found).norm()) <= clip_norms.sum()
    for total, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    step(batch)
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_the_full_resnet_has_no_problem():
    assert ow.check(models.build("resnet18")) == []


@pytest.mark.parametrize(("name", "extra"), [("mnist-cnn", 33 * 90), ("cifar-cnn", 129 * 90)])
def test_a_hundred_classes(name, extra):
    model = models.build(name, classes=100)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name] + extra
    assert model(records(name, 2)).shape == (2, 100)


@pytest.mark.parametrize("name", ["text-lstm", "imdb-lstm"])
def test_padding_changes_neither_outputs_nor_gradients(name):
    """Pitfall 33: a record is not affected by the length of the longest of its batch."""
    torch.manual_seed(0)
    model = models.build(name, **OPTIONS.get(name, {})).double()
    with torch.no_grad():
        model.embedding.weight[0] = 5.0  # as after noise: the padding row is no longer zero
    tokens = torch.tensor([[4, 9, 7, 3], [5, 6, 0, 0]])
    longer = functional.pad(tokens, (0, 3))
    together = model(longer)
    torch.testing.assert_close(together, model(tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(together[1:], model(tokens[1:, :2]), rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(model(given)[1].square().sum(), list(model.parameters()))
        for given in (longer, tokens)
    ]
    for padded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["text-lstm", "imdb-lstm"])
def test_an_empty_text_has_a_finite_output(name):
    model = models.build(name, **OPTIONS.get(name, {}))
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


@pytest.mark.parametrize("name", ["mnist-cnn", "cifar-cnn"])
def test_tanh_and_the_tempered_sigmoid_make_the_same_network(name):
    plain, tempered = models.build(name), models.build(name, activation="tempered-sigmoid")
    tempered.load_state_dict(plain.state_dict())
    images = records(name, 2)
    torch.testing.assert_close(tempered(images), plain(images), rtol=0, atol=1e-5)
    other = models.build(name, activation={"scale": 1.5, "temperature": 3.0, "offset": 0.5})
    other.load_state_dict(plain.state_dict())
    assert not torch.allclose(other(images), plain(images), atol=1e-3)
    made = models.build(name, activation=nn.GELU)
    assert any(isinstance(module, nn.GELU) for module in made.children())


@pytest.mark.parametrize("name", ["mlp", "mnist-cnn", "imdb-lstm"])
def test_the_private_step_trains_tempered_sigmoids(name):
    small = {"imdb-lstm": {"words": 200}}.get(name, {})
    numbers = {"scale": 1.5, "temperature": 3.0, "offset": 0.5}
    torch.manual_seed(0)
    model = models.build(name, activation=numbers, **small).double()
    inputs = records(name, 6)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    batch = tools.batch_of(inputs, torch.randint(0, CLASSES.get(name, 10), (6,)))
    step = tools.make_step(model, functional.cross_entropy)
    expected = tools.loop_over_records(model, functional.cross_entropy, batch, step)
    for total, wanted in zip(step.clipped_sum(batch).values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-9)


def test_groups_divide_the_width():
    model = models.ResNet18(width=24)
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {
        (24, 24), (24, 48), (32, 96), (32, 192),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mnist_cnn", {}, ["no model 'mnist_cnn'", "did you mean 'mnist-cnn'", "imdb-lstm"]),
        ("resnet", {}, ["did you mean 'resnet18'"]),
        ("mnist-cnn", {"clases": 3}, ["no option 'clases'", "did you mean 'classes'"]),
        ("linear-head", {}, ["2 problems", "needs the option 'inputs'", "'classes'"]),
        ("mnist-cnn", {"activation": "tann"}, ["'tann'", "did you mean 'tanh'"]),
        ("mnist-cnn", {"activation": {"heat": 1.0}}, ["no heat", "temperature"]),
    ],
)
def test_an_unknown_name_or_option_is_refused_with_the_nearest(name, options, words):
    with pytest.raises(ow.OwnerwiseError) as refusal:
        models.build(name, **options)
    assert all(word in str(refusal.value) for word in words)
