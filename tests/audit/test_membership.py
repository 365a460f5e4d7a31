"""Membership inference: the heads that shadows are, the attacks, and how they are judged."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn.functional import cross_entropy

import ownerwise as ow
from ownerwise.audit import INFERENCES, Heads, Signals, membership
from ownerwise.audit.rates import auc, share
from tools import step_tools

RECORDS, FEATURES, CLASSES = 240, 6, 3


def planned(**options):
    epsilon = np.resize([2.0, 8.0], RECORDS)
    options = {"steps": 15, "batch_size": 40, **options}
    return ow.plan(ow.Owners(None, epsilon, 1e-4), **options)


def records():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (RECORDS,), generator=generator)


@pytest.mark.parametrize("method", ["sample", "scale"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weights": ow.INO()}, {"clipping": ow.AutoS()}],
    ids=["standard", "INO", "AUTO-S"],
)
def test_stacked_heads_sum_what_the_private_step_sums(method, options):
    inputs, labels = records()
    plan = planned(method=method)
    heads = Heads(inputs, labels, plan, lr=1.0, **options)
    state = torch.randn(2, FEATURES + 1, CLASSES, dtype=torch.float64)
    drawn = [np.arange(0, 50), np.arange(30, 200, 7)]
    for at, rows in enumerate(drawn):
        model = nn.Linear(FEATURES, CLASSES).double()
        with torch.no_grad():
            model.weight.copy_(state[at, :-1].T)
            model.bias.copy_(state[at, -1])
        step = step_tools.make_step(model, cross_entropy, plan=plan, **options)
        batch = ow.Batch(0, rows, heads.owner[rows], (inputs[rows], labels[rows]))
        weight, bias = step.clipped_sum(batch).values()
        heads._clip_norms = plan.clip_norms / (1 + step.slack)  # the step's allowance for rounding
        sums = heads.clipped_sums(state, drawn)
        torch.testing.assert_close(sums[at], torch.cat([weight.T, bias[None]]))


def test_heads_train_on_their_own_records_at_the_rates_of_the_plan():
    inputs, labels = records()
    heads = Heads(inputs, labels, planned(), lr=1.0)
    seen = []
    heads.clipped_sums = lambda state, drawn: seen.append(drawn) or torch.zeros_like(state)
    included = np.random.default_rng(0).random((40, RECORDS)) < 0.5
    trained = heads.train(included, ow.SecretStream.from_seed(1))
    assert trained.shape == (40, FEATURES + 1, CLASSES)
    counts, members = 0, 0
    for step in range(15):
        for chunk, first in zip(seen[step::15], (0, 16, 32), strict=True):
            for mask, rows in zip(included[first:], chunk, strict=False):
                assert mask[rows].all()
                counts, members = counts + len(rows), members + mask.sum()
    assert counts == pytest.approx(members * 40 / RECORDS, abs=5 * (counts**0.5))
    std = float(heads.plan.noise_std) / 40 * 15**0.5
    assert float(trained.std()) == pytest.approx(std, rel=0.15)


def test_plans_that_heads_cannot_follow_are_refused():
    inputs, labels = records()
    with pytest.raises(ow.OwnerwiseError, match="samples records and is not hardened"):
        Heads(inputs, labels, planned(hardened=True), lr=1.0)
    with pytest.raises(ow.OwnerwiseError, match="randomised"):
        Heads(inputs, labels, planned(), lr=1.0, clipping=ow.ImportanceSampling())


def simulated(models, shift=1.0, seed=0):
    """Return signals whose members are `shift` standard deviations more confident."""
    draws = np.random.default_rng(seed)
    included = draws.random((models, RECORDS)) < 0.5
    hardness = np.random.default_rng(99).normal(size=RECORDS) * 3
    return Signals(hardness + draws.normal(size=included.shape) + shift * included, included)


@pytest.mark.parametrize("attack", ["LiRA online", "LiRA offline"])
@pytest.mark.parametrize("shadows", [200, 16])
def test_lira_reaches_what_two_normals_permit(attack, shadows):
    """120 records per group and 60 targets: the standard error of the AUC is about 0.005."""
    audit = membership(simulated(60, 1.0, 1), simulated(shadows), planned(), attack=attack)
    ideal = norm.cdf(1 / 2**0.5)
    for group in audit.groups:
        assert ideal - (0.03 if shadows == 200 else 0.06) < group.auc.value < ideal + 0.02


def test_rmia_compares_records_with_each_other():
    audit = membership(simulated(20, 3.0, 1), simulated(100, 3.0), planned(), attack="RMIA")
    assert all(group.auc.low > 0.7 for group in audit.groups)


@pytest.mark.parametrize("attack", INFERENCES)
def test_without_a_signal_nothing_is_found(attack):
    audit = membership(simulated(10, 0.0, 1), simulated(40, 0.0), planned(), attack=attack)
    assert all(abs(group.auc.value - 0.5) < 0.06 for group in audit.groups)


def test_a_target_among_its_own_shadows_is_refused():
    """Pitfall 49: the attack would be judged on what it was fitted to."""
    shadows = simulated(20)
    with pytest.raises(ow.OwnerwiseError, match="a target is among the shadow models"):
        membership(shadows.first(1), shadows, planned())


def test_thresholds_are_judged_on_records_that_did_not_choose_them():
    """Pitfall 49: pure noise does not reach a balanced accuracy above 1/2."""
    epsilon = np.full(20_000, 5.0)
    plan = ow.plan(ow.Owners(None, epsilon, 1e-5), steps=5, batch_size=100)
    draws = np.random.default_rng(0)
    made = [
        Signals(draws.normal(size=(n, 20_000)), draws.random((n, 20_000)) < 0.5) for n in (2, 20)
    ]
    rates = membership(*made, plan, attack="LiRA offline").groups[0].rates
    assert rates["balanced accuracy"].low < 0.5 < rates["balanced accuracy"].high
    found = rates["detections at 1.0% false alarms"]
    assert found.value == pytest.approx(0.01, abs=0.005)
    assert "detections at 0.1% false alarms" not in rates  # too few records for a threshold


def test_shadows_from_models_trained_one_by_one():
    plan = planned()
    truth = np.random.default_rng(5).normal(size=RECORDS)
    made = Signals.of_models(lambda mask: truth + mask, 6, RECORDS, ow.SecretStream.from_seed(0))
    assert len(made) == 6
    assert np.array_equal(made.confidences, truth + made.included)
    with pytest.raises(ow.OwnerwiseError, match="expected 240, as in the plan"):
        membership(Signals(np.zeros((1, 3)), np.zeros((1, 3), bool)), made, plan)


def test_heads_of_lax_owners_are_attacked_with_success():
    """End to end: many features and few records, so that heads learn their members by heart."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 80, generator=generator)
    labels = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
    epsilon = np.resize([0.5, 60.0], RECORDS)
    plan = ow.plan(ow.Owners(None, epsilon, 1e-4), steps=40, batch_size=60)
    heads = Heads(inputs, labels, plan, lr=2.0)
    made = [Signals.of_heads(heads, n, ow.SecretStream.from_seed(n)) for n in (4, 48)]
    strict, lax = membership(*made, plan).groups
    assert lax.auc.low > 0.7
    assert strict.auc.low < strict.cap < lax.auc.value


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_the_intervals_of_auc_and_rates_contain_the_truth(shift):
    """At 5%, 26 or more misses of 300 have p < 0.004."""
    draws = np.random.default_rng(1)
    truth = norm.cdf(shift / 2**0.5)
    missed = [0, 0]
    for _ in range(300):
        inside, outside = draws.normal(shift, size=80), draws.normal(size=80)
        found = auc(inside, outside, 0.05)
        missed[0] += not found.low <= truth <= found.high
        rate = share(int((inside > 0).sum()), 80, 0.05)
        missed[1] += not rate.low <= norm.cdf(shift) <= rate.high
    assert max(missed) < 26
