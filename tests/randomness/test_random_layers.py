import numpy as np
import torch
from scipy.stats import kstest

from ownerwise.randomness import (
    LayerRandomness,
    SecretStream,
    kept_generators,
)


def draw(layers, number, count=1000):
    with kept_generators():
        layers.enter(number)
        return torch.rand(count).numpy()


def test_the_same_number_draws_the_same_masks_and_others_differ():
    stream = SecretStream.from_seed(1).child("layers")
    first, second = (
        LayerRandomness(lambda: stream.at_step(0)),
        LayerRandomness(lambda: stream.at_step(1)),
    )
    np.testing.assert_array_equal(draw(first, 0), draw(first, 0))
    assert (draw(first, 0) != draw(first, 1)).mean() > 0.99
    assert (draw(first, 0) != draw(second, 0)).mean() > 0.99


def test_draws_are_uniform():
    """False alarm below 1e-6."""
    layers = LayerRandomness(lambda: SecretStream().child("layers").at_step(0))
    assert kstest(draw(layers, 0, 20000), "uniform").pvalue > 1e-6


def test_more_than_the_low_32_bits_of_a_seed_decide():
    """One flipped bit anywhere in the words gives other numbers: no seed of 32 bits is behind."""
    words = SecretStream.from_seed(2).child("layers").at_step(0).words(312).view(np.uint32)
    layers = LayerRandomness()
    layers._words = [words.copy(), words.copy(), words.copy()]
    layers._words[1][400] ^= 1
    layers._words[2][5] ^= 1 << 30
    base = draw(layers, 0, 2000)
    assert (draw(layers, 1, 2000) != base).any()
    assert (draw(layers, 2, 2000) != base).any()


def test_the_global_generator_is_left_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw(LayerRandomness(), 0)
    assert torch.equal(before, torch.get_rng_state())
