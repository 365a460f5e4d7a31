"""What several processes may add to a record's contribution by rounding, and how much they send."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ownerwise as ow
from ownerwise.step.rounding import Rounding
from tools import groups, step_tools

UNIT = 2.0**-24


@given(
    count=st.integers(2, 40),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1e-7, 1e-3, 1.0]),
)
def test_the_rounding_of_an_exchange_is_within_its_bound(count, seed, spread):
    """Nearly equal vectors are the worst case: their roundings all point the same way."""
    rng = np.random.default_rng(seed)
    sums = 1.0 + spread * rng.standard_normal((count, 3)) + rng.uniform(0, 1e-6, 3)
    total = np.zeros(3, dtype=np.float32)
    for part in sums.astype(np.float32):
        total = total + part  # as in a ring, one after the other
    norms = np.linalg.norm(sums, axis=1).sum()
    error = np.linalg.norm(total.astype(np.float64) - sums.sum(axis=0))
    assert error <= count * UNIT * norms * (1 + 1e-6)


def test_the_slack_pays_for_both_sums_and_large_groups_send_float64():
    plan, model = step_tools.make_plan(method="sample"), step_tools.mlp()
    alone = Rounding.of(plan, model, None)
    slacks = {}
    for count in (2, 4, 100, 2000):
        rounding = Rounding.of(plan, model, None, processes=count)
        slacks[count] = rounding.slack - alone.slack
        assert rounding.exchange == (torch.float64 if count == 2000 else torch.float32)
    largest = slacks[2] / (4 * UNIT)  # of the records of a batch
    assert plan.expected_batch_size < largest <= step_tools.RECORDS + 1e-6
    assert slacks[100] == pytest.approx(50 * slacks[2])
    assert 0 < slacks[2000] < 1e-9
    exact = Rounding.of(plan, step_tools.mlp().double(), None, processes=2)
    assert exact.exchange == torch.float64


def resumed(folder, plan, steps, seed):
    """Start or resume a run, and take the steps up to this one."""
    torch.manual_seed(0)
    model, *data = step_tools.example("mlp", step_tools.RECORDS)
    model, data = model.double(), (data[0].double(), data[1])
    stream = ow.SecretStream() if seed is None else step_tools.seeded(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = ow.PrivateStep(
        model, plan, optimizer, torch.nn.functional.cross_entropy, stream=stream, weights=ow.INO()
    )
    if (folder / "account.db").exists():
        step.restore(folder)
    drawn, start = [], step.steps_spent
    batches = ow.PoissonBatches(tuple(data), plan, stream=stream, start=start, steps=steps - start)
    for batch in batches:
        step(batch)
        drawn.append(batch.share.checksum)
    step.save(folder)
    return step_tools.weights_of(model), step.steps_spent, drawn


@pytest.mark.long
def test_a_run_of_four_processes_goes_on_in_two(tmp_path):
    """Pitfalls 38 and 55: a private run draws new batches and noise; a seeded one repeats them."""
    plan = step_tools.make_plan(steps=6)
    for name, seed in (("seeded", 3), ("private", None)):
        groups.in_group(resumed, 4, tmp_path / name, plan, 3, seed)
        found = groups.in_group(resumed, 2, tmp_path / name, plan, 6, seed)
        whole = groups.in_group(resumed, 2, tmp_path / f"{name} at once", plan, 6, seed)
        assert all(spent == 6 for _, spent, _ in (*found, *whole))
        assert torch.equal(found[0][0], found[1][0])
        if seed is None:
            assert not set(found[0][2]) & set(whole[0][2])
        else:
            torch.testing.assert_close(found[0][0], whole[0][0], rtol=0, atol=1e-12)
            assert found[0][2] == whole[0][2][3:]


@pytest.mark.long
def test_a_seeded_run_that_was_interrupted_equals_the_whole_one(tmp_path):
    plan = step_tools.make_plan(steps=6)
    groups.in_group(resumed, 2, tmp_path / "in two", plan, 3, 3)
    found = groups.in_group(resumed, 2, tmp_path / "in two", plan, 6, 3)
    whole = groups.in_group(resumed, 2, tmp_path / "at once", plan, 6, 3)
    assert torch.equal(found[0][0], whole[0][0])
