"""Mechanisms of one's own plug in from outside: weights with state, a rule, a paid release."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import CLIPPING_RULES, WEIGHTS, Cells, ClippingRule, Release, Weights
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)


class Halved(Weights):
    """Every record has the weight 1/2; counts the batches it has seen."""

    def __init__(self):
        self.batches = 0

    def weights(self, losses, clip_norms, owner_index):
        self.batches += 1
        return np.full(len(losses), 0.5)

    def score_slack(self, roundoff):
        return 0.0

    def state(self):
        return {"batches": self.batches}

    def load_state(self, state):
        self.batches = state["batches"]


class ClassesByCell(Release):
    """Counts the records of each class in two cells, and remembers the noised counts."""

    shape = (2, 3)

    def __init__(self):
        self.last = None

    def contributions(self, outputs, targets):
        return Cells(functional.one_hot(targets, 3).double(), targets % 2)

    def process(self, noised):
        self.last = noised
        return noised.sum()

    def record(self):
        return None if self.last is None else {"counts": self.last.tolist()}


class Whole(ClippingRule):
    """Scales every gradient to its clip norm."""

    def factors(self, norms, clip_norms, stream):
        return clip_norms / norms.clamp(min=1e-6)


def make_step(weights, release):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    received = []

    def loss(outputs, targets, released):
        received.append(released)
        return functional.cross_entropy(outputs, targets, reduction="none")

    step = tools.make_step(
        model, loss, plan=tools.make_plan(release_std=4.0), weights=weights, release=release,
        clipping=Whole(), not_private=True,
    )  # fmt: skip
    return step, received


def test_weights_rule_and_release_of_ones_own_work_together(tmp_path):
    weights, release = Halved(), ClassesByCell()
    step, received = make_step(weights, release)
    inputs, targets = torch.randn(12, 4), torch.arange(12) % 3
    step(tools.batch_of(inputs, targets))
    clips = step.plan.clip_norms[step.peek.owner_index] / (1 + step.slack)
    np.testing.assert_allclose(step.peek.factors * step.peek.norms, 0.5 * clips, rtol=1e-5)
    assert release.record()["counts"] == step.release.last.tolist()
    assert torch.equal(received[0], step.release.last.sum())
    noise = step.release.last * (1 + 1e-3) - torch.tensor([[4.0, 0, 4], [0, 4, 0]])
    assert float(noise.abs().max()) < 6 * 4.0  # six standard deviations; the seed is fixed
    step.save(tmp_path)
    again, _ = make_step(other := Halved(), ClassesByCell())
    again.restore(tmp_path)
    assert other.batches == weights.batches == 1


def test_settings_and_state_have_defaults():
    assert Whole().settings() == {"kind": "Whole"}
    assert Whole().state() == {}
    assert Whole().steering(tools.make_plan()) is None
    assert Whole.from_settings().settings() == Whole().settings()


@pytest.mark.parametrize(
    ("plug", "name", "registry"),
    [
        (ow.INO(tail=0.3, width=1.0), "ino", WEIGHTS),
        (ow.INO(tail_length=3.0, alpha=2.0, score_by=ow.BudgetAware(2.0)), "ino", WEIGHTS),
        (ow.Psac(0.3), "psac", CLIPPING_RULES),
        (ow.ImportanceSampling(acceptance=0.4), "importance", CLIPPING_RULES),
    ],
)
def test_a_plug_is_made_again_from_its_settings(plug, name, registry):
    assert registry.make({**plug.settings(), "kind": name}) == plug


def test_settings_that_do_not_determine_the_weights_are_refused():
    with pytest.raises(ow.OwnerwiseError, match="ino has no option score"):
        WEIGHTS.make({"kind": "ino", "tail": 0.3, "score": "Own"})


@pytest.mark.parametrize("name", ["weights", "clipping", "release"])
@pytest.mark.parametrize("given", [object(), "ino", ow.INO])
def test_a_plug_of_the_wrong_kind_is_named(name, given):
    with pytest.raises(ow.OwnerwiseError, match=f"{name}=.*expected an object, such as"):
        tools.make_step(nn.Linear(4, 3), functional.cross_entropy, **{name: given})


def test_a_record_moves_a_release_into_cells_by_at_most_one():
    from ownerwise.mechanisms import sum_of_unit_rows

    rows = 3 * torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    rows[4] = torch.nan
    index = torch.arange(9) % 2

    def total(kept):
        cells = Cells(rows[kept], index[kept])
        return sum_of_unit_rows([cells], [slice(0, len(kept))], (2, 3))

    whole = total(list(range(9)))
    for out in range(9):
        moved = whole - total([at for at in range(9) if at != out])
        assert float(moved.norm()) <= 1 + 1e-12
