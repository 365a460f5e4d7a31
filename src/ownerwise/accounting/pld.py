"""Privacy loss distributions of the Poisson-subsampled Gaussian mechanism: the default accountant.

One step's privacy loss is placed on a grid by connecting the dots: each interval's mass is split
between its two endpoints so that its probability under both hypotheses is preserved. This can only
overstate the loss. T steps are composed by raising the Fourier transform of the distribution to the
power T, and epsilon is read off the hockey-stick curve. Epsilon is computed for both directions,
removing and adding a record, and the larger value is used.

Two techniques make the accountant fast, and tight even for the strictest owners. First, the width
of the grid adapts to the run: it is just fine enough to overstate epsilon by no more than about
1e-4 of its value, however small epsilon is. Second, the distribution is tilted exponentially
towards the losses that determine epsilon. As a result, a small delta is not lost in the rounding
errors of the Fourier transform, and a window of a few standard deviations is wide enough.

References: Koskela, Jalko, Honkela (2020) for Fourier accounting; Doroshenko, Ghazi, Kamath,
Kumar, Manurangsi (2022), "Connect the Dots", for the discretisation and its domination proof;
Zhu, Dong, Wang (2022) for the dominating pairs of Poisson sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import ndtri

from ownerwise.accounting.dominating_pairs import GaussianPair, LaplacePair, Pair
from ownerwise.accounting.owner_pair import OwnerPair, most_drawn
from ownerwise.accounting.rdp import Segment, convert, order_grid
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

OVERSTATEMENT = 1e-4
"""Intended relative overstatement of epsilon by the grid."""

LEAST_EPSILON = 1e-5
"""Smaller values are reported as this upper bound, which is below any realistic budget."""

OWNER_OVERSTATEMENT = 1e-3
"""The same for all records of an owner together."""

_SPARE = 1e-7  # fraction of delta reserved for each tail that is cut off
_OWNER_SPARE = 1e-4  # the same for the cases in which many records of an owner are drawn
_LOG_WIDEST_TAIL = np.log(1e-6)
_ROUNDING = 2e-16  # error of a Fourier transform per composed step
_MAX_ROUNDING = 1e-4  # relative to delta: about 1e-5 of epsilon
_HIGHEST_LOSS = 600.0  # exp stays finite, and no realistic epsilon is larger
_MAX_CELLS = 1 << 20
_ROUNDED_AWAY = 20.0  # expm1(-20) has 8 digits left of exp(-20)
_ORDER_SPACING = 1.15
_SMOOTH_STEPS = 20


def epsilon(
    sampling_rate: float,
    multiplier: float,
    schedule: Schedule,
    delta: float,
    *,
    closing: float = math.inf,
    laplace: float | None = None,
    records: int = 1,
) -> float:
    """Return epsilon at `delta` after the steps of `schedule` at (rate, multiplier).

    If `closing` is finite, a Gaussian mechanism with that multiplier, which uses all records,
    follows the last step. If `laplace` is given, every step also releases a sum with L1 sensitivity
    1 from the same batch, with Laplace noise of scale `laplace`. With `records` above 1, epsilon
    holds for that many records of one owner, added or removed together (without `laplace`).
    """
    pair = GaussianPair(multiplier) if laplace is None else LaplacePair(multiplier, laplace)
    if records > 1 and sampling_rate == 1.0:
        pair = GaussianPair(multiplier / records)
    elif records > 1 and sampling_rate > 0.0 and schedule.steps:
        tail = owner_tail(delta, schedule.steps)
        most = most_drawn(sampling_rate, records, tail)
        pair = OwnerPair.cut(multiplier, sampling_rate, records, most)
        delta -= schedule.steps * tail
    parts = [
        Segment(count, sampling_rate, pair.times(factor)) for count, factor in schedule.segments
    ]
    if sampling_rate == 0.0 or schedule.steps == 0:
        parts = []
    if closing < math.inf:
        parts.append(Segment(1, 1.0, GaussianPair(closing)))
    if not parts:
        return 0.0
    removed = _Direction(parts, delta, removing=True).epsilon()
    return _Direction(parts, delta, removing=False).epsilon(floor=removed)


def owner_tail(delta: float, steps: int) -> float:
    """Return the probability, per step, that more records of an owner are drawn than tabulated."""
    return _OWNER_SPARE * delta / steps


@dataclass(frozen=True)
class _Window:
    """The table of the composed loss: `cells` cells of width `width`, starting at cell `low`.

    The bounds on truncation and rounding errors hold for every epsilon above `least_epsilon`.
    """

    width: float
    low: int
    cells: int
    tilt: float
    least_epsilon: float


class _Direction:
    """The privacy loss of a whole run when the record is removed, or when it is added."""

    def __init__(self, parts: Sequence[Segment], delta: float, *, removing: bool):
        self.parts = parts
        self.total_steps = sum(part.steps for part in parts)
        self.delta = delta
        self.removing = removing
        of_owner = any(isinstance(part.pair, OwnerPair) for part in parts)
        self.overstatement = OWNER_OVERSTATEMENT if of_owner else OVERSTATEMENT
        highest = min(part.pair.highest_order(part.sampling_rate) for part in parts)
        positive = order_grid(highest, _ORDER_SPACING)
        self.tilts = np.concatenate([-positive[positive <= 64][::-1], [0.0], positive])
        self.zero = len(self.tilts) - len(positive) - 1
        orders = 1.0 + self.tilts if removing else -self.tilts
        self.cumulant = np.zeros_like(self.tilts)  # log E[exp(tilt * loss)] over the whole run
        for count, rate, pair in parts:
            self.cumulant += count * pair.log_moments(rate, orders)
        if not np.isfinite(self.cumulant).all():
            _, rate, pair = min(parts, key=lambda part: part.pair.multiplier)
            raise AccountingError(
                f"the moments at sampling rate {rate:g} and noise multiplier {pair.multiplier:g} "
                f"are not finite over {self.total_steps} steps; use a larger noise multiplier"
            )

    def epsilon(self, floor: float = 0.0) -> float:
        """Return epsilon, or `floor` if that is larger (epsilon is then not resolved further).

        The first grid is based on an upper bound on epsilon, computed from the moments. If that
        bound is far off, another grid is chosen. If the table cannot resolve delta, the bound is
        returned.
        """
        positive = self.tilts[self.zero + 1 :]
        bounds = convert(self.cumulant[self.zero + 1 :], positive, self.delta)
        best = int(np.argmin(bounds))
        order = 1.0 + float(positive[best])
        bound = max(float(bounds[best]), LEAST_EPSILON)
        spread = np.sqrt(max(2.0 * self.cumulant[self.zero + 1], 0.0)) / positive[0]
        estimate = max(bound, 0.1 * float(spread))
        while True:
            window = self._choose_window(estimate, order)
            if window is None:
                return max(bound, floor)
            epsilon, steepness = self._tabulate(window)
            if epsilon > window.least_epsilon:
                bound = min(epsilon, bound)
                if bound <= floor:
                    return floor
                fine_enough = 1.2 * self._width(epsilon, 1.0 + steepness)
                if window.width <= fine_enough or window.cells >= _MAX_CELLS:
                    return max(bound, floor)
                estimate, order = epsilon, 1.0 + steepness
                continue
            bound = min(bound, window.least_epsilon)
            if estimate <= LEAST_EPSILON or bound <= floor:
                return max(bound, floor)
            estimate = max(estimate / 8.0, LEAST_EPSILON)

    def _width(self, epsilon: float, order: float) -> float:
        """Return the cell width at which connecting the dots adds `overstatement` to epsilon.

        Cells of width w add about T w^2 order / 12, where the order is the one that determines
        delta. This holds only for longer runs, because the loss over a few steps is less smooth;
        runs with fewer than 20 steps get the width for 20 steps.
        """
        steps = max(self.total_steps, _SMOOTH_STEPS)
        return float(np.sqrt(12.0 * self.overstatement * epsilon / (steps * order)))

    def _choose_window(self, estimate: float, order: float) -> _Window | None:
        """Return a window based on the moments, or None if delta cannot be resolved."""
        tilts, cumulant = self.tilts, self.cumulant
        # Chernoff ranges of the loss for every tilt. Mass outside the range, and rounding errors,
        # enter delta multiplied by exp(cumulant - tilt * epsilon): keep them below a fraction
        # _SPARE of delta.
        least_epsilon = 0.4 * estimate
        log_tail = np.log(_SPARE * self.delta) - (cumulant - tilts * least_epsilon)
        log_rounding = np.log(_ROUNDING * max(self.total_steps, 10) * _SPARE) - log_tail
        ends = slice(self.zero, len(tilts) - 2)
        gaps = tilts - tilts[ends, None]  # [candidate tilts, tilts]
        tails = np.minimum(log_tail[ends], _LOG_WIDEST_TAIL)
        with np.errstate(divide="ignore"):
            bounds = (cumulant - cumulant[ends, None] - tails[:, None]) / gaps
        highs = np.where(gaps > 0, bounds, np.inf).min(axis=1)
        lows = np.where(gaps < 0, bounds, -np.inf).max(axis=1)
        excesses = np.maximum(0.0, log_rounding[ends] - np.log(_MAX_ROUNDING))
        at = int(np.argmin(np.log(highs - lows) + excesses))
        excess, low, high = float(excesses[at]), float(lows[at]), float(highs[at])
        tilt = float(tilts[self.zero + at])
        if excess > np.log(100.0) or high > _HIGHEST_LOSS:
            return None
        span = high - low
        width = max(self._width(estimate, order), span / _MAX_CELLS)
        start = int(np.floor(low / width))
        half = int(next_fast_len((int(np.ceil(high / width)) - start) // 2 + 2, real=True) or 0)
        return _Window(width, start, 2 * half, tilt, least_epsilon)

    def _tabulate(self, window: _Window) -> tuple[float, float]:
        """Compose all steps on the window's grid; return epsilon and -d log(delta)/d epsilon."""
        spectrum = np.ones(window.cells // 2 + 1, dtype=np.complex128)
        log_mass, cut = 0.0, 0.0
        tail = _SPARE * self.delta / self.total_steps
        for count, rate, pair in self.parts:
            if isinstance(pair, OwnerPair):
                most = min(window.cells, int(_HIGHEST_LOSS / window.width))
                index, upper, lower = pair.above(
                    window.width, -float(ndtri(tail)), most, removing=self.removing
                )
            else:
                index, upper, lower = _loss_above(
                    rate, pair, window.width, tail, removing=self.removing
                )
            mass = _connect_the_dots(index, upper, lower, window.width)
            beyond = float(upper[-1])
            cut += count * beyond
            # Work with mass * exp(tilt * loss), normalised.
            log_tilted = np.full(len(mass), -np.inf)
            np.log(mass, where=mass > 0, out=log_tilted)
            log_tilted += window.tilt * window.width * index
            peak = log_tilted.max()
            tilted = np.exp(log_tilted - peak)
            total = tilted.sum()
            log_mass += count * (peak + np.log(total))
            folded = np.bincount(index % window.cells, tilted / total, minlength=window.cells)
            spectrum *= _power(np.fft.rfft(folded), count)
        composed = np.roll(np.fft.irfft(spectrum, window.cells), -(window.low % window.cells))
        losses = window.width * (window.low + np.arange(window.cells))
        matters = losses > window.least_epsilon
        losses = losses[matters]
        masses = np.maximum(composed[matters], 0.0) * np.exp(log_mass - window.tilt * losses)
        return _read_epsilon(losses, masses, self.delta * (1 - 2 * _SPARE) - cut)


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Return values**exponent by repeated squaring (faster and more accurate than logarithms)."""
    result = None
    while exponent:
        if exponent & 1:
            result = values if result is None else result * values
        exponent >>= 1
        if exponent:
            values = values * values
    return np.ones_like(values) if result is None else result


def _loss_above(
    sampling_rate: float, pair: Pair, width: float, tail: float, *, removing: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (cell numbers, probabilities of a loss above each cell) for one step's loss.

    There are two probabilities: under the distribution from which the loss is drawn, and under the
    other one. L is the loss before sampling. If the record is removed, the step's loss rises with
    L, and L is drawn under (1-q) Q + q P. If it is added, the step's loss falls with L, and L is
    drawn under Q.
    """
    reach = -float(ndtri(tail))
    shift = 1.0 / pair.multiplier
    log_rest = np.log1p(-sampling_rate) if sampling_rate < 1 else -np.inf

    def loss(u: float, extra: float) -> float:
        before = shift * u - shift**2 / 2 + extra
        log_ratio = float(np.logaddexp(log_rest, np.log(sampling_rate) + before))
        return log_ratio if removing else -log_ratio

    ends = (-reach, reach + shift) if removing else (reach, -reach)
    extra = pair.bounded_loss if removing else -pair.bounded_loss
    low = int(np.floor(loss(ends[0], -extra) / width))
    high = int(np.ceil(loss(ends[1], extra) / width))
    index = np.arange(low, high + 1)
    edges = width * index
    # L at which the loss equals the edge; -inf if the loss never falls that low (rises that high)
    argument = np.expm1(edges if removing else -edges) / sampling_rate
    with np.errstate(divide="ignore"):
        crossing = np.log1p(np.maximum(argument, -1.0))
    if sampling_rate == 1 and not removing:  # far out, expm1 has rounded the crossing away
        crossing = np.where(edges > _ROUNDED_AWAY, -edges, crossing)
    if removing:
        base, other = pair.above(crossing)
    else:  # L < crossing; by symmetry Q(L < t) = P(L > -t)
        other, base = pair.above(-crossing)
    mixed = (1 - sampling_rate) * base + sampling_rate * other
    return (index, mixed, base) if removing else (index, base, mixed)


def _connect_the_dots(
    index: np.ndarray, upper: np.ndarray, lower: np.ndarray, width: float
) -> np.ndarray:
    """Return the mass in each cell; what lies beyond the last one is left out."""
    edges = width * index
    inside_upper = upper[:-1] - upper[1:]
    inside_lower = lower[:-1] - lower[1:]
    to_upper_end = (inside_upper - np.exp(edges[:-1]) * inside_lower) / -np.expm1(-width)
    to_upper_end = np.clip(to_upper_end, 0.0, inside_upper)
    mass = np.zeros(len(index))
    mass[:-1] += inside_upper - to_upper_end
    mass[1:] += to_upper_end
    mass[0] += 1.0 - upper[0]  # everything below the first edge is rounded up to it
    return mass


def _read_epsilon(losses: np.ndarray, masses: np.ndarray, delta: float) -> tuple[float, float]:
    """Return the smallest epsilon with E[(1 - exp(epsilon - loss))+] <= delta, and the steepness.

    `losses` contains only the losses above some level. If epsilon is below that level, so is the
    result, but it is not exact.
    """
    if delta <= 0:
        raise AccountingError("delta is too small for the tabulated loss; use accountant='rdp'")
    if not len(losses):
        return 0.0, 0.0
    above = np.cumsum(masses[::-1])[::-1]  # sum over this cell and all higher ones
    discounted = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    # delta at every grid point, from the cells strictly above it; it falls with the loss
    curve = np.append(above[1:], 0.0) - np.exp(losses) * np.append(discounted[1:], 0.0)
    cell = int(np.argmax(curve <= delta))  # epsilon lies below losses[cell]
    if above[cell] <= delta:
        return 0.0, 0.0
    epsilon = float(np.log((above[cell] - delta) / discounted[cell]))
    if not np.isfinite(epsilon) or epsilon > losses[cell] + 1e-9:
        raise AccountingError("no epsilon found on the privacy loss curve; use accountant='rdp'")
    return max(epsilon, 0.0), float(np.exp(epsilon) * discounted[cell] / delta)
