"""What a plan pays for the histogram of constraints, and how owners share it."""

from functools import cache

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise.accounting import Schedule, pld
from ownerwise.mechanisms import constraints as rates

PART = ow.Partition({"sex": ("F", "M")}, classes=2)
FAIR = ow.RateConstraints(rates.demographic_parity(PART, "sex", max_gap=0.1))


def owners(**options):
    ids = np.repeat(["ann", "bob", "eve"], [300, 400, 300])
    return ow.Owners(ids, {"ann": 0.7, "bob": 1.5, "eve": 4.0}, delta=1e-5, **options)


@cache
def make(method="uniform", **options):
    settings = {"steps": 40, "batch_size": 100, **options}
    return ow.plan(owners(), method, **settings)


def check(plan):
    """All budgets are kept, by the plan's own accountant and by the reference."""
    assert (plan.epsilon() <= plan.targets).all()
    assert plan.verify().highest_ratio <= 1.0


@pytest.mark.parametrize("share", [None, 0.3])
def test_the_release_takes_its_share_of_a_steps_cost(share):
    alone = make()
    plan = make(constraints=FAIR, release_share=share)
    taken = 0.1 if share is None else share
    joint = plan.accounted_multipliers[0]
    assert (joint / plan.release_std) ** 2 == pytest.approx(taken, rel=5e-3)
    assert joint == pytest.approx(alone.noise_multipliers[0], rel=5e-3)
    assert plan.noise_std == pytest.approx(alone.noise_std / np.sqrt(1 - taken), rel=5e-3)
    assert plan.release_shares is None
    assert make(release_share=taken).hash == plan.hash
    check(plan)


def test_the_noise_of_the_release_can_be_given():
    plan = make(constraints=FAIR, release_std=20.0)
    assert plan.release_std == 20.0
    check(plan)


def test_a_release_share_can_be_combined_with_given_noise():
    plan = make(batch_size=None, noise_multiplier=4.0, constraints=FAIR, release_share=0.2)
    joint = plan.accounted_multipliers[0]
    assert (joint / plan.release_std) ** 2 == pytest.approx(0.2, rel=1e-6)
    check(plan)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("method", ["sample", "scale", "both"])
def test_individual_budgets_are_used_up_with_the_histogram_included(method, noise):
    plan = make(method, constraints=FAIR, release_noise=noise)
    check(plan)
    np.testing.assert_array_less(0.99 * plan.targets, plan.epsilon())
    if method == "scale":
        assert plan.release_shares is None
        return
    np.testing.assert_allclose(plan.release_shares, plan.sampling_rates[0] / plan.sampling_rates)
    # on average every record adds the same, whoever owns it
    assert np.ptp(plan.release_shares * plan.sampling_rates) < 1e-12
    for owner in range(3):
        rate, multiplier = plan.sampling_rates[owner], plan.noise_multipliers[owner]
        share, schedule = plan.release_shares[owner], Schedule.constant(40)
        if noise == "gaussian":
            joint = (multiplier**-2 + (share / plan.release_std) ** 2) ** -0.5
            spent = pld.epsilon(rate, joint, schedule, 1e-5)
        else:
            scale = plan.release_std / np.sqrt(2) / share
            spent = pld.epsilon(rate, multiplier, schedule, 1e-5, laplace=scale)
        assert plan.epsilon()[owner] == pytest.approx(spent, rel=1e-9)


def test_many_budgets_lie_on_one_curve():
    """300 distinct budgets are interpolated, and the plan's own check holds among them."""
    budgets = dict(enumerate(np.geomspace(0.5, 6.0, 300).tolist()))
    many = ow.Owners(np.repeat(np.arange(300), 5), budgets, delta=1e-5)
    plan = ow.plan(many, "sample", steps=10, batch_size=150, constraints=FAIR)
    ratio = plan.epsilon() / plan.targets
    assert ratio.max() <= 1.0
    assert ratio.min() > 0.99
    np.testing.assert_allclose(plan.epsilon_of([0, 150, 299], 10), plan.epsilon()[[0, 150, 299]],
                               rtol=1e-3)  # fmt: skip


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_shares_and_noise_are_saved_and_hashed(noise, tmp_path):
    plan = make("sample", constraints=FAIR, release_noise=noise)
    plan.save(tmp_path / "plan.json")
    loaded = ow.Plan.load(tmp_path / "plan.json", owners())
    assert loaded.hash == plan.hash
    assert loaded.release_noise == noise
    np.testing.assert_array_equal(loaded.release_shares, plan.release_shares)
    with pytest.raises(ValueError, match="read-only"):
        loaded.release_shares[0] = 0.5
    assert f"on a release of sensitivity {plan.release_shares.min():.3g} to 1" in plan.describe()


def test_plans_without_a_release_have_no_further_columns(tmp_path):
    plan = make()
    assert "release_noise" not in plan.header()
    assert plan.accounted_multipliers is not None
    with pytest.raises(ow.PlanError, match="no single multiplier"):
        _ = make(release_std=20.0, release_noise="laplace").accounted_multipliers


def test_all_that_is_wrong_with_a_release_is_listed():
    with pytest.raises(ow.PlanError) as error:
        make(release_share=1.0, release_std=3.0, release_noise="laplace", accountant="rdp")
    text = str(error.value)
    for words in ("less than 1", "were both given", "expected 'pld'"):
        assert words in text
    with pytest.raises(ow.PlanError, match=r"wrap the constraints in RateConstraints"):
        ow.plan(owners(), steps=5, batch_size=50, constraints=FAIR.constraints)
    with pytest.raises(ow.OwnerwiseError, match=r"wrap the constraints in RateConstraints"):
        ow.Trainer(torch.nn.Linear(2, 2), make(), lr=1.0, constraints=FAIR.constraints)
    with pytest.raises(ow.PlanError, match=r"'gauss'; .*Known names: gaussian, laplace"):
        make(release_noise="gauss")


def test_steering_refuses_a_release_that_counts_owners_differently():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ow.OwnerwiseError, match="counts every record as one"):
        ow.PrivateStep(
            model,
            make("sample", constraints=FAIR),
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.nn.functional.cross_entropy,
            clipping=ow.ImportanceSampling(acceptance=0.5),
        )
