"""Many linear heads on fixed features, trained at once by the private algorithm of a plan.

An attack by membership inference needs hundreds of models. All of them share the features, so the
heads of many models are stacked into one tensor, and a step of all of them is a few matrix
products. The arithmetic is that of the private step (a test compares the two): Poisson batches at
the owners' rates, per-record clipping, weights over the batch, one noised sum, a constant divisor.
The models are meant for attacks: their noise is not from a secret stream, so they are NOT private.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.batches.sampler import PoissonSampler
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import ClippingRule, Standard, Weights
from ownerwise.planning import Plan
from ownerwise.randomness import SecretStream

AT_ONCE = 16
"""Number of models that are trained together: their batches fit in the cache."""


class Heads:
    """Linear classifiers on fixed features, and the private algorithm that trains them.

    Args:
        features: features of all records, [records, features].
        labels: their classes, [records].
        plan: the plan; it samples records and accounts for the gradients alone.
        lr: learning rate.
        weights, clipping: as for `PrivateStep`.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        plan: Plan,
        *,
        lr: float,
        weights: Weights | None = None,
        clipping: ClippingRule | None = None,
    ):
        rule = Standard() if clipping is None else clipping
        problems = _plan_problems(plan)
        if rule.randomised:
            problems.append(f"{type(rule).__name__} is randomised: train models one by one instead")
        if len(features) != len(labels):
            problems.append(f"{len(features)} features for {len(labels)} labels: expected as many")
        if problems:
            raise OwnerwiseError(problems)
        assert plan.owners is not None
        self.inputs = functional.pad(features, (0, 1), value=1.0)  # the last column is the bias
        self.labels = labels
        self.classes = int(labels.max()) + 1
        self.plan = plan
        self.lr = lr
        self.clipping = rule
        self.weights = None if weights is None else weights.bind(plan)
        self.owner = np.asarray(plan.owners.record_owner_index)
        self._sampler = PoissonSampler(plan.holders.sampling_rates, self.owner)
        self._clip_norms = plan.holders.clip_norms[self.owner]

    def train(self, included: np.ndarray, stream: SecretStream) -> Tensor:
        """Return the trained heads, [models, features + 1, classes].

        Args:
            included: which records each model is trained on, [models, records].
            stream: where batches and the seeds of the noise come from.
        """
        chunks = [slice(at, at + AT_ONCE) for at in range(0, len(included), AT_ONCE)]
        trained = [self._train(included[c], stream.child(f"models {c.start}")) for c in chunks]
        return torch.cat(trained)

    def _train(self, included: np.ndarray, stream: SecretStream) -> Tensor:
        heads = self.inputs.new_zeros(len(included), self.inputs.shape[1], self.classes)
        batches = stream.child("sampling")
        seed = int(stream.child("noise").at_step(0).integers(2**62, 1)[0])
        noise = torch.Generator().manual_seed(seed)
        for step in range(self.plan.steps):
            draws = batches.at_step(step)
            drawn = [self._sampler.draw(draws) for _ in included]
            drawn = [rows[kept[rows]] for rows, kept in zip(drawn, included, strict=True)]
            sums = self.clipped_sums(heads, drawn)
            std = self.plan.noise_std_at(step)
            sums += std * torch.randn(sums.shape, generator=noise, dtype=sums.dtype)
            heads -= (self.lr / self.plan.expected_batch_size) * sums
        return heads

    def clipped_sums(self, heads: Tensor, drawn: list[np.ndarray]) -> Tensor:
        """Return each model's weighted sum of clipped gradients over its batch."""
        rows = np.zeros((len(drawn), max(1, *map(len, drawn))), dtype=np.int64)
        present = np.zeros(rows.shape, dtype=bool)
        for at, batch in enumerate(drawn):
            rows[at, : len(batch)] = batch
            present[at, : len(batch)] = True
        index = torch.from_numpy(rows)
        inputs, labels = self.inputs[index], self.labels[index]
        outputs = torch.bmm(inputs, heads)
        errors = outputs.softmax(dim=2)
        losses = -errors.gather(2, labels[..., None])[..., 0].log()
        errors.scatter_add_(2, labels[..., None], -torch.ones_like(errors[..., :1]))
        norms = errors.norm(dim=2) * inputs.norm(dim=2)
        limits = torch.from_numpy(self._clip_norms[rows]).to(norms)
        factors = self.clipping.factors(norms, limits, None) * torch.from_numpy(present)
        if self.weights is not None:
            factors *= self._weights(losses, drawn).to(factors)
        return torch.bmm(inputs.transpose(1, 2), errors * factors[..., None])

    def _weights(self, losses: Tensor, drawn: list[np.ndarray]) -> Tensor:
        assert self.weights is not None
        weights = np.zeros(losses.shape)
        of_models = losses.double().numpy()
        for at, batch in enumerate(drawn):
            owner = self.owner[batch]
            clip_norms = self.plan.holders.clip_norms[owner]
            values = self.weights.weights(of_models[at, : len(batch)], clip_norms, owner)
            weights[at, : len(batch)] = values
        return torch.from_numpy(weights)

    def confidences(self, heads: Tensor) -> np.ndarray:
        """Return log p - log(1 - p) of every record's own class, float64 [models, records]."""
        return np.stack(list(self._confidences(heads)))

    def _confidences(self, heads: Tensor) -> Iterator[np.ndarray]:
        for head in heads:
            outputs = (self.inputs @ head).double()
            own = outputs.gather(1, self.labels[:, None])
            others = outputs.scatter(1, self.labels[:, None], -torch.inf)
            yield (own[:, 0] - others.logsumexp(dim=1)).numpy()


def _plan_problems(plan: Plan) -> list[str]:
    """Return what in a plan stacked heads do not do."""
    problems = []
    if plan.owners is None or plan.owners.record_owner_index is None:
        problems.append("the plan has no owners with records")
    if plan.sampling != "record" or plan.hardened_rows is not None:
        problems.append("stacked heads need a plan that samples records and is not hardened")
    if plan.release_std is not None or plan.closing_std is not None:
        problems.append("stacked heads make no further releases, but the plan accounts for one")
    return problems
