import numpy as np
import pytest

import ownerwise as ow
from ownerwise.accounting import Schedule, pld


def release(values, scores, bounds, tail=2.0, std=1e-6, seed=0):
    stream = ow.SecretStream.from_seed(seed)
    return ow.ino_sum(values, scores, bounds, tail, std, stream=stream)


def test_ino_sum_can_favour_trusted_records():
    """Untrusted records (low score) lie far off; the ordered sum leaves most of them out."""
    rng = np.random.default_rng(0)
    trusted, untrusted = rng.normal(1.0, 0.1, 800), rng.normal(-1.0, 0.1, 200)
    values = np.concatenate([trusted, untrusted])
    trust = np.concatenate([np.ones(800), np.zeros(200)])
    bounds = np.full(1000, 2.0)
    plain = ow.ino_sum(values, trust, bounds, 0.0, 1.0)
    ordered = ow.ino_sum(values, trust, bounds, 2.0 * 200, 1.0)
    assert plain.private
    weight = ow.INO(tail_length=400.0).weights(trust, bounds).sum()
    assert float(plain.value) / 1000 == pytest.approx(0.6, abs=0.1)
    assert float(ordered.value) / weight > 0.75
    np.testing.assert_array_equal(plain.epsilon(2.0, 1e-5), ordered.epsilon(2.0, 1e-5))


def test_each_owner_pays_for_its_own_sensitivity():
    released = release(np.ones(3), np.arange(3.0), np.ones(3), std=2.0)
    spent = released.epsilon([0.5, 1.0, 2.0], 1e-5, sampling_rate=0.1)
    for multiplier, cost in zip([4.0, 2.0, 1.0], spent, strict=True):
        assert cost == pytest.approx(pld.epsilon(0.1, multiplier, Schedule.constant(1), 1e-5))


def test_removing_a_record_moves_the_sum_by_at_most_its_sensitivity():
    """Brute force, 1,000 random cases, vectors longer than their bound and not finite too."""
    rng = np.random.default_rng(1)
    for _ in range(1000):
        count = int(rng.integers(1, 8))
        values = rng.normal(size=(count, 3)) * 10 ** rng.uniform(-1, 1)
        if rng.random() < 0.2:
            values[rng.integers(count), 0] = rng.choice([np.nan, np.inf])
        scores, bounds = rng.normal(size=count).round(1), rng.uniform(0.1, 3, count)
        tail, i = float(rng.uniform(0.1, 5)), int(rng.integers(count))
        rest = np.delete(np.arange(count), i)
        both = [
            release(values[m], scores[m], bounds[m], tail).value for m in (np.arange(count), rest)
        ]  # same seed: same noise
        assert np.linalg.norm(both[0] - both[1]) <= bounds[i] * (1 + 1e-9)


def test_noise_has_the_stated_std():
    """False alarm below 1e-9: 20,000 normals, std within 6 of its own standard errors."""
    drawn = release(np.zeros((1, 20000)), np.zeros(1), np.ones(1), std=3.0).value
    assert drawn.std() == pytest.approx(3.0, rel=6 / np.sqrt(2 * 20000))


def test_shapes_and_refusals():
    assert release(np.ones(4), np.arange(4.0), np.ones(4)).value.shape == ()
    assert release(np.ones((4, 2, 3)), np.arange(4.0), np.ones(4)).value.shape == (2, 3)
    assert release(np.ones((0, 2)), [], []).value.shape == (2,)
    assert "NOT PRIVATE" in repr(release(np.ones(1), [0.0], [1.0]))
    with pytest.raises(ValueError, match="one row and one sensitivity per record"):
        release(np.ones(4), np.arange(4.0), np.ones(3))
    with pytest.raises(ValueError, match="bind it to a plan"):
        ow.ino_sum(np.ones(1), [0.0], [1.0], ow.INO(tail=0.4), 1.0)


def test_the_grid_does_not_tell_whether_a_record_with_a_small_bound_is_there():
    """The grid of the released number followed from the smallest bound of the records present."""
    bounds = np.array([1.0, 1.0, 1e-3])
    for rows in (np.arange(3), np.arange(2)):
        value = release(np.zeros(len(rows)), np.zeros(len(rows)), bounds[rows], std=100.0).value
        steps = value / (100.0 * 2.0**-20)
        coarse = 2.0 ** np.floor(np.log2(100.0 * 2.0**-20)) / (100.0 * 2.0**-20)
        assert steps / coarse == np.round(steps / coarse)


def test_rounding_to_the_grid_stays_within_the_sensitivity():
    """For a bound just above a multiple of the grid, the sum moved 5e-9 too far."""
    grid = 2.0**-20
    for multiple in (9_999.000_05, 9_999.5, 10_000.0):
        bound = multiple * 1.0001 * grid
        for offset in np.linspace(0, 1, 201) * grid:
            values, bounds = np.array([offset, 1.0]), np.array([1.0, bound])
            both, one = (
                release(values[:n], np.zeros(n), bounds[:n], tail=0.0, std=1.0).value
                for n in (2, 1)
            )
            assert abs(float(both) - float(one)) <= bound
