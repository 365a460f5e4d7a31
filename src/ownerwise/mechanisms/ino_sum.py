"""INO-SGM: a single noisy ordered sum of bounded vectors, for use outside training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ownerwise import accounting
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.ino import INO
from ownerwise.processes import release_problems
from ownerwise.randomness import Noise, SecretStream, grid_of

_ROUNDING = 1e-4  # fraction of a sensitivity reserved for rounding in the sum itself


@dataclass(frozen=True)
class InoSum:
    """A released sum and its privacy cost.

    Attributes:
        value: the noisy ordered sum.
        noise_std: standard deviation of the noise.
        private: False if the noise came from a fixed seed.
    """

    value: np.ndarray
    noise_std: float
    private: bool

    def epsilon(
        self, sensitivity: np.ndarray | float, delta: np.ndarray | float, sampling_rate: float = 1.0
    ) -> np.ndarray:
        """Return the epsilon of records that have this sensitivity and this sampling rate."""
        multiplier = self.noise_std / np.asarray(sensitivity, dtype=np.float64)
        return accounting.epsilon(sampling_rate, multiplier, 1, delta)

    def __repr__(self) -> str:
        kind = "private" if self.private else "NOT PRIVATE: fixed seed"
        return f"InoSum({self.value!r}, noise_std={self.noise_std:g}, {kind})"


def ino_sum(
    values: np.ndarray,
    scores: np.ndarray,
    sensitivities: np.ndarray,
    tail: INO | float,
    noise_std: float,
    *,
    stream: SecretStream | None = None,
) -> InoSum:
    """Release a weighted sum of per-record vectors with Gaussian noise.

    The records with the highest scores have weight 1.

    Formal guarantee (INO-SGD, Theorem 3.4): adding or removing record i changes the sum by at most
    `sensitivities[i]`, so the record's privacy cost is that of one Gaussian mechanism with noise
    multiplier `noise_std / sensitivities[i]`, or of the Poisson-subsampled mechanism if records are
    sampled (see `InoSum.epsilon`). The tail, `noise_std` and each record's sensitivity are public.
    A record's value and score may depend only on that record. The number of records is not
    released. Of several processes that run one script, only the first may call this.

    Args:
        values: one vector (or number) per record, [records, ...]; the norm of each vector is
            clipped to its record's sensitivity.
        scores: one score per record; NaN ranks last.
        sensitivities: bound on the norm of each record's vector. Vectors are clipped slightly
            below it, to allow for rounding: by 1e-4 of the bound, and by the grid of the noise.
        tail: tail length in units of sensitivity, or an `INO` object that has a tail length.
        noise_std: standard deviation of the noise on each entry of the sum.
        stream: secret randomness; by default a new private stream.
    """
    if (stream is None or stream.private) and (problems := release_problems("ino_sum")):
        raise OwnerwiseError(problems)
    values = np.asarray(values, dtype=np.float64)
    bounds = np.asarray(sensitivities, dtype=np.float64)
    if values.ndim == 0 or bounds.shape != values.shape[:1]:
        raise ValueError(
            f"values have shape {values.shape}, and sensitivities have shape {bounds.shape}; "
            "expected one row and one sensitivity per record"
        )
    ino = tail if isinstance(tail, INO) else INO(tail_length=float(tail))
    order = np.nan_to_num(np.asarray(scores, dtype=np.float64), nan=-np.inf)
    weights = ino.weights_of_scores(order, bounds)
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    lengths = np.linalg.norm(flat, axis=1)
    finite = np.isfinite(lengths)
    grid = grid_of(noise_std)  # public: it does not depend on which records there are
    room = grid * math.sqrt(flat.shape[1])  # what rounding to the grid can add to a change
    limits = np.maximum(bounds * (1 - _ROUNDING) - room, 0.0)
    scale = np.where(finite, np.minimum(1.0, limits / np.where(lengths > 0, lengths, 1.0)), 0.0)
    total = (weights * scale) @ np.where(finite[:, None], flat, 0.0)
    noise = Noise(stream, purpose="ino sum")
    (noised,) = noise.gaussian(0, [torch.from_numpy(total)], noise_std, grid)
    return InoSum(noised.numpy().reshape(values.shape[1:]), float(noise_std), noise.private)
