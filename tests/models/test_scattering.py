"""The scattering transform against a slow one: filters sampled in space, sums over all pixels."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import ownerwise as ow
from ownerwise.models.features import Scattering
from tools import step_tools as tools

_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


def direct(image: np.ndarray, scales: int, angles: int) -> np.ndarray:
    """Scattering coefficients [channels, height, width] of one image, by convolution in space."""
    stride = 2**scales
    padded = np.pad(image, stride, mode="reflect")

    def periodic(function):
        """Sample a function of the plane on the pixels, wrapped around the padded image."""
        rows, columns = padded.shape
        turns = itertools.product(range(-3, 4), repeat=2)
        y, x = np.arange(rows)[:, None], np.arange(columns)[None, :]
        return sum(function(y + down * rows, x + right * columns) for down, right in turns)

    def convolve(signal, kernel):
        rows, columns = signal.shape
        y, x = np.divmod(np.arange(rows * columns), columns)
        turned = kernel[(y[:, None] - y) % rows, (x[:, None] - x) % columns]
        return (turned @ signal.ravel()).reshape(rows, columns)

    def morlet(scale, angle):
        std, slant = 0.8 * 2**scale, 4 / angles
        direction = math.pi * angle / angles

        def envelope(y, x):
            along = math.cos(direction) * x + math.sin(direction) * y
            across = math.cos(direction) * y - math.sin(direction) * x
            return np.exp(-(along**2 + slant**2 * across**2) / (2 * std**2))

        def wave(y, x):
            along = math.cos(direction) * x + math.sin(direction) * y
            return envelope(y, x) * np.exp(1j * 0.75 * math.pi / 2**scale * along)

        oscillating, still = periodic(wave), periodic(envelope)
        zero_mean = oscillating - oscillating.sum() / still.sum() * still
        return zero_mean * slant / (2 * math.pi * std**2)

    gauss = periodic(lambda y, x: np.exp(-(y**2 + x**2) / (2 * (0.4 * stride) ** 2)))
    gauss /= gauss.sum()
    kernels = {(j, a): morlet(j, a) for j in range(scales) for a in range(angles)}

    def averaged(signal):
        return convolve(signal, gauss)[stride:-stride:stride, stride:-stride:stride]

    first = {key: np.abs(convolve(padded, kernel)) for key, kernel in kernels.items()}
    found = [averaged(padded), *(averaged(signal) for signal in first.values())]
    for fine, coarse in itertools.combinations(range(scales), 2):
        for one, other in itertools.product(range(angles), repeat=2):
            second = np.abs(convolve(first[fine, one], kernels[coarse, other]))
            found.append(averaged(second))
    return np.stack(found)


@pytest.mark.parametrize(
    ("shape", "scales", "angles"),
    [((1, 2, 8, 12), 2, 8), ((2, 3, 6, 4), 1, 3), ((1, 1, 16, 16), 3, 3)],
)
def test_coefficients_equal_those_of_a_slow_transform(shape, scales, angles):
    images = np.random.default_rng(0).normal(size=shape)
    transform = Scattering(*shape[2:], scales, angles)
    found = transform(torch.from_numpy(images)).numpy()
    for record, channel in np.ndindex(shape[:2]):
        part = slice(channel * transform.channels, (channel + 1) * transform.channels)
        expected = direct(images[record, channel], scales, angles)
        np.testing.assert_allclose(found[record, part], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "settings", "expected"),
    [
        ((5, 1, 28, 28), {}, (5, 81, 7, 7)),
        ((2, 3, 32, 32), {}, (2, 243, 8, 8)),
        ((2, 1, 16, 24), {"scales": 3}, (2, 217, 2, 3)),
        ((2, 1, 8, 8), {"scales": 1, "angles": 4}, (2, 5, 4, 4)),
    ],
)
def test_shapes(shape, settings, expected):
    transform = Scattering(*shape[2:], **settings)
    assert transform(torch.randn(shape)).shape == expected
    assert transform.channels * shape[1] == expected[1]


@pytest.mark.parametrize(("scales", "angles"), [(1, 4), (2, 8), (2, 16), (3, 12)])
def test_no_frequency_gains_energy(scales, angles):
    transform = Scattering(32, 48, scales, angles)
    rows, columns = transform.average_rows[0], transform.average_columns[0]
    low = torch.outer(torch.fft.fft(rows).abs(), torch.fft.fft(columns).abs())
    energy = transform.wavelets.square().sum(dim=(0, 1))
    mirrored = energy.flip(0, 1).roll((1, 1), (0, 1))
    total = low.square() + (energy + mirrored) / 2
    assert total.max() <= 1 + 1e-12
    assert total.max() >= 0.99
    assert transform.wavelets[:, :, 0, 0].abs().max() <= 1e-15


def test_distances_between_images_never_grow():
    transform = Scattering(16, 16)
    torch.manual_seed(0)
    kinds = torch.randn(30, 1, 16, 16) * torch.logspace(-3, 1, 30)[:, None, None, None]
    waves = torch.cos(torch.arange(16.0)[:, None] * torch.linspace(0, math.pi, 30)[:, None, None])
    for start in (torch.zeros(1, 1, 16, 16), torch.randn(1, 1, 16, 16)):
        for change in (kinds, (waves + torch.zeros(30, 16, 16))[:, None]):
            moved = transform(start + change) - transform(start)
            margin = functional.pad(change, [4] * 4, mode="reflect")
            assert (moved.flatten(1).norm(dim=1) <= margin.flatten(1).norm(dim=1)).all()


def test_a_constant_image_has_only_its_mean():
    coefficients = Scattering(12, 12)(torch.full((1, 1, 12, 12), 3.0))
    torch.testing.assert_close(coefficients[:, :1], torch.full((1, 1, 3, 3), 3.0))
    assert coefficients[:, 1:].abs().max() < 1e-14


def test_small_shifts_hardly_change_it_and_large_ones_move_it():
    torch.manual_seed(0)
    transform = Scattering(32, 32)
    images = functional.pad(torch.randn(20, 1, 12, 12), [10] * 4)  # nothing at the margins
    before = transform(images)
    shifted = images.roll(1, dims=3)
    change = (transform(shifted) - before).norm() / before.norm()
    assert change < 0.25
    assert (shifted - images).norm() / images.norm() > 1.2
    four = transform(images.roll(4, dims=3))
    torch.testing.assert_close(four[..., 1:], before[..., :-1], rtol=0, atol=1e-12)


def test_turning_an_image_turns_the_angles():
    torch.manual_seed(0)
    transform = Scattering(16, 16, scales=1)
    image = torch.randn(1, 1, 16, 16)
    turned = transform(image.mT)[0, 1:]
    angles = [(4 - a) % 8 for a in range(8)]  # a mirrored direction, up to its sign
    torch.testing.assert_close(turned, transform(image)[0, 1:].mT[angles], rtol=0, atol=1e-12)


def test_a_record_is_transformed_by_itself_and_at_any_precision():
    torch.manual_seed(0)
    images = torch.randn(3, 2, 12, 12)
    transform = Scattering(12, 12)
    torch.testing.assert_close(transform(images)[1:2], transform(images[1:2]))
    single = transform.float()(images.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), Scattering(12, 12)(images), rtol=0, atol=1e-5)


def test_unsuitable_sizes_and_images_are_refused():
    with pytest.raises(ow.OwnerwiseError, match=r"3 problems(.|\n)*height 30(.|\n)*width 4"):
        Scattering(30, 4, angles=0)
    with pytest.raises(ow.OwnerwiseError, match=r"\[2, 28, 28\]; expected \[batch, channels, 28"):
        Scattering(28, 28)(torch.zeros(2, 28, 28))
