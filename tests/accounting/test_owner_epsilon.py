"""The cost of all records of an owner together, against oracles that share no code with it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom, norm

from ownerwise import accounting
from ownerwise.accounting import (
    ClosingRelease,
    Exposure,
    PaidRelease,
    RunCost,
    Schedule,
    pld,
    rdp,
    reference,
)
from ownerwise.accounting.owner_epsilon import owner_epsilon
from ownerwise.accounting.owner_pair import OwnerPair, most_drawn
from ownerwise.accounting.run_cost import group_epsilon
from ownerwise.errors import AccountingError

T, Q, DELTA = 1000, 0.01, 1e-5
RUN = Schedule.constant(T)


@pytest.mark.parametrize(
    ("multiplier", "figures"),
    [
        (1.0, {1: 1.83, 2: 3.98, 4: 8.90, 10: 27.9}),
        (2.0, {1: 0.622, 2: 1.333, 4: 2.893, 10: 8.445}),
        (4.0, {1: 0.272, 2: 0.580, 4: 1.240, 10: 3.461}),
    ],
)
def test_figures_of_the_owner_grow_faster_than_the_number_of_records(multiplier, figures):
    """Pitfall 46: the owner's own figure."""
    for records, figure in figures.items():
        found = pld.epsilon(Q, multiplier, RUN, DELTA, records=records)
        assert found == pytest.approx(figure, rel=0.01)
        assert found <= rdp.epsilon(Q, multiplier, RUN, DELTA, records=records)


def by_dp_accounting(rate, multiplier, records, segments, delta, *, pessimistic, closing=None):
    from dp_accounting.pld import privacy_loss_distribution as reference

    drawn = np.arange(records + 1)
    parts = [
        reference.from_mixture_gaussian_mechanism(
            multiplier * factor,
            drawn.tolist(),
            binom.pmf(drawn, records, rate).tolist(),
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-2,
            use_connect_dots=pessimistic,
        ).self_compose(count)
        for count, factor in segments
    ]
    if closing is not None:
        parts.append(
            reference.from_gaussian_mechanism(
                closing,
                pessimistic_estimate=pessimistic,
                value_discretization_interval=1e-2,
                use_connect_dots=pessimistic,
            )
        )
    composed, *others = parts
    for part in others:
        composed = composed.compose(part)
    return composed.get_epsilon_for_delta(delta)


@pytest.mark.parametrize(
    ("rate", "multiplier", "records", "segments", "closing"),
    [
        (0.01, 1.0, 4, ((200, 1.0),), None),
        (0.2, 6.0, 7, ((30, 1.0),), None),
        (0.02, 1.5, 3, ((60, 1.2), (60, 0.8)), None),
        (0.01, 2.0, 10, ((150, 1.0),), 4.0),
        (0.97, 25.0, 5, ((40, 1.0),), None),
    ],
)
def test_dp_accounting_agrees(rate, multiplier, records, segments, closing):
    found = pld.epsilon(
        rate, multiplier, Schedule(segments), DELTA, records=records, closing=closing or math.inf
    )
    bounds = [
        by_dp_accounting(
            rate, multiplier, records, segments, DELTA, pessimistic=side, closing=closing
        )
        for side in (False, True)
    ]
    assert bounds[0] < found <= bounds[1] * 1.01


def one_step_delta(rate, multiplier, records, epsilon, removing):
    """The hockey-stick divergence of one step, by brute-force integration."""
    drawn = np.arange(records + 1)
    masses = binom.pmf(drawn, records, rate)

    def excess(x):
        mixed = float(masses @ norm.pdf(x, drawn, multiplier))
        base = float(norm.pdf(x, 0, multiplier))
        first, second = (mixed, base) if removing else (base, mixed)
        return max(first - math.exp(epsilon) * second, 0.0)

    ends = -10 * multiplier, records + 10 * multiplier
    return quad(excess, *ends, limit=2000, points=np.linspace(*ends, 40)[1:-1])[0]


@pytest.mark.parametrize("records", [2, 5, 12])
@pytest.mark.parametrize(("rate", "multiplier"), [(0.1, 0.8), (0.3, 3.0), (0.7, 2.0)])
def test_one_step_is_exact_in_the_worse_direction(rate, multiplier, records):
    found = pld.epsilon(rate, multiplier, Schedule.constant(1), 1e-3, records=records)
    deltas = [
        one_step_delta(rate, multiplier, records, found, removing) for removing in (True, False)
    ]
    assert max(deltas) <= 1e-3
    below = [
        one_step_delta(rate, multiplier, records, 0.99 * found, removing)
        for removing in (True, False)
    ]
    assert max(below) > 1e-3


def composed_losses(rate, multiplier, records, steps, runs, removing, generator):
    """Privacy losses of whole runs, drawn from the run's own distribution."""
    masses = binom.pmf(np.arange(records + 1), records, rate)
    weights = masses * np.exp(-(np.arange(records + 1) ** 2) / (2 * multiplier**2))
    loss = np.zeros(runs)
    for _ in range(steps):
        mean = generator.binomial(records, rate, runs) if removing else 0.0
        x = generator.normal(0.0, multiplier, runs) + mean
        loss += np.log(np.polynomial.polynomial.polyval(np.exp(x / multiplier**2), weights))
    return loss if removing else -loss


def estimated_epsilon(losses, runs, delta):
    """The epsilon at which the mean of (1 - exp(epsilon - loss))+ is delta."""

    def excess(epsilon):
        return np.maximum(0.0, -np.expm1(epsilon - losses)).sum() / runs - delta

    return float(brentq(excess, 0.0, float(losses.max())))


@pytest.mark.parametrize(
    ("steps", "runs"), [(100, 100_000), pytest.param(100, 10**7, marks=pytest.mark.long)]
)
def test_the_figure_is_just_above_a_monte_carlo_estimate(steps, runs):
    """Delta 1e-3, without importance sampling; within 1% of 10^7 runs of 100 steps."""
    rate, multiplier, records, delta = 0.02, 1.5, 5, 1e-3
    found = pld.epsilon(rate, multiplier, Schedule.constant(steps), delta, records=records)
    generator = np.random.default_rng(0)
    estimates = {}
    for removing in (True, False):
        parts = [
            composed_losses(rate, multiplier, records, steps, size, removing, generator)
            for size in [250_000] * (runs // 250_000) + [runs % 250_000]
        ]
        losses = np.concatenate([part[part > 0.5 * found] for part in parts])
        # four standard errors of the estimated delta, which is a mean of numbers in [0, 1]
        noise = 4 * math.sqrt(delta / runs)
        low, high = (estimated_epsilon(losses, runs, delta + sign * noise) for sign in (1, -1))
        estimates[removing] = low, estimated_epsilon(losses, runs, delta), high
    low, middle, high = map(max, zip(*estimates.values(), strict=True))
    print(f"{runs} runs: {middle:.5f} ({low:.5f} to {high:.5f}), accountant {found:.5f}")
    assert low <= found
    assert found <= (1.01 * middle if runs == 10**7 else 1.01 * high)


def test_privacy_loss_distributions_stay_below_moments_and_rise_with_them():
    """Both rise with the rate and with the number of records; the moments' bound is larger."""
    run = Schedule.constant(200)
    for multiplier, delta in ((1.2, 1e-5), (4.0, 1e-7)):
        grid = [(rate, records) for rate in (0.005, 0.02) for records in (1, 2, 5, 15)]
        of = {
            accountant: np.array(
                [
                    accountant.epsilon(rate, multiplier, run, delta, records=records)
                    for rate, records in grid
                ]
            )
            for accountant in (pld, rdp)
        }
        assert (of[pld] <= of[rdp]).all()
        assert (of[rdp] <= 2.5 * of[pld]).all()
        for found in of.values():
            table = found.reshape(2, 4)
            assert (np.diff(table, axis=0) > 0).all()
            assert (np.diff(table, axis=1) > 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_records_shared_with_stricter_owners_cost_no_more(seed):
    """A record with several owners has a smaller rate and a shorter contribution than the pair."""
    generator = np.random.default_rng(seed)
    rate, multiplier, records = 0.3, 2.0, 5
    rates = rate * generator.uniform(0, 1, records)
    lengths = generator.uniform(0, 1, records)
    epsilon = pld.epsilon(rate, multiplier, Schedule.constant(1), 1e-3, records=records)
    drawn = np.array(list(itertools.product([0, 1], repeat=records)))
    masses = np.prod(np.where(drawn == 1, rates, 1 - rates), axis=1)
    shifts = drawn @ lengths  # all in the same direction: the worst case

    def delta(removing):
        def excess(x):
            mixed = float(masses @ norm.pdf(x, shifts, multiplier))
            base = float(norm.pdf(x, 0, multiplier))
            first, second = (mixed, base) if removing else (base, mixed)
            return max(first - math.exp(epsilon) * second, 0.0)

        ends = -10 * multiplier, records + 10 * multiplier
        return quad(excess, *ends, limit=2000, points=np.linspace(*ends, 40)[1:-1])[0]

    assert max(delta(True), delta(False)) <= 1e-3


@pytest.mark.parametrize("order", [1.5, 3.0, 12.0, -2.5])
@pytest.mark.parametrize(("rate", "multiplier", "records"), [(0.05, 1.0, 6), (0.4, 4.0, 20)])
def test_moments_agree_with_adaptive_integration(order, rate, multiplier, records):
    pair = OwnerPair.whole(multiplier, rate, records)
    found = float(pair.log_moments(rate, np.array([order]))[0])
    drawn = np.arange(records + 1)
    log_masses = binom.logpmf(drawn, records, rate)
    ends = -14 * multiplier - 40 * max(0, -order), max(order, 1) * records + 14 * multiplier

    def log_integrand(x):
        log_ratio = np.logaddexp.reduce(log_masses + (drawn * x - drawn**2 / 2) / multiplier**2)
        return order * log_ratio - 0.5 * (x / multiplier) ** 2

    top = max(log_integrand(x) for x in np.linspace(*ends, 4001))
    total = quad(
        lambda x: math.exp(log_integrand(x) - top), *ends, limit=5000,
        points=np.linspace(*ends, 200)[1:-1],
    )[0]  # fmt: skip
    expected = top + math.log(total / (multiplier * math.sqrt(2 * math.pi)))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("rate", "multiplier", "records"), [(0.05, 0.7, 6), (0.02, 30.0, 90)])
def test_moments_of_many_orders_are_those_of_each_order(rate, multiplier, records):
    """Low orders are integrated over a part of the range that high orders need."""
    pair = OwnerPair.whole(multiplier, rate, records)
    orders = np.concatenate([-np.geomspace(0.02, 64, 30), np.geomspace(0.02, 900, 40)])
    together = pair.log_moments(rate, orders)
    alone = [float(pair.log_moments(rate, orders[at : at + 1])[0]) for at in range(len(orders))]
    assert together == pytest.approx(alone, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize(
    ("steps", "rate", "multiplier", "records"),
    [(2000, 0.005, 60.0, 100), (200, 0.02, 0.8, 4), (2, 0.2, 3.0, 6)],
)
def test_the_grid_of_the_reference_overstates_by_little(steps, rate, multiplier, records):
    run, exposure = RunCost(Schedule.constant(steps)), Exposure(rate, multiplier)
    target = run.epsilon(exposure, 1e-6, records)
    found = reference.epsilon(run, exposure, 1e-6, target, records)
    finer = reference.epsilon(run, exposure, 1e-6, target / 4, records)
    assert finer * (1 - 1e-6) <= found <= finer * (1 + reference.OWNER_OVERSTATEMENT)


def test_owners_just_off_the_curve_keep_their_own_figure():
    """With little noise, the case of several drawn records decides, however rare it is."""
    rates, multipliers = np.geomspace(1e-5, 4e-5, 60), np.exp(-3e-4 * np.arange(60.0))
    off = np.arange(60) % 7 == 3
    multipliers = np.minimum.accumulate(multipliers * np.exp(-7.5e-5 * off))
    run, records = Schedule.constant(100), np.full(60, 5)
    everyone = accounting.epsilon(rates, multipliers, run, 1e-9, records=records)
    for at in np.flatnonzero(off):
        alone = pld.epsilon(float(rates[at]), float(multipliers[at]), run, 1e-9, records=5)
        assert alone * (1 + 9e-4) <= everyone[at] <= alone * (1 + 1.1e-3)  # rounded up by 1e-3


def test_tails_are_moved_up_and_never_lost():
    for rate, records in ((0.001, 5000), (0.01, 168), (0.4, 30), (0.3, 40_000)):
        whole = OwnerPair.whole(1.0, rate, records)
        assert whole.shifts[-1] >= records
        masses = np.exp(whole.log_masses)
        assert masses.sum() >= 1 - 1e-12
        for at in whole.shifts[:: max(1, len(whole.shifts) // 20)]:  # stochastically larger
            above = masses[whole.shifts > at].sum()
            assert above >= binom.sf(at, records, rate) * (1 - 1e-9) - 1e-15
        most = most_drawn(rate, records, 1e-9)
        assert binom.sf(most, records, rate) <= 1e-9
        cut = OwnerPair.cut(1.0, rate, records, most)
        assert np.exp(cut.log_masses).sum() == pytest.approx(1.0, abs=2e-9)


@pytest.mark.parametrize("accountant", [pld.epsilon, rdp.epsilon])
def test_the_figure_grows_with_records_rate_and_steps_and_falls_with_noise(accountant):
    base = accountant(0.02, 2.0, Schedule.constant(200), DELTA, records=5)
    assert base < accountant(0.02, 2.0, Schedule.constant(200), DELTA, records=6)
    assert base < accountant(0.021, 2.0, Schedule.constant(200), DELTA, records=5)
    assert base < accountant(0.02, 2.0, Schedule.constant(220), DELTA, records=5)
    assert base > accountant(0.02, 2.1, Schedule.constant(200), DELTA, records=5)
    assert base < accountant(0.02, 2.0, Schedule.constant(200), DELTA / 3, records=5)


@pytest.mark.parametrize("accountant", [pld.epsilon, rdp.epsilon])
def test_all_records_in_every_step_are_one_gaussian(accountant):
    together = accountant(1.0, 60.0, Schedule.constant(50), DELTA, records=6)
    assert together == accountant(1.0, 10.0, Schedule.constant(50), DELTA)
    assert accountant(0.0, 2.0, Schedule.constant(50), DELTA, records=6) == 0.0


def test_releases_cost_as_many_times_as_there_are_records():
    """A Gaussian release joins the gradient; sums after training change by K shares."""
    release = RunCost(Schedule.constant(100), release=PaidRelease(3.0))
    joint = accounting.joint_multiplier(2.0, 3.0 / 0.5)
    expected = pld.epsilon(0.02, float(joint), Schedule.constant(100), DELTA, records=7)
    assert release.epsilon(Exposure(0.02, 2.0, 0.5), DELTA, 7) == expected
    closing = RunCost(Schedule.constant(0), closing=ClosingRelease(20.0, 4))
    alone = pld.epsilon(0.0, 1.0, Schedule.constant(0), DELTA, closing=20.0 / (2 * 7 * 0.5))
    assert closing.epsilon(Exposure(0.02, 2.0, closing=0.5), DELTA, 7) == alone


def test_laplace_releases_use_group_privacy():
    """Safe: above the same run with Gaussian noise of the same std, which costs less."""
    run = RunCost(Schedule.constant(50), release=PaidRelease(8.0, "laplace"))
    gaussian = dataclasses.replace(run, release=PaidRelease(8.0))
    exposure = Exposure(0.02, 4.0)
    for records in (2, 4):
        bound = run.epsilon(exposure, DELTA, records)
        assert bound > gaussian.epsilon(exposure, DELTA, records)
        one = bound / records  # the formula: K records cost (K e, d (exp(K e) - 1) / (exp(e) - 1))
        least = DELTA * math.expm1(one) / math.expm1(bound)
        assert run.epsilon(exposure, least) <= one * 1.001
    assert group_epsilon(lambda delta: 60.0, DELTA, 2) == math.inf


def test_group_privacy_is_above_the_owner_pair():
    one = RunCost(Schedule.constant(300))
    exposure = Exposure(0.01, 2.0)
    for records in (2, 5):
        loose = group_epsilon(lambda d: one.epsilon(exposure, d), DELTA, records)
        assert loose > one.epsilon(exposure, DELTA, records)


def for_owners(records, rates=0.01, multipliers=2.0, run=None, **options):
    records = np.asarray(records)
    run = run or RunCost(Schedule.constant(200))
    parts = [np.broadcast_to(np.asarray(part, float), records.shape) for part in
             (rates, multipliers, 1.0, 1.0)]  # fmt: skip
    delta = np.full(records.shape, DELTA)
    per_record = accounting.epsilon(parts[0], parts[1], run, delta)
    return owner_epsilon(run, parts, records, delta, per_record, **options), per_record


def test_one_record_costs_what_the_record_costs():
    found, per_record = for_owners([0, 1, 1, 3])
    assert found[:3].tolist() == per_record[:3].tolist()
    assert found[3] > 3 * per_record[3]


def test_equal_owners_share_a_figure_and_each_keeps_their_own():
    """Pitfall 12: figures follow owners in any order."""
    records = np.array([5, 2, 9, 2, 5, 1])
    found, _ = for_owners(records)
    again, _ = for_owners(records[::-1])
    assert found.tolist() == again[::-1].tolist()
    assert found[0] == found[4]
    assert found[1] == found[3]
    assert found[1] == pld.epsilon(0.01, 2.0, Schedule.constant(200), DELTA, records=2)


def test_many_distinct_owners_are_rounded_to_the_unfavourable_side():
    generator = np.random.default_rng(1)
    records = generator.integers(1, 60, 20_000)
    rates = generator.uniform(0.001, 0.01, 20_000)
    found, _ = for_owners(records, np.sort(rates), 2.0)
    rates = np.sort(rates)
    for at in generator.choice(len(records), 15):
        if records[at] == 1:
            continue
        exact = pld.epsilon(
            float(rates[at]), 2.0, Schedule.constant(200), DELTA, records=int(records[at])
        )
        assert exact <= found[at] * (1 + 1e-9)
        assert found[at] < 1.6 * exact


def test_figures_above_100_are_infinite_and_unknown_ones_are_not_a_number():
    found, _ = for_owners([2, 400, 4000], 0.05, 1.0)
    assert np.isfinite(found[0])
    assert found[1] == found[2] == math.inf
    parts = [np.array([1e-4]), np.array([0.01]), np.ones(1), np.ones(1)]  # hardly any noise
    with pytest.raises(AccountingError, match="noise multiplier"):
        pld.epsilon(1e-4, 0.01, RUN, DELTA, records=3)
    unknown = owner_epsilon(RunCost(RUN), parts, np.array([3]), np.array([DELTA]), np.array([1.0]))
    assert np.isnan(unknown[0])


def test_batches_that_may_overflow_take_part_of_delta():
    plain, _ = for_owners([3])
    some, _ = for_owners([3], overflow=lambda k: 0.3 * DELTA)
    assert some[0] > plain[0]
    none, _ = for_owners([3], overflow=lambda k: 0.8 * DELTA)
    assert np.isnan(none[0])


def test_group_privacy_too_pays_for_batches_with_more_records_than_fit():
    """Batches may overflow if more records are drawn than `overflow` was asked about."""
    run = RunCost(Schedule.constant(20), release=PaidRelease(8.0, "laplace"))
    asked = []
    stated, _ = for_owners([400], 0.002, 8.0, run, overflow=lambda k: asked.append(k) or 0.0)
    beyond = 20 * binom.sf(asked[0], 400, 0.002)
    exposure = Exposure(0.002, 8.0)
    assert beyond > 0
    assert stated[0] >= run.epsilon(exposure, DELTA - beyond, 400)
