"""What the tests of the private step share: plans, batches, models, and the loop over records."""

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import (
    Batch,
)
from ownerwise.randomness import Noise, grid_of
from ownerwise.step.rounding import GRID_TOLERANCE

SEED = 5
RECORDS = 60


def one_thread():
    """A fixture: tiny models on busy machines wait for threads most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def double_on_one_thread():
    """A fixture: equality is shown in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield from one_thread()
    torch.set_default_dtype(before)


@cache
def owners() -> ow.Owners:
    return ow.Owners(np.arange(RECORDS) % 3, {0: 1.0, 1: 2.0, 2: 4.0})


@cache
def make_plan(**options) -> ow.Plan:
    settings = {"method": "scale", "steps": 6, "batch_size": 12, "clip_norm": 1.0, **options}
    return ow.plan(owners(), **settings)


def seeded(seed: int = SEED) -> ow.SecretStream:
    return ow.SecretStream.from_seed(seed)


def batch_of(inputs, targets, step: int = 0, indices=None) -> Batch:
    """A batch made by hand, of chosen records (the first ones if not given)."""
    first = inputs
    while not isinstance(first, Tensor):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    indices = np.arange(len(first)) if indices is None else np.asarray(indices, dtype=np.int64)
    owner_index = owners().record_owner_index[indices].astype(np.int64)
    return Batch(step, indices, owner_index, (inputs, targets))


def make_step(model, loss, *, plan=None, optimizer=None, seed=SEED, **options) -> ow.PrivateStep:
    """A step of a run with a fixed seed, by plain SGD if no optimizer is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer is None else optimizer
    plan = make_plan() if plan is None else plan
    return ow.PrivateStep(model, plan, optimizer, loss, stream=seeded(seed), **options)


def run_steps(step, data, steps, *, seed, folder=None, restore=False) -> None:
    """Take a run's steps up to the number given: from a checkpoint if asked, and up to one."""
    if restore:
        step.restore(folder)
    start = step.steps_spent
    for batch in ow.PoissonBatches(
        data, step.plan, stream=seeded(seed), start=start, steps=steps - start
    ):
        step(batch)
    if folder is not None:
        step.save(folder)


def weights_of(model: nn.Module) -> Tensor:
    """All numbers of a model's parameters in a row, float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def flat(sums: dict) -> Tensor:
    return torch.cat([total.double().flatten() for total in sums.values()])


def noised(sums, plan, step=0, seed=SEED, clip_scale=1.0) -> list[Tensor]:
    """The sums with the noise that a run with this seed adds in this step, on the same grid."""
    std = plan.noise_std_at(step) * clip_scale
    numbers = sum(total.numel() for total in sums)
    grid = grid_of(std, numbers, GRID_TOLERANCE * clip_scale * float(plan.clip_norms.min()))
    return Noise(seeded(seed)).gaussian(step, sums, std, grid)


def noise_of(model, plan, step=0, seed=SEED, clip_scale=1.0) -> list[Tensor]:
    """The noise that a run with this seed adds to the sum in this step, drawn again."""
    zeros = [torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return noised(zeros, plan, step, seed, clip_scale)


def release_noise(seed, step, like, std=4.0) -> Tensor:
    """The noise of a release in this step, drawn again."""
    grid = grid_of(std, like.numel(), GRID_TOLERANCE)
    noise = Noise(seeded(seed), purpose="release")
    return noise.gaussian(step, [torch.zeros_like(like)], std, grid)[0]


def loop_over_records(model, loss, batch, step, weights=None) -> list[Tensor]:
    """The weighted sum of clipped gradients, one record at a time through autograd.

    Clip norms are those of the step: the plan's, less what it keeps free for rounding.
    """
    clip_norms = step.plan.clip_norms / (1 + step.slack)
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p) for p in parameters]
    inputs, targets = batch.data
    for i in range(len(batch)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1])
        gradients = torch.autograd.grad(value, parameters)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        factor = min(1.0, clip_norms[batch.owner_index[i]] / float(norm))
        factor *= 1.0 if weights is None else weights[i]
        for total, gradient in zip(totals, gradients, strict=True):
            total += factor * gradient
    return totals


class CoupledRows:
    """Random rows that records keep when another one leaves."""

    def __init__(self, rows, removed=None):
        order = np.random.default_rng(5).permutation(rows)
        self._order = order if removed is None else np.delete(order, removed)
        self._rows = rows

    def words(self, count):
        ranks = np.full(self._rows, self._rows, dtype=np.uint64)
        ranks[self._order] = np.arange(len(self._order), dtype=np.uint64)
        return ranks[:count]


class ByRank(ow.mechanisms.Weights):
    """Weights that need the whole batch: 1 for the largest losses, down to 1/2 for the least.

    Not within the sensitivity bound (that is INO's art): it only shows what the step hands out.
    """

    def __init__(self):
        self.plan = None

    def bind(self, plan):
        bound = ByRank()
        bound.plan = plan
        return bound

    def score_slack(self, roundoff):
        return 0.0

    def weights(self, losses, clip_norms, owner_index):
        assert self.plan is not None
        assert losses.shape == owner_index.shape == clip_norms.shape
        scores = np.nan_to_num(losses, nan=-np.inf) * self.plan.clip_norms[owner_index]
        ranks = np.empty(len(scores))
        ranks[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
        return 1 - 0.5 * ranks / len(scores)


class CountClasses(ow.mechanisms.Release):
    """A release: how much of the batch the model puts into each class (softmax has length <= 1)."""

    shape = (3,)

    def contributions(self, outputs, targets):
        return functional.softmax(outputs, dim=1)


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.recurrent = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0].mean(dim=1))


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.layer(tokens + self.place).mean(dim=1))


def mlp(inputs=4, classes=3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, classes))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def example(kind: str, records: int = 11) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with inputs and class labels, all from fixed seeds."""
    torch.manual_seed(3)
    inputs = {
        "mlp": lambda: 3 * torch.randn(records, 4),
        "cnn": lambda: torch.randn(records, 2, 6, 6),
        "text": lambda: torch.randint(0, 20, (records, 5)),
        "transformer": lambda: torch.randn(records, 4, 8),
    }[kind]()
    labels = torch.randint(0, 3, (records,))
    model = {"mlp": mlp, "cnn": cnn, "text": TextModel, "transformer": TransformerModel}[kind]()
    return model, inputs, labels
