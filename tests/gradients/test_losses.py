"""Losses of texts, tokens, several labels, ordered classes and rankings within a record."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import Tape
from tools.record_loop import assert_equal, norms_of

LENGTH, WORDS = 5, 7


class Tokens(nn.Module):
    """A causal model with tied embeddings: scores of the next token."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.position = nn.Embedding(LENGTH, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).expand(len(ids), -1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        states = self.layer(self.words(ids) + self.position(places), mask, is_causal=True)
        return functional.linear(states, self.words.weight)


class Scores(nn.Module):
    """Five scores for each record."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 6)
        self.head = nn.Linear(6, LENGTH)

    def forward(self, ids):
        return self.head(self.words(ids).tanh())


def next_token(outputs, targets):
    following = targets[:, 1:]
    losses = functional.cross_entropy(
        outputs[:, :-1].transpose(1, 2), following, ignore_index=-100, reduction="none"
    )
    return losses.sum(dim=1) / (following != -100).sum(dim=1).clamp_min(1)


def each_token(outputs, targets):
    losses = functional.cross_entropy(
        outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )
    return losses.sum(dim=1)


def several_labels(outputs, targets):
    labels = (targets > 2).to(outputs)
    return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1)


def ordered_classes(outputs, targets):
    above = (targets[:, :1] > torch.arange(LENGTH)).to(outputs)
    return functional.binary_cross_entropy_with_logits(outputs, above, reduction="none").sum(1)


def ranking(outputs, targets):
    best = outputs.gather(1, targets[:, :1].clamp(0, LENGTH - 1))
    return -functional.logsigmoid(best - outputs).sum(dim=1)


CASES = [
    (Tokens, next_token),
    (Tokens, each_token),
    (Scores, several_labels),
    (Scores, ordered_classes),
    (Scores, ranking),
]


def data(records):
    ids = torch.randint(0, WORDS, (records, LENGTH))
    targets = ids.clone()
    targets[0, 3:] = -100  # padding
    targets[1:2] = -100  # a text without any target
    return ids, targets


def loop(model, ids, targets, loss):
    """{parameter: [records, *shape]} by autograd alone."""
    rows = [
        torch.autograd.grad(
            loss(model(ids[i : i + 1]), targets[i : i + 1]).sum(), list(model.parameters())
        )
        for i in range(len(ids))
    ]
    return {
        p: torch.stack(part)
        for p, part in zip(model.parameters(), zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize(("kind", "loss"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_gradients_are_those_of_single_records(kind, loss):
    model = kind()
    ids, targets = data(LENGTH)  # as many records as tokens
    expected = loop(model, ids, targets, loss)
    tape = Tape(model)
    with tape:
        outputs = model(ids)
    assert_equal(tape.backward(loss(outputs, targets)), expected)
    if loss in (next_token, each_token):
        assert norms_of(expected)[1] == 0


@pytest.mark.parametrize(("kind", "loss"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_step_accepts_them(kind, loss):
    model = kind()
    ids, targets = data(200)
    owners = ow.Owners([0] * 200, {0: 8.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=3, batch_size=50)
    step = ow.PrivateStep(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for batch in ow.PoissonBatches((ids, targets), plan):
        step(batch)
    assert step.steps_spent == 3


def test_a_mean_over_the_tokens_of_the_batch_is_refused():
    def over_the_batch(outputs, targets):
        return each_token(outputs, targets) / (targets != -100).sum()

    def contrast(outputs, targets):
        return -functional.log_softmax(outputs @ outputs.mT, dim=1).diagonal()

    ids, targets = data(200)
    owners = ow.Owners([0] * 200, {0: 8.0}, 1e-5)
    for kind, loss in ((Tokens, over_the_batch), (Scores, contrast)):
        model = kind()
        plan = ow.plan(owners, "uniform", steps=3, batch_size=50)
        step = ow.PrivateStep(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        batch = next(iter(ow.PoissonBatches((ids, targets), plan)))
        with pytest.raises(ow.OwnerwiseError, match=r"other records|mixes records"):
            step(batch)
