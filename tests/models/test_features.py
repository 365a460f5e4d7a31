"""Features from public data: components, frozen networks, weights from files."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise import models
from ownerwise.models import features
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)


def public_weights(**options) -> dict[str, torch.Tensor]:
    """The weights of a ResNet-18 under the names that published files use."""
    torch.manual_seed(3)
    model = models.ResNet18(width=8, groups=4, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    names = {"norm": "bn", "shortcut": "downsample"}

    def usual(name):
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return name

    return {usual(name): tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_weights_come_from_a_file(tmp_path, large, statistics):
    options = {"large_images": large, "batch_statistics": statistics}
    save_file(public_weights(**options), tmp_path / "weights.safetensors")
    extractor = features.load_resnet18(tmp_path / "weights.safetensors", groups=4)
    torch.manual_seed(3)
    same = models.ResNet18(width=8, groups=4, **options).eval()
    ours = {
        name.replace("bn", "norm").replace("downsample", "shortcut"): tensor
        for name, tensor in public_weights(**options).items()
    }
    same.load_state_dict(ours)
    same.fc = nn.Identity()
    images = torch.randn(5, 3, 32, 32)
    found = features.extract(extractor, images, batch_size=2)
    assert found.shape == (5, 64)
    torch.testing.assert_close(found, same(images).detach())
    assert not any(p.requires_grad for p in extractor.parameters())


def test_loading_leaves_the_random_numbers_alone(tmp_path):
    save_file(public_weights(), tmp_path / "weights.safetensors")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    features.load_resnet18(tmp_path / "weights.safetensors", groups=4)
    torch.testing.assert_close(torch.rand(3), expected)


def test_only_the_head_of_a_frozen_network_is_trained(tmp_path):
    save_file(public_weights(batch_statistics=True), tmp_path / "weights.safetensors")
    extractor = features.load_resnet18(tmp_path / "weights.safetensors")
    model = nn.Sequential(extractor, models.build("linear-head", inputs=64, classes=3)).train()
    images = torch.randn(4, 3, 32, 32)
    assert ow.check(model, images) == []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = tools.make_step(model, functional.cross_entropy)
    step(tools.batch_of(images, torch.tensor([0, 1, 2, 0])))
    changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert changed == ["1.1.weight", "1.1.bias"]


def test_missing_weights_are_named_with_a_way_out(tmp_path):
    with pytest.raises(ow.OwnerwiseError, match=r"nowhere(.|\n)*none are downloaded.*Scattering"):
        features.load_resnet18(tmp_path / "nowhere.safetensors")
    torch.save({}, tmp_path / "weights.pth")
    with pytest.raises(ow.OwnerwiseError, match=r"not a safetensors file.*convert it"):
        features.load_resnet18(tmp_path / "weights.pth")
    with pytest.raises(ow.OwnerwiseError, match=r"no weights at"):
        features.load_resnet18(tmp_path)


def test_all_misfits_of_a_file_are_listed(tmp_path):
    weights = public_weights()
    del weights["layer1.0.conv1.weight"]
    weights["layer5.weight"] = torch.zeros(2)
    weights["layer2.0.conv1.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(ow.OwnerwiseError) as refusal:
        features.load_resnet18(tmp_path / "weights.safetensors", groups=4)
    lacks, holds, shape = refusal.value.problems
    assert "lacks layer1.0.conv1.weight" in lacks
    assert "holds layer5.weight" in holds
    assert "layer2.0.conv1.weight is shape [2]; expected shape [16, 8, 3, 3]" in shape
    save_file({"encoder.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ow.OwnerwiseError, match=r"no ResNet-18.*found encoder\.weight"):
        features.load_resnet18(tmp_path / "other.safetensors")


def test_components_of_public_data():
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.normal(size=(50, 2, 3)) * [1.0, 5.0, 0.2] + 7)
    fitted = features.PCA.fit(data, 4, public=True)
    flat = data.flatten(1).numpy()
    values = np.linalg.eigvalsh(np.cov(flat.T))[::-1]
    np.testing.assert_allclose(fitted.variances.numpy(), values[:4])
    torch.testing.assert_close(fitted.directions @ fitted.directions.T, torch.eye(4).double())
    projected = fitted(data)
    assert projected.shape == (50, 4)
    np.testing.assert_allclose(np.cov(projected.numpy().T), np.diag(values[:4]), atol=1e-10)
    np.testing.assert_allclose(projected.mean(dim=0).numpy(), 0, atol=1e-12)
    assert not fitted.not_private
    assert "NOT PRIVATE" not in repr(fitted)
    again = features.PCA.fit(data.flip(0), 4, public=True)
    torch.testing.assert_close(again.directions, fitted.directions)


def test_components_of_private_data_need_the_words():
    data = torch.randn(10, 4)
    for options in ({}, {"public": True, "not_private": True}):
        with pytest.raises(ow.OwnerwiseError, match=r"without noise.*public=True.*not_private="):
            features.PCA.fit(data, 2, **options)
    fitted = features.PCA.fit(data, 2, not_private=True)
    assert fitted.not_private
    assert "NOT PRIVATE" in repr(fitted)


def test_all_problems_of_the_data_are_listed():
    data = torch.full((3, 4), torch.nan)
    with pytest.raises(ow.OwnerwiseError) as refusal:
        features.PCA.fit(data, 4)
    assert len(refusal.value.problems) == 3
    assert "components 4: expected 1 to 3" in str(refusal.value)


def test_scattering_feeds_its_head():
    images = torch.rand(4, 1, 28, 28)
    coefficients = features.extract(features.Scattering(28, 28), images, batch_size=3)
    head = models.build("scattering-head")
    assert ow.check(head, coefficients) == []
    assert head(coefficients).shape == (4, 10)
    whole = nn.Sequential(features.Scattering(28, 28), head)
    assert ow.check(whole, images) == []
    torch.testing.assert_close(whole(images), head(coefficients))
