"""Check at every step that user-defined clipping rules and releases treat records separately.

See `step.separation` for the method and the tolerance. The rules and releases in this package are
proven to treat records separately, so they are not called a second time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.gradients.separation import in_float64, rows_agree, rows_at, separate
from ownerwise.mechanisms import Cells, ClippingRule, Closing, Contributions, Release
from ownerwise.mechanisms.plugs import unit_rows
from ownerwise.randomness import StepStream
from ownerwise.step.separation import MOST_ROUNDINGS, ROOM, ROUNDINGS, TREAT_APART, choose, others

_FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps


def checked_factors(
    rule: ClippingRule,
    norms: Tensor,
    clips: Tensor,
    records: int,
    stream: StepStream | None,
    parts: StepStream,
) -> Tensor:
    """Return the factors of a user-defined rule, or raise an error if it mixes records.

    Args:
        rule: the rule.
        norms, clips: finite gradient norms and clip norms of the micro-batch.
        records: number of records in the whole batch.
        stream: random numbers for a randomised rule; the check itself draws none.
        parts: secret random numbers used to choose the part to check.
    """
    drawn = None if stream is None else Replay(stream, len(norms))

    def factors(rows: Tensor, norms: Tensor, clips: Tensor) -> Tensor:
        at = rows.to(norms.device)
        numbers: Any = None if drawn is None else drawn.of(rows)
        return rule.factors(norms[at], clips[at], numbers)

    given: Any = drawn
    found = rule.factors(norms, clips, given)
    if len(norms) < 2 or found.shape != norms.shape:
        return found
    index = choose(len(norms), len(norms), parts)
    at = index.to(norms.device)
    share, roundoff = ROOM / records, torch.finfo(norms.dtype).eps

    def agree(whole: Tensor, part: Tensor, share: float) -> bool:
        lengths = norms[at].to(whole.dtype)
        pair = (whole[at] * lengths)[:, None], (part * lengths)[:, None]
        return rows_agree(*pair, share * float(clips.min()))

    def exact() -> tuple[Tensor, Tensor]:
        wide = norms.double(), clips.double()
        return factors(torch.arange(len(norms)), *wide), factors(index, *wide)

    pair = found, factors(index, norms, clips)
    if not separate(
        agree, pair, exact, share,
        rounded=MOST_ROUNDINGS * roundoff, fallback=ROUNDINGS * roundoff,
    ):  # fmt: skip
        raise OwnerwiseError(
            f"{type(rule).__name__}: the factor of a record changes with the other records in its "
            "batch, " + TREAT_APART.format("factor")
        )
    return found


class Replay:
    """The random numbers of a step, drawn for a user-defined rule and replayed for some records.

    The numbers are drawn from the stream once. The replay is used only for the comparison.
    """

    def __init__(self, stream: StepStream, rows: int):
        self._stream = stream
        self._rows = rows
        self._drawn: list[np.ndarray] = []

    def words(self, count: int) -> np.ndarray:
        """Return uniform 64-bit words, uint64 [count]."""
        return self._noted(self._stream.words(count))

    def uniforms(self, count: int) -> np.ndarray:
        """Return multiples of 2^-53, uniform on [0, 1), float64 [count]."""
        return self._noted(self._stream.uniforms(count))

    def integers(self, high: int, count: int) -> np.ndarray:
        """Return integers in {0, ..., high - 1}, int64 [count]."""
        return self._noted(self._stream.integers(high, count))

    def _noted(self, numbers: np.ndarray) -> np.ndarray:
        self._drawn.append(numbers)
        return numbers.copy()

    def of(self, index: Tensor) -> _Replayed:
        """Return a replay of the numbers that were drawn for these rows."""
        return _Replayed(self._drawn, self._rows, index.numpy())


class _Replayed:
    def __init__(self, drawn: list[np.ndarray], rows: int, index: np.ndarray):
        self._drawn = iter(drawn)
        self._rows = rows
        self._index = index

    def words(self, count: int) -> np.ndarray:
        numbers = next(self._drawn, np.zeros(0))
        each = count // len(self._index)
        if count % len(self._index) or len(numbers) != each * self._rows:
            raise OwnerwiseError(
                "a randomised clipping rule must draw the same number of random numbers for every "
                "record, with each call covering all records: stream.uniforms(len(norms))"
            )
        return numbers.reshape(self._rows, each)[self._index].ravel()

    uniforms = words

    def integers(self, high: int, count: int) -> np.ndarray:
        return self.words(count)


def checked_contributions(
    release: Release | Closing,
    outputs: Any,
    targets: Any,
    rows: int,
    share: float,
    stream: StepStream,
    *,
    absolute: bool,
) -> Contributions:
    """Return a user-defined release's contributions, or refuse a release that mixes records.

    A part of the micro-batch is computed before the whole, and the other records after it. If both
    came after it, a release that remembers the largest output so far would treat them as it treated
    the whole.

    Args:
        release: the user's release.
        outputs, targets: outputs and targets of the micro-batch.
        rows: number of records in the micro-batch.
        share: largest allowed change in a contribution, whose norm is at most 1.
        stream: secret random numbers used to choose the part to check.
        absolute: whether contributions are clipped in the L1 norm instead of the L2 norm.
    """
    if rows < 2:
        return release.contributions(outputs, targets)

    def unit(found: Contributions) -> Tensor:
        if not isinstance(found, Cells):
            return unit_rows(found, absolute=absolute)
        clipped = unit_rows(found.rows, absolute=absolute)
        return torch.cat([clipped, found.index[:, None].to(clipped)], dim=1)

    def of_part(part: Tensor) -> Tensor:
        return unit(release.contributions(*rows_at((outputs, targets), part, rows)))

    first = choose(rows, rows, stream)
    before = of_part(first)
    contributions = release.contributions(outputs, targets)
    values = contributions.rows if isinstance(contributions, Cells) else contributions
    if not values.dim() or len(values) != rows:
        return contributions  # `sum_of_unit_rows` refuses them
    whole = unit(contributions)
    rest = others(rows, first)
    roundoff = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    for index, part in ((first, before), (rest, of_part(rest))):
        at = index.to(whole.device)

        def exact(index: Tensor = index, at: Tensor = at) -> tuple[Tensor, Tensor]:
            part = in_float64(rows_at((outputs, targets), index, rows))
            exact_whole = release.contributions(*in_float64((outputs, targets)))
            return unit(exact_whole)[at], unit(release.contributions(*part))

        pair = whole[at], part
        if not separate(
            rows_agree, pair, exact, share,
            rounded=MOST_ROUNDINGS * roundoff,
            fallback=ROUNDINGS * min(roundoff, _FLOAT32_ROUNDOFF),
        ):  # fmt: skip
            raise OwnerwiseError(
                f"{type(release).__name__}: the contribution of a record changes with the other "
                "records in its batch, " + TREAT_APART.format("contribution")
            )
    return contributions
