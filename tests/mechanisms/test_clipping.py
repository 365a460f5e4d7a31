"""Clipping rules: no record moves the sum by more than its owner's clip norm."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import AutoS, Psac, Standard
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

RULES = [Standard(), AutoS(), AutoS(1e-6), Psac(), Psac(0.3)]

positive = st.floats(1e-6, 1e6)
norms_of_records = st.one_of(st.just(0.0), st.floats(0, 1e-30), st.floats(0, 1e30))


@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(deadline=None, max_examples=200)
@given(
    pairs=st.lists(st.tuples(norms_of_records, positive), min_size=1, max_size=6),
    single=st.booleans(),
)
def test_no_factor_exceeds_the_clip_norm(rule, pairs, single):
    """Pitfall 20: factor * norm <= C, finite and positive, for any norm, in both precisions."""
    dtype = torch.float32 if single else torch.float64
    norms, clips = (torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))
    factors = rule.factors(norms, clips, None)
    assert factors.dtype == dtype
    assert torch.isfinite(factors).all()
    assert (factors >= 0).all()
    assert (factors * norms <= clips * (1 + 1e-6)).all()
    assert not rule.randomised


@settings(deadline=None)
@given(clip=positive, ratio=st.floats(0, 0.999999))
def test_the_standard_rule_is_exact_where_it_need_not_clip(clip, ratio):
    """Pitfall 20: no 1e-6 in the denominator; and clipped ones have exactly the clip norm."""
    norms = torch.tensor([clip * ratio, clip, 3 * clip], dtype=torch.float64)
    factors = Standard().factors(norms, torch.full_like(norms, clip), None)
    assert factors[0] == factors[1] == 1
    assert float(factors[2] * norms[2]) == pytest.approx(clip, rel=1e-15)


def test_the_formulas_of_the_papers():
    """AUTO-S C/(|g| + 0.01); PSAC C/(|g| + r/(|g| + r)), with its peak 1.88 C."""
    norms = torch.linspace(0, 5, 50_001, dtype=torch.float64)
    clips = torch.full_like(norms, 0.5)
    auto, psac = AutoS().factors(norms, clips, None), Psac().factors(norms, clips, None)
    torch.testing.assert_close(auto, 0.5 / (norms + 0.01))
    torch.testing.assert_close(psac, 0.5 / (norms + 0.1 / (norms + 0.1)))
    assert float(psac.max()) == pytest.approx(1.88 * 0.5, rel=2e-3)
    assert float(psac[0]) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_constants_must_be_positive(value):
    with pytest.raises(ValueError, match="stability must be at least 1e-06 and finite"):
        AutoS(value)
    with pytest.raises(ValueError, match="r must be at least 1e-06 and finite"):
        Psac(value)


@pytest.mark.parametrize("rule", [Standard(), AutoS(), Psac()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sensitivity_by_brute_force(rule, dtype):
    """Removing any record moves the sum by at most its owner's clip norm: 1,200 cases per rule.

    60 random batches of 20 records with gradients from 1e-4 to 1e4, 3 owners with own clip norms.
    """
    generator = torch.Generator().manual_seed(2)
    cases = 0
    for number in range(60):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
        step = tools.make_step(model, functional.mse_loss, clipping=rule)
        scale = 10 ** (8 * torch.rand(20, 1, generator=generator) - 4)
        inputs = torch.randn(20, 3, generator=generator).to(dtype)
        targets = (scale * torch.randn(20, 2, generator=generator)).to(dtype)
        targets[3] = model(inputs[3]).detach()  # a zero gradient, up to rounding
        indices = torch.randperm(tools.RECORDS, generator=generator)[:20].numpy()
        whole = step.clipped_sum(tools.batch_of(inputs, targets, 0, indices))
        for out in range(20):
            rest = [i for i in range(20) if i != out]
            part = step.clipped_sum(tools.batch_of(inputs[rest], targets[rest], 0, indices[rest]))
            change = float((tools.flat(whole) - tools.flat(part)).norm())
            clip_norm = step.plan.clip_norms[indices[out] % 3]
            slack = 1e-6 * float(tools.flat(whole).norm()) if dtype == torch.float32 else 0.0
            assert change <= clip_norm * (1 + 1e-6) + slack
            cases += 1
    assert cases >= 1000


class Accepts(ow.mechanisms.ClippingRule):
    """Importance sampling: a record counts in full length with probability norm / C, else not."""

    randomised = True

    def factors(self, norms, clip_norms, stream):
        full = clip_norms / norms.clamp(min=1e-30)
        draws = torch.from_numpy(stream.uniforms(len(norms))).to(norms)
        return torch.where(draws * clip_norms < norms, full, torch.zeros_like(full))


def accepted(seed, size=None, steps=5):
    """[steps, records]: which records a randomised rule took."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    step = tools.make_step(
        model, functional.mse_loss, clipping=Accepts(), not_private=True, seed=seed,
        performance=ow.Performance(micro_batch_size=size),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
    )  # fmt: skip
    inputs, targets = torch.randn(30, 3).double(), 0.3 * torch.randn(30, 2).double()
    found = []
    for number in range(steps):
        step(tools.batch_of(inputs, targets, number))
        peek = step.peek
        assert peek is not None
        lengths = peek.factors * peek.norms
        clip_norms = step.plan.clip_norms[peek.owner_index] / (1 + step.slack)
        np.testing.assert_allclose(lengths[lengths > 0], clip_norms[lengths > 0])
        found.append(lengths > 0)
    return np.array(found)


def test_a_randomised_rule_draws_from_the_secret_stream():
    """Pitfalls 9, 28, 29: per key and step, whatever the global generators and micro-batches."""
    first = accepted(1)
    assert 0 < first.mean() < 1
    assert not (first == first[0]).all()
    np.testing.assert_array_equal(accepted(1, size=7), first)
    assert (accepted(2) != first).any()


def test_a_private_run_keeps_a_randomised_rule_secret():
    model, plan = nn.Linear(3, 2), tools.make_plan()
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1),
        functional.mse_loss, clipping=Accepts(),
    )  # fmt: skip
    records = len(plan.owners.record_owner_index)
    data = torch.randn(records, 3), torch.randn(records, 2)
    step(next(iter(ow.PoissonBatches(data, plan))))
    assert step.private
    assert step.peek is None


def test_a_custom_rule_must_not_reverse_gradients():
    """Factors below 0 count by their size."""

    class Turned(Standard):
        def factors(self, norms, clip_norms, stream=None):
            return -100 * clip_norms / norms

    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, functional.cross_entropy, clipping=Turned())
    with pytest.raises(ow.OwnerwiseError, match="exceed its clip norm"):
        step.clipped_sum(tools.batch_of(inputs, labels))
