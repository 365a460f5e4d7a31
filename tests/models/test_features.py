"""Features that cost no privacy: frozen networks and fixed transforms."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise import models
from ownerwise.models import features
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)


def public_network() -> nn.Module:
    """A ResNet-18 without its last layer, with statistics as after training on public images."""
    torch.manual_seed(3)
    model = models.ResNet18(classes=0, width=8, batch_statistics=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def test_features_are_those_of_the_network_in_evaluation_mode():
    images = torch.randn(5, 3, 32, 32)
    expected = public_network().eval()(images).detach()
    extractor = features.Frozen(public_network())
    found = features.extract(extractor.train(), images, batch_size=2)
    assert found.shape == (5, 64)
    torch.testing.assert_close(found, expected)
    assert not any(p.requires_grad for p in extractor.parameters())


def test_only_the_head_of_a_frozen_network_is_trained():
    extractor = features.Frozen(public_network())
    model = nn.Sequential(extractor, models.build("linear-head", inputs=64, classes=3)).train()
    images = torch.randn(4, 3, 32, 32)
    assert ow.check(model, images) == []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = tools.make_step(model, functional.cross_entropy)
    step(tools.batch_of(images, torch.tensor([0, 1, 2, 0])))
    changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert changed == ["1.1.weight", "1.1.bias"]


def test_scattering_feeds_its_head():
    images = torch.rand(4, 1, 28, 28)
    coefficients = features.extract(features.Scattering(28, 28), images, batch_size=3)
    head = models.build("scattering-head")
    assert ow.check(head, coefficients) == []
    assert head(coefficients).shape == (4, 10)
    whole = nn.Sequential(features.Scattering(28, 28), head)
    assert ow.check(whole, images) == []
    torch.testing.assert_close(whole(images), head(coefficients))
