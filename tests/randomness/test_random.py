"""The secret stream. Statistical tests use fixed seeds and p > 1e-6 (their false-alarm rate)."""

import copy
import multiprocessing
import os
import pickle
import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ownerwise.randomness import (
    SecretStream,
)
from ownerwise.randomness import stream as ow_random

ALARM = 1e-6


def seeded(seed=1, purpose="test", step=0):
    return SecretStream.from_seed(seed).child(purpose).at_step(step)


def test_words_are_the_aes_ctr_key_stream_of_the_step():
    stream = SecretStream.from_seed(3).child("noise")
    counter = (5).to_bytes(8, "big") + bytes(8)
    cipher = Cipher(algorithms.AES(stream._draw_key), modes.CTR(counter)).encryptor()
    assert stream.at_step(5).words(6).tobytes() == cipher.update(bytes(48))


def test_words_may_be_put_into_given_memory():
    memory = np.full(200, 7, dtype=np.uint8)
    drawn, expected = seeded().words(20, memory), seeded().words(20)
    assert np.shares_memory(drawn, memory)
    assert np.array_equal(drawn, expected)


def test_long_draws_equal_short_ones(monkeypatch):
    """Whether or not the zeros that are encrypted are at hand."""
    expected = seeded().words(50)
    monkeypatch.setattr(ow_random, "_ZEROS", memoryview(bytes(64)))
    assert np.array_equal(seeded().words(50), expected)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_one_long_draw_equals_many_short_ones(counts):
    parts = seeded()
    drawn = [parts.words(count) for count in counts]
    assert np.array_equal(np.concatenate([*drawn, []]), seeded().words(sum(counts)))


def test_a_fixed_seed_repeats_a_step_whatever_was_drawn_before():
    run = SecretStream.from_seed(7).child("noise")
    whole = [run.at_step(step).uniforms(3 + step) for step in range(10)]
    resumed = SecretStream.from_seed(7).child("noise")
    for step in range(6, 10):
        assert np.array_equal(resumed.at_step(step).uniforms(3 + step), whole[step])


def test_every_part_of_the_address_changes_every_draw():
    """Pitfall 29: changing the key (or the purpose, or the step) changes every draw."""
    addresses = [(1, "noise", 0), (2, "noise", 0), (1, "sampling", 0), (1, "noise", 1)]
    drawn = np.stack([seeded(*address).words(1000) for address in addresses])
    for words in drawn.T:
        assert len(set(words.tolist())) == len(addresses)
    assert not np.any(
        SecretStream().at_step(0).words(1000) == SecretStream().at_step(0).words(1000)
    )


def test_global_seeds_neither_matter_nor_move():
    """Pitfall 28: the default stream is not a pseudo-random generator with a seed left in."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
        drawn.append(SecretStream().child("noise").at_step(0).words(4).tolist())
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])
    assert drawn[0] != drawn[1]


def test_a_step_is_opened_once_and_only_forwards():
    """Pitfall 15: no (key, counter) pair twice."""
    for stream in SecretStream().child("noise"), SecretStream.from_seed(0).child("noise"):
        stream.at_step(0)
        stream.at_step(4)
        for step in (4, 3, 0, -1):
            with pytest.raises(RuntimeError, match="reuse its randomness"):
                stream.at_step(step)


def test_a_private_child_is_given_once():
    """Pitfall 15: two users of one purpose would share (key, counter) pairs."""
    stream = SecretStream()
    stream.child("noise")
    with pytest.raises(RuntimeError, match="'noise' of this stream is already in use"):
        stream.child("noise")
    stream.child("sampling")


def test_counters_and_keys_of_a_run_are_all_different(monkeypatch):
    """Pitfall 15: record each (key, counter block) that a run with a resume draws; none repeats."""
    used = []
    init = ow_random.StepStream.__init__

    def recording(self, key, step, process):
        used.append([key, step])
        init(self, key, step, process)

    monkeypatch.setattr(ow_random.StepStream, "__init__", recording)
    for start in (0, 10):  # the resumed run re-keys
        root = SecretStream()
        streams = [root.child("a"), root.child("b"), root.child("a/b"), root.child("a2").child("b")]
        for step in range(start, 20):
            for stream in [root, *streams]:
                stream.at_step(step).words(100)
    pairs = {(key, step) for key, step in used}
    assert len(pairs) == len(used) == 150
    assert len({key for key, _ in pairs}) == 10


def test_the_numbers_of_a_step_never_overlap_those_of_the_next(monkeypatch):
    monkeypatch.setattr(ow_random, "_WORDS_PER_STEP", 10)
    stream = seeded()
    stream.words(8)
    with pytest.raises(OverflowError, match="exhausted"):
        stream.words(3)
    stream.words(2)


def test_the_key_is_not_shown_stored_or_copied():
    for stream in SecretStream(), SecretStream.from_seed(1), SecretStream().at_step(0):
        for attempt in pickle.dumps, copy.copy, copy.deepcopy:
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                attempt(stream)
    stream = SecretStream().child("noise")
    assert repr(stream) == "SecretStream(private, purpose='/noise')"
    assert stream.seed is None


def test_a_fixed_seed_says_not_private():
    """Pitfall 28: a fixed seed marks the stream and all its children."""
    stream = SecretStream.from_seed(12).child("noise").child("deep")
    assert not stream.private
    assert stream.seed == 12
    assert "NOT PRIVATE: fixed seed 12" in repr(stream)
    assert SecretStream().child("noise").private
    for wrong in (1.5, "1", True, None):
        with pytest.raises(TypeError, match="seed must be an integer"):
            SecretStream.from_seed(wrong)


def _try_to_draw(stream, step_stream, answers):
    for draw in (
        lambda: stream.child("x"),
        lambda: stream.at_step(1),
        lambda: step_stream.words(1),
    ):
        try:
            draw()
            answers.put("drew")
        except RuntimeError as error:
            answers.put(str(error))


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    stream = SecretStream()
    step_stream = stream.at_step(0)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_try_to_draw, args=(stream, step_stream, answers))
    child.start()
    texts = [answers.get(timeout=20) for _ in range(3)]
    child.join()
    assert all(f"belongs to process {os.getpid()}" in text for text in texts)
    stream.at_step(1).words(1)


def test_uniforms_are_uniform_on_53_bits():
    uniforms = seeded().uniforms(200_000)
    assert stats.kstest(uniforms, "uniform").pvalue > ALARM
    assert 0 <= uniforms.min() < 1e-4
    assert uniforms.max() < 1
    grid = uniforms * 2.0**53
    assert np.array_equal(grid, np.floor(grid))
    low_bits = grid.astype(np.int64) & 7
    assert stats.chisquare(np.bincount(low_bits, minlength=8)).pvalue > ALARM


@pytest.mark.parametrize("high", [1, 2, 7, 1000])
def test_integers_are_uniform(high):
    drawn = seeded(high).integers(high, 100_000)
    assert drawn.dtype == np.int64
    if high > 1:
        assert stats.chisquare(np.bincount(drawn, minlength=high)).pvalue > ALARM
    else:
        assert not drawn.any()


def test_integers_reject_the_incomplete_cycle():
    """For high = 3 * 2^61, a quarter of all words must be rejected, else small values double."""
    stream = seeded()
    drawn = stream.integers(3 * 2**61, 20_000)
    assert len(drawn) == 20_000
    assert stream._position > 26_000
    thirds = np.bincount(drawn // 2**61, minlength=3)
    assert stats.chisquare(thirds).pvalue > ALARM
    for wrong in (0, -1, 2**63 + 1):
        with pytest.raises(ValueError, match="high must be in"):
            stream.integers(wrong, 1)


def test_words_can_be_changed_in_place():
    words = seeded().words(4)
    words[:] = 0
    assert seeded().words(4).any()
