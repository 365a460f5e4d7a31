"""Many small networks on fixed features, trained at once by the private algorithm of a plan.

An attack by membership inference needs hundreds of models. All of them share the features, so the
layers of many models are stacked into one tensor each, and a step of all of them is a few matrix
products. The arithmetic is that of the private step (a test compares the two): Poisson batches at
the owners' rates, per-record clipping, weights over the batch, one noised sum, a constant divisor.
The models are meant for attacks: their noise is not from a secret stream, so they are NOT private.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

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
    """Small classifiers on fixed features, and the private algorithm that trains them.

    Args:
        features: features of all records, [records, features].
        labels: their classes, [records].
        plan: the plan; it samples records and accounts for the gradients alone.
        lr: learning rate.
        hidden: sizes of the hidden layers, which are followed by tanh; by default none, so that the
            classifiers are linear.
        weights, clipping: as for `PrivateStep`.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        plan: Plan,
        *,
        lr: float,
        hidden: Sequence[int] = (),
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
        self.inputs = _with_bias(features)
        self.labels = labels
        self.classes = int(labels.max()) + 1
        self.sizes = [features.shape[1], *hidden, self.classes]
        self.plan = plan
        self.lr = lr
        self.clipping = rule
        self.weights = None if weights is None else weights.bind(plan)
        self.owner = np.asarray(plan.owners.record_owner_index)
        self._sampler = PoissonSampler(plan.holders.sampling_rates, self.owner)
        self._clip_norms = plan.holders.clip_norms[self.owner]

    def train(self, included: np.ndarray, stream: SecretStream) -> list[Tensor]:
        """Return the trained layers, each [models, inputs + 1, outputs].

        Args:
            included: which records each model is trained on, [models, records].
            stream: where batches and the seeds of the first layers and the noise come from.
        """
        chunks = [slice(at, at + AT_ONCE) for at in range(0, len(included), AT_ONCE)]
        trained = [self._train(included[c], stream.child(f"models {c.start}")) for c in chunks]
        return [torch.cat(parts) for parts in zip(*trained, strict=True)]

    def untrained(self, models: int, stream: SecretStream) -> list[Tensor]:
        """Return layers before training: normal, with the last one and all biases 0."""
        layers = [
            self.inputs.new_zeros(models, size + 1, following)
            for size, following in itertools.pairwise(self.sizes)
        ]
        seed = int(stream.child("first layers").at_step(0).integers(2**62, 1)[0])
        generator = torch.Generator().manual_seed(seed)
        for layer in layers[:-1]:
            layer[:, :-1].normal_(0.0, 1 / math.sqrt(layer.shape[1] - 1), generator=generator)
        return layers

    def _train(self, included: np.ndarray, stream: SecretStream) -> list[Tensor]:
        layers = self.untrained(len(included), stream)
        batches = stream.child("sampling")
        seed = int(stream.child("noise").at_step(0).integers(2**62, 1)[0])
        noise = torch.Generator().manual_seed(seed)
        for step in range(self.plan.steps):
            draws = batches.at_step(step)
            drawn = [self._sampler.draw(draws) for _ in included]
            drawn = [rows[kept[rows]] for rows, kept in zip(drawn, included, strict=True)]
            std = self.plan.noise_std_at(step)
            for layer, sums in zip(layers, self.clipped_sums(layers, drawn), strict=True):
                sums += std * torch.randn(sums.shape, generator=noise, dtype=sums.dtype)
                layer -= (self.lr / self.plan.expected_batch_size) * sums
        return layers

    def clipped_sums(self, layers: list[Tensor], drawn: list[np.ndarray]) -> list[Tensor]:
        """Return each model's weighted sum of clipped gradients over its batch, for each layer."""
        rows = np.zeros((len(drawn), max(1, *map(len, drawn))), dtype=np.int64)
        present = np.zeros(rows.shape, dtype=bool)
        for at, batch in enumerate(drawn):
            rows[at, : len(batch)] = batch
            present[at, : len(batch)] = True
        index = torch.from_numpy(rows)
        labels = self.labels[index]
        inputs, outputs = _forward(self.inputs[index], layers)
        errors = outputs.softmax(dim=2)
        losses = -errors.gather(2, labels[..., None])[..., 0].log()
        errors.scatter_add_(2, labels[..., None], -torch.ones_like(errors[..., :1]))
        of_layers = _backward(inputs, layers, errors)
        norms = sum(
            (error.norm(dim=2) * given.norm(dim=2)).square()
            for error, given in zip(of_layers, inputs, strict=True)
        )
        assert isinstance(norms, Tensor)
        norms = norms.sqrt()
        limits = torch.from_numpy(self._clip_norms[rows]).to(norms)
        factors = self.clipping.factors(norms, limits, None) * torch.from_numpy(present)
        if self.weights is not None:
            factors *= self._weights(losses, drawn).to(factors)
        return [
            torch.bmm(given.transpose(1, 2), error * factors[..., None])
            for given, error in zip(inputs, of_layers, strict=True)
        ]

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

    def confidences(self, layers: list[Tensor]) -> np.ndarray:
        """Return log p - log(1 - p) of every record's own class, float64 [models, records]."""
        return np.stack(list(self._confidences(layers)))

    def outputs(self, layers: list[Tensor], features: Tensor) -> Iterator[Tensor]:
        """Return each model's outputs for any records, [records, classes]."""
        inputs = _with_bias(features)[None]
        for model in range(len(layers[0])):
            yield _forward(inputs, [layer[model : model + 1] for layer in layers])[1][0]

    def _confidences(self, layers: list[Tensor]) -> Iterator[np.ndarray]:
        for outputs in self.outputs(layers, self.inputs[:, :-1]):
            outputs = outputs.double()
            own = outputs.gather(1, self.labels[:, None])
            others = outputs.scatter(1, self.labels[:, None], -torch.inf)
            yield (own[:, 0] - others.logsumexp(dim=1)).numpy()


def _with_bias(inputs: Tensor) -> Tensor:
    """Return inputs with a last column of ones."""
    return functional.pad(inputs, (0, 1), value=1.0)


def _forward(inputs: Tensor, layers: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of each layer, and the outputs of the last, [models, records, ...]."""
    given = [inputs]
    for layer in layers[:-1]:
        given.append(_with_bias(torch.bmm(given[-1], layer).tanh()))
    return given, torch.bmm(given[-1], layers[-1])


def _backward(inputs: list[Tensor], layers: list[Tensor], errors: Tensor) -> list[Tensor]:
    """Return the derivatives of each record's loss with respect to the outputs of each layer."""
    found = [errors]
    for layer, given in zip(layers[:0:-1], inputs[:0:-1], strict=True):
        back = torch.bmm(found[0], layer[:, :-1].transpose(1, 2))
        found.insert(0, back * (1 - given[..., :-1].square()))
    return found


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
