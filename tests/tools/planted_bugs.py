"""Bugs that are planted into the product's code, to see whether an audit catches them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise.batches.sampler import PoissonSampler
from ownerwise.mechanisms import IndividualFilter
from ownerwise.mechanisms.ino import INO
from ownerwise.processes import Processes
from ownerwise.randomness import Noise
from ownerwise.step import model_passes
from ownerwise.step.batch_weights import BatchWeights
from ownerwise.step.clipped_sums import ClippedSums
from ownerwise.step.private_step import PrivateStep
from ownerwise.step.run_randomness import RunRandomness
from ownerwise.step.secret_rows import Rows

LAX = 3.0
"""The epsilon of the group that the bugs of a single group affect; the other group has 1."""

STEPS, OWNERS = 40, 2000


def make_plan(unit: str = "record", **options) -> ow.Plan:
    """Return a plan with two groups of owners, with epsilon 1 and 3."""
    names = np.arange(OWNERS)
    budgets = {int(name): (1.0, LAX)[name % 2] for name in names}
    each = 3 if unit == "owner" else 1
    owners = ow.Owners(np.repeat(names, each), budgets, 1e-5)
    if options.get("method") != "individual":  # which uses all records in every step
        options["batch_size"] = 200
    return ow.plan(owners, unit=unit, steps=STEPS, **options)


def noise_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Noise.gaussian

    def gaussian(self, step, sums, std, *further, **options):
        return real(self, step, sums, std / 2, *further, **options)

    monkeypatch.setattr(Noise, "gaussian", gaussian)


def clip_ignored_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClippedSums._limits

    def limits(self, rows):
        found = real(self, rows).copy()
        found[self.plan.targets[rows.owner_index] == LAX] = 1e6
        return found

    monkeypatch.setattr(ClippedSums, "_limits", limits)


def top_mu_instead_of_ino(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records with the highest scores count fully, up to a fixed total clip norm."""

    def weights_of_scores(self, scores, clip_norms, width=0.0):
        order = np.argsort(-scores, kind="stable")
        weights = np.zeros(len(scores))
        weights[order] = np.cumsum(clip_norms[order]) <= self.tail_length
        return weights

    monkeypatch.setattr(INO, "weights_of_scores", weights_of_scores)


def same_noise_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step uses the noise of the step before it."""
    real = Noise._made_ahead

    def made_ahead(self, step, size, spread):
        new = real(self, step, size, spread)
        if step % 2 == 0:
            self.last = new
        return self.last

    monkeypatch.setattr(Noise, "_made_ahead", made_ahead)


def rate_doubled_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PoissonSampler.__init__

    def init(self, sampling_rates, record_owner_index):
        rates = np.array(sampling_rates)
        rates[rates == rates.min()] *= 2
        real(self, rates, record_owner_index)

    monkeypatch.setattr(PoissonSampler, "__init__", init)


def batches_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are slices of a shuffled order, accounted for as Poisson batches."""
    real = PoissonSampler.draw

    def draw(self, stream):
        if not hasattr(self, "order"):
            self.size = max(1, len(real(self, stream)))
            self.order = np.random.default_rng(self.size).permutation(len(self.record_owner_index))
        self.order = np.roll(self.order, self.size)
        return np.sort(self.order[: self.size])

    monkeypatch.setattr(PoissonSampler, "draw", draw)


def same_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step takes the batch of the step before it, with new noise."""
    real = PoissonSampler.draw

    def draw(self, stream):
        self.turn = not getattr(self, "turn", False)
        if self.turn:
            self.last = real(self, stream)
        return self.last

    monkeypatch.setattr(PoissonSampler, "draw", draw)


def divisor_from_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noised sum is divided by the realised number of records."""
    clipped_sum, noised = PrivateStep.clipped_sum, RunRandomness.noised

    def with_count(self, batch, randomness=None):
        self._randomness.count = max(1, len(batch))
        return clipped_sum(self, batch, randomness)

    def divided(self, step, sums, clip_scale, factor):
        return noised(self, step, sums, clip_scale, 1 / self.count)

    monkeypatch.setattr(PrivateStep, "clipped_sum", with_count)
    monkeypatch.setattr(RunRandomness, "noised", divided)


def rows_of_an_owner_clipped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(batch, rows, stream, declared=None):
        inputs, targets = batch.data
        return Rows(inputs, targets, batch.owner_index, total=len(batch))

    monkeypatch.setattr(model_passes, "place", place)


def retired_records_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter charges records, but admits them all."""
    real = IndividualFilter.admit

    def admit(self, members, lengths):
        return np.ones_like(real(self, members, lengths))

    monkeypatch.setattr(IndividualFilter, "admit", admit)


def noise_by_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process adds noise of its own before the sums are added."""
    real = Noise.gaussian

    def gaussian(self, step, sums, std, *further, **options):
        return real(self, step, sums, std * math.sqrt(Processes.here().count), *further, **options)

    monkeypatch.setattr(Noise, "gaussian", gaussian)


def noise_by_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process expects another one to add the noise."""
    real = Noise.gaussian

    def gaussian(self, step, sums, std, grid, factor=1.0, like=None, overwrite=False):
        noised = real(self, step, sums, std, grid, factor, like)
        if not Processes.here().several:
            return noised
        return [total.to(part) * factor for total, part in zip(sums, noised, strict=True)]

    monkeypatch.setattr(Noise, "gaussian", gaussian)


def share_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of the last of several processes are lost."""
    _exchange(monkeypatch, lambda processes: not 0 < processes.rank == processes.count - 1)


def mean_instead_of_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes' sums are averaged, as gradients are in plain training."""
    _exchange(monkeypatch, lambda processes: 1 / processes.count)


def _exchange(monkeypatch: pytest.MonkeyPatch, factor: Callable[[Processes], float]) -> None:
    """Multiply what each process sends by a factor."""
    real = Processes.summed

    def summed(self, work, like, dtype=torch.float64):
        return real(self, lambda: [part * factor(self) for part in work()], like, dtype)

    monkeypatch.setattr(Processes, "summed", summed)


def weights_of_each_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process weights its own share of the batch as if it were the whole batch."""
    real = BatchWeights.of

    def weights_of(self, batch, losses):
        if (share := batch.share) is None:
            return real(self, batch, losses)
        weights = np.zeros(len(share))
        for rank in range(share.processes.count):
            own, owners = share.of == rank, share.owner_index[share.of == rank]
            clip_norms = self._plan.clip_norms[owners]
            weights[own] = self._weights.weights(losses[own], clip_norms, owners)
        return weights

    monkeypatch.setattr(BatchWeights, "of", weights_of)


BUGS = {
    noise_halved: ({}, {}),
    clip_ignored_for_a_group: ({}, {}),
    top_mu_instead_of_ino: ({}, {"weights": INO()}),
    same_noise_twice: ({}, {}),
    rate_doubled_for_a_group: ({}, {}),
    divisor_from_the_batch: ({}, {}),
    batches_of_fixed_size: ({"method": "uniform"}, {}),
    same_batch_twice: ({}, {}),
    rows_of_an_owner_clipped_one_by_one: ({"unit": "owner"}, {}),
    retired_records_take_part: ({"method": "individual", "clipped_steps": 30}, {}),
}
"""Each bug with the plan's options, and the step's."""

BUGS_OF_PROCESSES = {
    noise_by_every_process: {},
    noise_by_no_process: {},
    share_dropped: {},
    mean_instead_of_sum: {},
    weights_of_each_share: {"weights": INO()},
}
"""Bugs that show in several processes only, each with the step's options."""
