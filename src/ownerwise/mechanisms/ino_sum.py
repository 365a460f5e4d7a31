"""INO-SGM: one noisy ordered sum of bounded vectors, outside of any training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ownerwise import accounting
from ownerwise.mechanisms.ino import INO
from ownerwise.randomness import (
    Noise,
    SecretStream,
)


@dataclass(frozen=True)
class InoSum:
    """A released sum, and what it costs.

    Attributes:
        value: the noisy ordered sum.
        noise_std: std of its noise.
        private: False if the noise came from a fixed seed.
    """

    value: np.ndarray
    noise_std: float
    private: bool

    def epsilon(
        self, sensitivity: np.ndarray | float, delta: np.ndarray | float, rate: float = 1.0
    ) -> np.ndarray:
        """Return epsilon of records with this sensitivity, if drawn with probability `rate`."""
        multiplier = self.noise_std / np.asarray(sensitivity, dtype=np.float64)
        return accounting.epsilon(rate, multiplier, 1, delta)

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
    """Release the sum of per-record vectors, the highest scores in full, with Gaussian noise.

    Formal guarantee (INO-SGD, Theorem 3.4): adding or removing record i moves the sum by at most
    `sensitivities[i]`, so the release costs it what one Gaussian mechanism with noise multiplier
    `noise_std / sensitivities[i]` costs; after Poisson sampling, the sampled one (`epsilon` of the
    result). Public: tail, noise_std, and each record's sensitivity. A record's value and score may
    depend on that record alone. Not a release of how many records there were.

    Args:
        values: one vector (or number) per record, [records, ...]; cut to its sensitivity.
        scores: one per record; the highest count in full. NaN ranks last.
        sensitivities: bound on the length of each record's vector.
        tail: length of the tail in units of sensitivity, or an INO with `tail_length`.
        noise_std: std of the noise on every number of the sum.
        stream: secret randomness; a private one if not given.
    """
    values = np.asarray(values, dtype=np.float64)
    bounds = np.asarray(sensitivities, dtype=np.float64)
    if values.ndim == 0 or bounds.shape != values.shape[:1]:
        raise ValueError(
            f"values of shape {values.shape} and {bounds.shape} sensitivities; expected one row "
            "and one sensitivity per record"
        )
    ino = tail if isinstance(tail, INO) else INO(tail_length=float(tail))
    weights = ino.weights(np.asarray(scores, dtype=np.float64), bounds)
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    lengths = np.linalg.norm(flat, axis=1)
    finite = np.isfinite(lengths)
    scale = np.where(finite, np.minimum(1.0, bounds / np.where(lengths > 0, lengths, 1.0)), 0.0)
    total = (weights * scale) @ np.where(finite[:, None], flat, 0.0)
    noise = Noise(stream, purpose="ino sum")
    extra = noise.gaussian(0, noise_std, [torch.from_numpy(total)])[0].numpy()
    return InoSum((total + extra).reshape(values.shape[1:]), float(noise_std), noise.private)
