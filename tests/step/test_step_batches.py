"""What the private step asks of its batches and rules, and how dropout keeps to the guarantee."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import (
    Batch,
)
from tools.step_tools import RECORDS, batch_of, example, make_plan, one_thread, owners, seeded

one_thread = pytest.fixture(autouse=True)(one_thread)


def linear_step(plan, **options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, **options)


def data():
    return torch.randn(RECORDS, 2), torch.randint(0, 2, (RECORDS,))


def test_batches_of_another_plan_are_refused():
    """Pitfall 3: the rates that were drawn with are the rates that are accounted."""
    other = ow.plan(owners(), "uniform", steps=6, batch_size=12)
    step = linear_step(make_plan())
    with pytest.raises(ow.PlanError, match=r"drawn with plan .* the step accounts for plan"):
        step(next(iter(ow.PoissonBatches(data(), other))))
    assert step.steps_spent == 0


def test_what_is_no_batch_is_refused_before_a_step_is_spent():
    step = linear_step(make_plan())
    for rows in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data())):
        with pytest.raises(ow.OwnerwiseError, match=r"got a list; .*PoissonBatches"):
            step(rows)
        break
    assert step.steps_spent == 0


def test_batches_with_a_fixed_seed_make_the_run_not_private():
    """Pitfall 28: amplification needs batches that nobody knows."""
    step = linear_step(make_plan())
    assert step.private
    step(next(iter(ow.PoissonBatches(data(), make_plan(), stream=seeded()))))
    assert not step.private
    assert "NOT PRIVATE" in repr(step)


class Greedy(ow.mechanisms.ClippingRule):
    """A rule that clips to twice the clip norm."""

    randomised = False

    def factors(self, norms, clip_norms, stream):
        return 2 * clip_norms / norms


def test_a_foreign_rule_that_exceeds_the_clip_norm_is_refused():
    step = linear_step(make_plan(), clipping=Greedy())
    rows = tuple(part[:5] for part in data())
    batch = ow.Batch(0, np.arange(5), np.zeros(5, dtype=np.int64), rows)
    with pytest.raises(ow.OwnerwiseError, match="Greedy lets a record exceed its clip norm"):
        step(batch)


def test_with_equal_masks_dropout_keeps_to_the_sensitivity():
    """The claim of random_layers: given the masks, one record moves the sum by at most C.

    Masks are fixed per record here (the position is the record): 200 random pairs of batches.
    """
    torch.manual_seed(0)
    masks = torch.bernoulli(torch.full((RECORDS, 4), 0.5))
    weight = nn.Linear(2, 4)
    head = nn.Linear(4, 2)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = weight, head

        def forward(self, rows):  # the last column names the record, and thereby its mask
            hidden = torch.tanh(self.first(rows[:, :2])) * masks[rows[:, 2].long()]
            return self.second(hidden)

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_plan()
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, stream=seeded())
    rows = torch.cat([torch.randn(RECORDS, 2), torch.arange(RECORDS)[:, None]], dim=1)
    targets = torch.randint(0, 2, (RECORDS,))
    rng = np.random.default_rng(0)
    for _ in range(200):
        chosen = np.sort(rng.choice(RECORDS, 8, replace=False))
        gone = int(rng.integers(8))
        sums = []
        for members in (chosen, np.delete(chosen, gone)):
            index = torch.from_numpy(members)
            owner_index = owners().record_owner_index[members].astype(np.int64)
            batch = ow.Batch(0, members, owner_index, (rows[index], targets[index]))
            total = step.clipped_sum(batch)
            sums.append(torch.cat([t.flatten() for t in total.values()]))
        bound = plan.clip_norms[owners().record_owner_index[chosen[gone]]]
        assert float((sums[0] - sums[1]).norm()) <= bound * (1 + 1e-5)


def test_a_batch_made_by_hand_is_not_private():
    """Nobody knows how its records were chosen."""
    model, inputs, labels = example("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, make_plan(), optimizer, functional.cross_entropy)
    drawn = batch_of(inputs, labels)
    assert step.private
    step(Batch(0, drawn.indices, drawn.owner_index, drawn.data))
    assert not step.private
