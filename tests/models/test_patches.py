"""Features of patches: against a slow computation, and what they depend on."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise import models
from ownerwise.errors import OwnerwiseError
from ownerwise.models import leaves, patches
from ownerwise.models.features import Patches, build, extract
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)
SMALL = {"filters": 5, "components": 3, "pictures": 1}


@pytest.fixture(autouse=True)
def _few_images(monkeypatch):
    """Fewer synthetic images, so that the constants are computed within a second."""
    torch.manual_seed(0)
    monkeypatch.setattr(patches, "_SMALL_IMAGES", 60)
    patches._constants.cache_clear()
    yield
    patches._constants.cache_clear()


def slow_roots(image, kernels):
    """Square roots of the averaged responses of one image, patch by patch, [9, channels]."""
    image, kernels = image.double().numpy(), kernels.double().numpy()
    responses = np.zeros((2 * len(kernels), 27, 27))
    for row in range(27):
        for column in range(27):
            patch = image[:, row : row + 6, column : column + 6]
            contrast = np.sqrt(patch.var() + (10 / 255) ** 2)
            found = (kernels * patch).sum(axis=(1, 2, 3)) / contrast
            responses[:, row, column] = np.maximum(np.concatenate([found, -found]) - 0.25, 0)
    parts = [slice(0, 9), slice(9, 18), slice(18, 27)]
    means = [responses[:, rows, columns].mean(axis=(1, 2)) for rows in parts for columns in parts]
    return np.sqrt(np.stack(means))


def mirrored_roots(image, kernels):
    """The average over an image and its mirror image."""
    return (slow_roots(image, kernels) + slow_roots(image.flip(2), kernels)) / 2


@pytest.mark.parametrize("mirrored", [True, False])
def test_features_equal_a_slow_computation(mirrored):
    images = torch.rand(8, 3, 32, 32)
    extractor = Patches(**SMALL, mirrored=mirrored)
    found = extractor(images)
    assert found.shape == (8, 27)
    constants = patches._constants(5, 3, 1, mirrored)
    roots_of = mirrored_roots if mirrored else slow_roots
    for image, features in zip(images, found, strict=True):
        roots = roots_of(image, constants.kernels) - constants.mean.numpy()
        results = roots @ constants.channels.numpy() - constants.centre.numpy()
        expected = (constants.parts.numpy() @ results).flatten()
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(features, expected, atol=1e-5)


def test_an_image_and_its_mirror_image_have_the_same_features_unless_told_otherwise():
    images = torch.rand(4, 3, 32, 32)
    extractor = Patches(**SMALL)
    torch.testing.assert_close(extractor(images.flip(3)), extractor(images))
    other = Patches(**SMALL, mirrored=False)
    assert not torch.allclose(other(images.flip(3)), other(images), atol=0.1)


def test_features_of_the_synthetic_images_are_decorrelated():
    images = leaves.small_images(1, 60, 32, patches._SEED)
    constants = patches._constants(5, 3, 1, True)
    roots = torch.stack([torch.from_numpy(mirrored_roots(i, constants.kernels)) for i in images])
    results = (roots - constants.mean) @ constants.channels.double()
    parts = constants.parts.double() @ (results - constants.centre)  # [60, 9, 3]
    across_parts = torch.einsum("npc,nqc->pq", parts, parts) / (3 * len(images))
    over = results.flatten(0, 1)
    for covariance in (over.T @ over / len(over), across_parts):
        off = covariance - covariance.diagonal().diag()
        assert off.abs().max() < 1e-3
        assert 0.01 < covariance.diagonal().min() <= covariance.diagonal().max() < 1


def test_features_depend_only_on_their_own_image():
    images = torch.rand(40, 3, 32, 32)
    images[4] = 1.0  # an outlier
    extractor = build("patches", **SMALL)
    whole = extract(extractor, images, batch_size=7)
    kept = torch.arange(40) != 4
    torch.testing.assert_close(extract(extractor, images[kept], batch_size=9), whole[kept])
    patches._constants.cache_clear()  # computed again, from the same synthetic pictures
    torch.testing.assert_close(extract(extractor, images), whole)


def test_images_of_other_sizes_and_of_one_colour():
    extractor = Patches(**SMALL)
    assert extractor(torch.rand(2, 3, 40, 20)).shape == (2, 27)
    plain = extractor(torch.full((1, 3, 32, 32), 0.5))
    assert plain.isfinite().all()
    assert extractor(torch.rand(0, 3, 32, 32)).shape == (0, 27)


def test_features_are_cached_without_computing_constants(tmp_path):
    images = torch.rand(5, 3, 32, 32)
    whole = extract(Patches(**SMALL), images, cache=tmp_path)
    patches._constants.cache_clear()
    again = extract(Patches(**SMALL), images, cache=tmp_path)
    assert torch.equal(again, whole)
    assert patches._constants.cache_info().misses == 0
    extract(Patches(**SMALL | {"components": 2}), images, cache=tmp_path)
    extract(Patches(**SMALL, mirrored=False), images, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_private_step_trains_only_the_head_and_no_pretraining_is_declared():
    head = models.build("linear-head", inputs=27, classes=3)
    model = nn.Sequential(Patches(**SMALL), head)
    images, classes = torch.rand(40, 3, 32, 32), torch.arange(40) % 3
    assert ow.check(model, images[:4]) == []
    owners = ow.Owners(np.resize(["ann", "bob"], 40), {"ann": 1.0, "bob": 4.0}, delta=1e-5)
    plan = ow.plan(owners, steps=2, batch_size=10)
    run = ow.Trainer(model, plan, lr=0.1, seed=1, progress=False).fit((images, classes))
    assert "pretraining" not in run.config


def test_synthetic_pictures():
    picture = leaves.dead_leaves(np.random.default_rng(0))
    assert picture.shape == (3, leaves.SIZE, leaves.SIZE)
    assert 0 <= picture.min() < 0.1
    assert 0.9 < picture.max() <= 1
    images = leaves.small_images(2, 9, 32, 3)
    assert images.shape == (9, 3, 32, 32)
    assert torch.equal(images, leaves.small_images(2, 9, 32, 3))
    assert not torch.equal(images, leaves.small_images(2, 9, 32, 4))
    contrast = images.flatten(1).std(dim=1)
    assert 0.12 < contrast.min() <= contrast.max() < 0.4
    near = functional.cosine_similarity(
        images[:, :, :, 1:] - 0.5, images[:, :, :, :-1] - 0.5, dim=3
    )
    assert near.mean() > 0.5  # neighbouring pixels are alike, as in photographs


def test_bad_options_and_images_are_refused():
    with pytest.raises(OwnerwiseError) as refused:
        Patches(filters=0, components=2.5, pictures=-1, mirrored=1)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 4
    with pytest.raises(OwnerwiseError, match=r"components 9: .* at most 2 \* filters = 8"):
        Patches(filters=4, components=9)
    for images, words in (
        (torch.zeros(2, 1, 32, 32), r"shape \[2, 1, 32, 32\]"),
        (torch.full((2, 3, 32, 32), 255.0), r"\[255, 255\] \(not private\)"),
    ):
        with pytest.raises(OwnerwiseError, match=words):
            extract(Patches(**SMALL), images)
