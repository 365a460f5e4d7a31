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
from ownerwise.audit.shadow_attack import _balanced, _detections, _halves, _least_protected
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


def network(layers, model):
    """Return one of the stacked networks as a module."""
    modules = []
    for layer in layers:
        linear = nn.Linear(layer.shape[1] - 1, layer.shape[2]).double()
        with torch.no_grad():
            linear.weight.copy_(layer[model, :-1].T)
            linear.bias.copy_(layer[model, -1])
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


@pytest.mark.parametrize("hidden", [(), (5,), (5, 4)], ids=["linear", "hidden", "two hidden"])
@pytest.mark.parametrize(
    "options",
    [{}, {"method": "scale", "weights": ow.INO()}, {"clipping": ow.AutoS()}],
    ids=["standard", "scale, INO", "AUTO-S"],
)
def test_stacked_networks_sum_what_the_private_step_sums(hidden, options):
    inputs, labels = records()
    options = dict(options)
    plan = planned(method=options.pop("method", "sample"))
    heads = Heads(inputs, labels, plan, lr=1.0, hidden=hidden, **options)
    layers = [torch.randn_like(layer) for layer in heads.untrained(2, ow.SecretStream.from_seed(0))]
    drawn = [np.arange(0, 50), np.arange(30, 200, 7)]
    for at, rows in enumerate(drawn):
        model = network(layers, at)
        step = step_tools.make_step(model, cross_entropy, plan=plan, **options)
        batch = ow.Batch(0, rows, heads.owner[rows], (inputs[rows], labels[rows]))
        expected = list(step.clipped_sum(batch).values())
        heads._clip_norms = plan.clip_norms / (1 + step.slack)  # the step's allowance for rounding
        found = heads.clipped_sums(layers, drawn)
        for sums, weight, bias in zip(found, expected[::2], expected[1::2], strict=True):
            torch.testing.assert_close(sums[at], torch.cat([weight.T, bias[None]]))
        outputs = list(heads.outputs(layers, inputs))[at]
        torch.testing.assert_close(outputs, model(inputs))


def test_networks_start_from_different_first_layers_and_equal_last_ones():
    inputs, labels = records()
    heads = Heads(inputs, labels, planned(), lr=1.0, hidden=(5,))
    first, last = heads.untrained(3, ow.SecretStream.from_seed(0))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, heads.untrained(3, ow.SecretStream.from_seed(1))[0])
    assert float(first[:, :-1].std()) == pytest.approx(FEATURES**-0.5, rel=0.3)
    assert not last.any()


def test_heads_train_on_their_own_records_at_the_rates_of_the_plan():
    inputs, labels = records()
    heads = Heads(inputs, labels, planned(), lr=1.0)
    seen = []
    heads.clipped_sums = lambda layers, drawn: seen.append(drawn) or [torch.zeros_like(layers[0])]
    included = np.random.default_rng(0).random((40, RECORDS)) < 0.5
    (trained,) = heads.train(included, ow.SecretStream.from_seed(1))
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


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_target_among_its_own_shadows_is_refused(rounding):
    """Pitfall 49: the attack would be judged on what it was fitted to."""
    shadows = simulated(20)
    target = Signals(shadows.confidences[3:4] + rounding, shadows.included[3:4])
    with pytest.raises(ow.OwnerwiseError, match="a target is among the shadow models"):
        membership(target, shadows, planned())


def test_models_that_diverged_are_refused():
    confidences = np.zeros((3, 4))
    confidences[1, 2] = np.nan
    with pytest.raises(ow.OwnerwiseError, match="1 of 3 models have confidences that are not fin"):
        Signals(confidences, confidences == 0)


def test_shadow_attacks_are_marked_as_not_private():
    audit = membership(simulated(2, 1.0, 1), simulated(20), planned())
    assert "NOT PRIVATE" in audit.describe()
    assert audit.findings()[0].startswith("NOT PRIVATE")


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
    assert found.low < 0.01 < found.high


def test_rates_without_enough_false_alarms_for_a_threshold_are_left_out():
    audit = membership(simulated(60, 1.0, 1), simulated(20), planned())  # 1,800 others per half
    assert set(audit.groups[0].rates) == {"detections at 1.0% false alarms", "balanced accuracy"}


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_intervals_of_detections_and_accuracies_contain_the_truth(shift):
    """At 5%, 26 or more misses of 300 have p < 0.004."""
    draws = np.random.default_rng(2)
    missed = [0, 0]
    for _ in range(300):
        included = [draws.random(1200) < 0.5 for _ in range(2)]
        halves = _halves([draws.normal(size=1200) + shift * mask for mask in included], included)
        found = _detections(halves, 0.01, 0.05)
        missed[0] += not found.low <= norm.sf(norm.isf(0.01) - shift) <= found.high
        # a balanced accuracy is that of its threshold, which is near the best one
        missed[1] += _balanced(halves, 0.05).low > norm.cdf(shift / 2)
    assert max(missed) < 26


def test_few_scores_do_not_show_that_a_rate_is_above_zero():
    scores, included = np.arange(400.0), np.arange(400) < 200
    found = _detections(_halves([-scores], [included]), 0.01, 0.05)  # a perfect attack
    assert (found.value, found.low, found.high) == (1.0, 0.0, 1.0)


def test_caps_are_those_of_the_least_protected_records_of_a_class():
    """With many budgets, classes are ranges, and the last owner is not the laxest."""
    plan = ow.plan(ow.Owners(None, np.linspace(8, 1, 40), 1e-4), steps=15, batch_size=8)
    assert _least_protected(plan, np.arange(10)) == {0}
    names = np.repeat(np.arange(3), [1, 4, 2])
    owners = ow.Owners(names, {0: 2.0, 1: 2.0, 2: 1.0}, 1e-4)
    plan = ow.plan(owners, unit="owner", sampling="record", steps=5, batch_size=2)
    assert _least_protected(plan, np.arange(3)) == {0, 1}


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
