"""Noise. Statistical tests use fixed seeds and p > 1e-6 (their false-alarm rate)."""

import itertools
import math
import multiprocessing
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from ownerwise.randomness import (
    Noise,
    SecretStream,
)
from ownerwise.randomness import noise as noise_module
from ownerwise.randomness.noise import grid_of, standard_laplace, standard_normal

ALARM = 1e-6
SAMPLE = 1_000_000


def step_stream(seed=1):
    return SecretStream.from_seed(seed).child("noise").at_step(0)


def seeded(seed=1, **options):
    return Noise(SecretStream.from_seed(seed), **options)


def gaussian(noise, step, std, like):
    """The noise alone: that of sums that are zero."""
    return noise.gaussian(step, [torch.zeros_like(part) for part in like], std, grid_of(std))


def on_grid(normals, std):
    """Noise as it is released, from standard normals."""
    return (normals * (std / grid_of(std))).round() * grid_of(std)


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_normals_are_normal(seed):
    normals = standard_normal(step_stream(seed), SAMPLE)
    assert normals.dtype == torch.float64
    assert stats.kstest(normals.numpy(), "norm").pvalue > ALARM
    chi_square = float((normals**2).sum())
    assert ALARM < stats.chi2.cdf(chi_square, SAMPLE) < 1 - ALARM


def test_laplace_is_laplace():
    laplace = standard_laplace(step_stream(), SAMPLE)
    assert stats.kstest(laplace.numpy(), "laplace").pvalue > ALARM
    beyond_ten = int((laplace.abs() > 10).sum())  # 45 expected
    assert stats.binomtest(beyond_ten, SAMPLE, math.exp(-10)).pvalue > ALARM


def test_far_tails_have_the_right_counts():
    stream, counts, samples = step_stream(), np.zeros((2, 3), dtype=int), 20 * SAMPLE
    bounds = np.array([3.5, 4.5, 5.0])  # 4652, 68 and 5.7 expected on each side
    for _ in range(20):
        normals = standard_normal(stream, SAMPLE)
        extreme = normals[normals.abs() > 3.5].numpy()
        counts += (np.stack([extreme, -extreme])[:, None, :] > bounds[:, None]).sum(axis=2)
    for side in counts:
        for count, bound in zip(side, bounds, strict=True):
            assert stats.binomtest(int(count), samples, stats.norm.sf(bound)).pvalue > ALARM


class _Words:
    """A stream of chosen words."""

    def __init__(self, words):
        self._all = np.array(words, dtype=np.uint64)

    def words(self, count):
        return self._all[:count].copy()


def test_the_extreme_words_give_finite_numbers_and_the_full_tail():
    """The radius never takes the logarithm of 0, and reaches sqrt(2 * 64 ln 2) = 9.42."""
    largest = 2**64 - 1
    assert standard_normal(_Words([0, 0]), 1).item() == pytest.approx(math.sqrt(128 * math.log(2)))
    for radius in (0, 1, 2**63 - 1, 2**63, largest):
        for angle in (0, 1, 2**63 - 1, 2**63, largest):
            assert torch.isfinite(standard_normal(_Words([radius, angle]), 2)).all()


def test_normals_are_the_box_muller_transform():
    words = [3, 2**62 + 987654321012345, 2**45 + 7**15, 2**63 + 5**20, 7**20, 11**18]
    radius = [math.sqrt(-2 * math.log((word % 2**63 + 0.5) / 2**63)) for word in words[::2]]
    signed = [word - 2**64 * (word >= 2**63) for word in words[1::2]]
    angle = [word / 2**63 * math.pi for word in signed]
    expected = [r * f(a) for r, a in zip(radius, angle, strict=True) for f in (math.cos, math.sin)]
    assert standard_normal(_Words(words), 6).tolist() == pytest.approx(expected, rel=1e-13)


def test_coordinates_and_steps_are_independent():
    """Pitfall 32: no draw serves two numbers, in a step or between steps (nor does a radius)."""
    noise = seeded()
    like = [torch.empty(40, dtype=torch.float64), torch.empty(2, 5, dtype=torch.float64)]
    steps = [gaussian(noise, step, 1.0, like) for step in range(5000)]
    rows = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in steps])
    assert len(rows.unique()) > 0.95 * rows.numel()  # on a grid, some agree by chance
    for scores in rows, (rows**2 - 1) / math.sqrt(2):  # mean 0, variance 1
        products = scores.T @ scores / math.sqrt(len(scores))
        pairs = products[tuple(torch.triu_indices(50, 50, 1))]
        assert ALARM < stats.chi2.cdf(float((pairs**2).sum()), len(pairs)) < 1 - ALARM
        lagged = (scores[1:] * scores[:-1]).sum(0) / math.sqrt(len(scores) - 1)
        assert ALARM < stats.chi2.cdf(float((lagged**2).sum()), 50) < 1 - ALARM


def test_shapes_dtypes_and_scale():
    like = [
        torch.empty(3, 4),
        torch.empty(()),
        torch.empty(0, 2),
        torch.empty(5, dtype=torch.float64),
        torch.empty(6, dtype=torch.bfloat16),
    ]
    made = gaussian(seeded(), 0, 2.5, like)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in like]
    whole = standard_normal(SecretStream.from_seed(1).child("noise").at_step(0), 24)
    whole = on_grid(whole, 2.5)
    flat = torch.cat([t.flatten().double() for t in made])
    assert torch.equal(flat[13:18], whole[13:18])
    assert torch.allclose(flat, whole, rtol=1e-2)
    assert gaussian(seeded(), 0, 1.0, []) == []


def test_float32_noise_is_the_float64_noise_rounded():
    single = gaussian(seeded(), 0, 0.3, [torch.empty(300_001)])[0]
    double = gaussian(seeded(), 0, 0.3, [torch.empty(300_001, dtype=torch.float64)])[0]
    assert torch.equal(single, double.float())


def test_laplace_scale_and_own_purpose():
    """Pitfall 32: one draw per cell; and the histogram's numbers are not the gradient's."""
    stream = SecretStream.from_seed(1)
    like = [torch.empty(1000, 200, dtype=torch.float64)]
    zeros = [torch.zeros_like(part) for part in like]
    histogram = Noise(stream, purpose="histogram").laplace(0, zeros, 3.0, grid_of(3.0))[0]
    assert stats.kstest(histogram.flatten().numpy() / 3, "laplace").pvalue > ALARM
    other = Noise(stream, purpose="noise").laplace(0, zeros, 3.0, grid_of(3.0))[0]
    assert float((histogram == other).double().mean()) < 1e-4


@given(
    shapes=st.lists(st.sampled_from([(), (0, 2), (1,), (3, 5), (16,), (7, 9)]), min_size=1),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=1),
    transposed=st.booleans(),
    overwrite=st.booleans(),
    std=st.sampled_from([0.3, 1.0, 7.0]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_change_nothing(monkeypatch, shapes, dtypes, transposed, overwrite, std):
    """Several tensors in a block, and several blocks in a tensor: as if done in one go."""
    monkeypatch.setattr(noise_module, "_BLOCK", 16)
    monkeypatch.setattr(noise_module, "_FEW", 8)
    grid, factor = grid_of(std), 0.37
    sums = [
        (10 * torch.randn(shape)).to(dtype)
        for shape, dtype in zip(shapes, itertools.cycle(dtypes), strict=False)
    ]
    sums = [part.T if transposed and part.dim() == 2 else part for part in sums]
    before = [part.clone() for part in sums]
    stream = SecretStream.from_seed(1)
    size = sum(part.numel() for part in sums)
    normals = standard_normal(stream.child("noise").at_step(0), size)
    units = (normals * (std / grid)).round()
    made = seeded().gaussian(0, sums, std, grid, factor, overwrite=overwrite)
    for part, total, noise in zip(
        made, before, units.split([t.numel() for t in sums]), strict=True
    ):
        expected = (total.double() / grid).round() + noise.view(total.shape)
        assert torch.equal(part, (expected * (grid * factor)).to(total.dtype))
    if not overwrite:
        assert all(map(torch.equal, sums, before))


def test_overwriting_saves_memory_but_never_noises_a_number_twice():
    own, whole = torch.randn(50_000), torch.randn(60_000)
    halves, twice = whole.split(30_000), torch.randn(40_000)
    sums = [own, *halves, twice, twice]
    expected = seeded().gaussian(0, sums, 1.0, grid_of(1.0))
    made = seeded().gaussian(0, sums, 1.0, grid_of(1.0), overwrite=True)
    assert all(map(torch.equal, made, expected))
    assert made[0].data_ptr() == own.data_ptr()
    places = [part.data_ptr() for part in made[1:]]
    assert len(set(places)) == 4
    assert not {part.data_ptr() for part in sums} & set(places)


def test_the_number_of_threads_changes_nothing():
    like = [torch.empty(400_001, dtype=torch.float64)]
    threads = torch.get_num_threads()
    made = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(gaussian(seeded(), 0, 1.0, like)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_resume_under_a_fixed_seed_is_bit_equal_and_a_step_is_drawn_once():
    """Pitfall 15: re-seeding on resume never gives the noise of an earlier step."""
    like = [torch.empty(100)]
    run = seeded()
    whole = [gaussian(run, step, 1.0, like)[0] for step in range(6)]
    resumed = seeded()
    for step in range(3, 6):
        assert torch.equal(gaussian(resumed, step, 1.0, like)[0], whole[step])
    with pytest.raises(RuntimeError, match="reuse its randomness"):
        gaussian(resumed, 5, 1.0, like)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_made_ahead_are_those_that_the_step_gets_by_itself(dtype):
    """Whatever was made ahead: other sizes, stds and skipped steps on the way change nothing."""
    requests = [(0, 1.0, 9), (1, 1.0, 9), (2, 2.0, 9), (3, 2.0, 4), (7, 2.0, 4), (8, 2.0, 31)]
    requests += [(9, 1.0, 100_001), (11, 1.0, 5), (12, 1.0, 0), (13, 1.0, 70_000)]
    run = seeded()
    for step, std, size in requests:
        like = [torch.empty(size, dtype=dtype)]
        alone = standard_normal(SecretStream.from_seed(1).child("noise").at_step(step), size)
        alone = on_grid(alone, std)
        assert torch.equal(gaussian(run, step, std, like)[0], alone.to(dtype))
        with pytest.raises(RuntimeError, match="reuse its randomness"):
            gaussian(run, step, std, like)


def test_noise_made_ahead_shares_no_memory():
    run = seeded()
    first, second = (gaussian(run, step, 1.0, [torch.empty(3), torch.empty(2)]) for step in (0, 1))
    kept = [part.clone() for part in second]
    # a file of a tensor holds all of its memory: none of it may be the noise of steps to come
    assert first[0].untyped_storage().nbytes() == 4 * 5
    for part in first:
        part.add_(1e9)
    assert all(map(torch.equal, second, kept))


def test_the_key_reaches_every_number():
    """Pitfalls 28 and 29: another key changes every number; the default key is new each time."""
    like = [torch.empty(1000, dtype=torch.float64)]
    pairs = [(seeded(1), seeded(2)), (Noise(), Noise())]
    for one, other in pairs:
        same = gaussian(one, 0, 1.0, like)[0] == gaussian(other, 0, 1.0, like)[0]
        assert int(same.sum()) <= 2  # on a grid, two may agree by chance


def test_global_seeds_do_not_matter():
    """Pitfall 28."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(gaussian(Noise(), 0, 1.0, [torch.empty(10)])[0])
    assert not torch.equal(*made)


def test_private_is_said():
    assert Noise().private
    assert not seeded().private
    assert "NOT PRIVATE" in repr(seeded())


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_scale_is_refused_before_anything_is_drawn(wrong):
    noise = seeded()
    with pytest.raises(ValueError, match="must be positive and finite"):
        noise.gaussian(0, [torch.zeros(1)], wrong, 1.0)
    with pytest.raises(ValueError, match="must be positive and finite"):
        noise.laplace(0, [torch.zeros(1)], wrong, 1.0)
    gaussian(noise, 0, 1.0, [torch.empty(1)])


def _try_to_draw(noise, answers):
    for draw in (noise.gaussian, noise.laplace):
        try:
            draw(1, [torch.zeros(3)], 1.0, grid_of(1.0))
            answers.put("drew")
        except RuntimeError as error:
            answers.put(str(error))


def test_noise_made_ahead_is_not_used_in_a_forked_process():
    """Both processes would add the same numbers, and their difference would be free of noise."""
    noise = Noise()
    gaussian(noise, 0, 1.0, [torch.zeros(3)])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_try_to_draw, args=(noise, answers))
    child.start()
    texts = [answers.get(timeout=20) for _ in range(2)]
    child.join()
    assert all(f"belongs to process {os.getpid()}" in text for text in texts)
    gaussian(noise, 1, 1.0, [torch.zeros(3)])
