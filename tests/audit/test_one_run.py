"""The one-run audit: what it finds, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.audit import ATTACKS, Measured, load_audits
from ownerwise.audit.results import Audit, GroupAudit

PEOPLE = 400


def planned(epsilon=(1.0, 8.0), **options):
    budgets = np.resize(epsilon, PEOPLE)
    return ow.plan(
        ow.Owners(None, budgets, 1e-5), **{"steps": 4, "batch_size": PEOPLE / 2, **options}
    )


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PEOPLE, 40, generator=generator)
    return inputs, torch.randint(0, 3, (PEOPLE,), generator=generator)


def stream(seed=0):
    return ow.SecretStream.from_seed(seed)


def test_a_lax_group_is_found_and_a_strict_one_is_not_exceeded():
    audit = ow.audit.one_run(None, planned(), canaries=1000, stream=stream())
    strict, lax = audit.groups
    assert audit.passed
    assert not lax.at_chance
    assert 1 < lax.bounds["any mechanism"] < lax.bounds["plan's curve"] < 8
    assert max(strict.bounds.values()) < 1
    assert lax.auc.low <= lax.cap
    assert 5 < lax.estimate.value < 11
    assert audit.compared > 20


def test_black_box_attacks_find_canaries_that_a_model_has_learned():
    """With hardly any noise, the loss of mislabelled canaries tells which took part."""
    plan = planned((400.0,), steps=60)
    for attack in ("loss", "loss difference"):
        torch.manual_seed(1)
        audit = ow.audit.one_run(
            nn.Linear(40, 3), plan, data(), canaries=200, attack=attack, stream=stream(1),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=5.0),
        )  # fmt: skip
        assert audit.groups[0].auc.low > 0.5  # chance
        assert audit.compared == 0


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_models_of_strict_owners_give_nothing_away(attack):
    audit = ow.audit.one_run(
        nn.Linear(40, 3), planned((0.05,)), data(), canaries=100, attack=attack, stream=stream(1)
    )
    assert audit.groups[0].finding.startswith("Nothing above chance was found")
    assert "An attack that fails proves nothing." in audit.describe()


def test_rate_constraints_and_steered_sampling_are_audited():
    inputs, classes = data()
    sides = np.where(np.arange(PEOPLE) % 3, "left", "right")
    part = ow.Partition({"side": ("left", "right")}, classes=3)
    fair = ow.RateConstraints(ow.constraints.demographic_parity(part, "side", max_gap=0.1))
    plan = planned(constraints=fair)
    targets = part.targets(classes.numpy(), {"side": sides})
    model = nn.Linear(40, 3)
    audit = ow.audit.one_run(
        model, plan, (inputs, targets), canaries=100, release=fair, stream=stream()
    )
    assert audit.passed
    rule = ow.ImportanceSampling(accepted_batch=50)
    plan = planned(release_std=20.0)
    audit = ow.audit.one_run(None, plan, canaries=100, clipping=rule, stream=stream())
    assert audit.passed


@pytest.mark.parametrize("options", [{}, {"filter": "rdp", "clip_to_remaining": True}])
def test_individual_accounting_is_audited(options):
    people = ow.Owners(None, np.resize((1.0, 8.0), PEOPLE), 1e-5)
    plan = ow.plan(people, method="individual", steps=6, clipped_steps=4, **options)
    alone = ow.audit.one_run(None, plan, canaries=600, stream=stream())
    beside = ow.audit.one_run(nn.Linear(40, 3), plan, data(), canaries=600, stream=stream())
    for audit in (alone, beside):
        assert audit.passed, audit.describe()
        assert max(audit.groups[1].bounds.values()) > 0.5


def test_records_of_ones_own_as_black_box_canaries():
    records = torch.zeros(40, 40), torch.zeros(40, dtype=torch.long)
    audit = ow.audit.one_run(
        nn.Linear(40, 3), planned(), data(), canaries=40, attack="loss", canary_records=records,
        stream=stream(),
    )  # fmt: skip
    assert [group.members for group in audit.groups] == [20, 20]
    with pytest.raises(ow.OwnerwiseError, match="40 and 40 rows; expected one per canary, 50"):
        ow.audit.one_run(
            nn.Linear(40, 3), planned(), data(), canaries=50, attack="loss", canary_records=records
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attack": "lira"}, "attack is 'lira'; .*Known names: white-box, loss, loss difference"),
        ({"attack": "loss"}, "attack 'loss' needs a model and its data"),
        ({"failure": 0.0}, "failure=0: expected fractions between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ow.OwnerwiseError, match=message):
        ow.audit.one_run(None, planned(), **options)


def test_inputs_that_canaries_cannot_imitate_are_refused():
    tokens = torch.zeros(PEOPLE, 5, dtype=torch.long), torch.zeros(PEOPLE, dtype=torch.long)
    with pytest.raises(ow.OwnerwiseError, match="pass canary_records"):
        ow.audit.one_run(nn.Embedding(3, 3), planned(), tokens, canaries=40, attack="loss")


def group(auc=(0.5, 0.4, 0.6), bounds=None, **values):
    bounds = {"any mechanism": 0.0} if bounds is None else bounds
    return GroupAudit("ε = 1", 1.0, 1e-5, 100, Measured(*auc), 0.6, bounds=bounds, **values)


@pytest.mark.parametrize(
    ("auc", "bound", "start"),
    [
        ((0.55, 0.45, 0.65), 0.0, "Nothing above chance was found"),
        ((0.55, 0.45, 0.65), 0.1, "The attack does better than chance"),
        ((0.60, 0.51, 0.69), 0.0, "The attack does better than chance"),
        ((0.40, 0.31, 0.49), 0.0, "The attack does better than chance"),
        ((0.55, 0.45, 0.65), 1.1, "A lower bound of 1.1 EXCEEDS the promised epsilon 1."),
    ],
)
def test_chance_is_only_claimed_if_the_interval_contains_it(auc, bound, start):
    found = group(auc, {"any mechanism": bound})
    assert found.finding.startswith(start)
    assert found.violated == (bound > 1)


def test_audits_are_stored_by_attack_and_read_back(tmp_path):
    rates = {"balanced accuracy": Measured(0.6, 0.5, 0.7)}
    full = group(
        estimate=Measured(1.0, 0.5, 1.5), rates=rates, rate_caps={"balanced accuracy": 0.7},
        rate_chances={"balanced accuracy": 0.5},
    )  # fmt: skip
    first = Audit("white-box", "abc", 10, 0.05, [full], ("noise: variance",), 20)
    second = Audit("loss", "abc", 10, 0.05, [group()])
    for audit in (first, second, first):
        audit.save(tmp_path)
    assert load_audits(tmp_path) == [second, first]
    assert not first.passed
    assert load_audits(tmp_path / "absent") == []


@pytest.mark.parametrize(("low", "start"), [(0.011, "The attack does"), (0.01, "Nothing above")])
def test_chance_is_not_claimed_if_a_rate_is_above_it(low, start):
    """An AUC near 1/2 does not exclude that a few records are recognised for certain."""
    name = "detections at 1.0% false alarms"
    rates, caps = {name: Measured(0.02, low, 0.03)}, {name: 0.1}
    found = group(bounds={}, rates=rates, rate_caps=caps, rate_chances={name: 0.01})
    assert found.finding.startswith(start)


def test_caps_are_rounded_up_and_bounds_down():
    found = replace(group((0.55, 0.4517, 0.6513), {"any mechanism": 0.4996}), cap=0.60001)
    assert "(AUC 0.55 (0.451 to 0.652); cap 0.601)" in found.finding
    assert (
        "at least 0.499 (any mechanism)" in Audit("white-box", "abc", 1, 0.05, [found]).describe()
    )


def test_records_of_people_are_mentioned_if_they_take_part():
    options = {"canaries": 40, "stream": stream()}
    alone = ow.audit.one_run(None, planned(), **options)
    beside = ow.audit.one_run(nn.Linear(40, 3), planned(), data(), **options)
    assert alone.private
    assert not beside.private
    assert "NOT PRIVATE" not in alone.describe()
    assert "NOT PRIVATE" in beside.describe()
    assert beside.findings()[0].startswith("NOT PRIVATE")


def test_a_training_that_diverges_shows_nothing():
    model = nn.Linear(40, 3)
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    with pytest.raises(ow.OwnerwiseError, match="not finite: the audited training diverged"):
        ow.audit.one_run(model, planned(), data(), canaries=40, attack="loss", stream=stream())


@pytest.mark.parametrize("content", ["{", '{"format": 1}', '{"format": 9, "audits": []}'])
def test_a_damaged_file_is_explained(content, tmp_path):
    (tmp_path / "audit.json").write_text(content)
    with pytest.raises(ow.OwnerwiseError, match=r"audit\.json"):
        load_audits(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("weights", [None, ow.INO()], ids=["plain", "INO"])
@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
def test_lower_bounds_are_sound(method, weights):
    """A bound exceeds what the plan spends in at most 5% of 200 runs + 3 standard errors."""
    plan = planned((1.0, 4.0), method=method)
    wrong = 0
    for seed in range(200):
        audit = ow.audit.one_run(None, plan, canaries=400, weights=weights, stream=stream(seed))
        wrong += any(found.violated for found in audit.groups)
    assert wrong <= 10 + 3 * 9.5**0.5


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "median"), [(2.0, 0.65), (4.0, 1.54), (8.0, 3.0)])
def test_lower_bounds_are_as_strong_as_those_of_an_ideal_attack(epsilon, median):
    """At epsilon 8, the bound jumps from 2.71 (98 of 100 right) to 3.00 (99), the true median:
    an ideal attack has at most 98 right with probability 0.47, so 200 runs may say 2.71 as well.
    """
    plan = planned((epsilon,), steps=1, batch_size=PEOPLE)
    found = [
        ow.audit.one_run(None, plan, stream=stream(seed)).groups[0].bounds["any mechanism"]
        for seed in range(200)
    ]
    assert np.median(found) == pytest.approx(median, rel=0.1)
