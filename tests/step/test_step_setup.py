"""What may be given to a private step: models, optimizers, inputs; and what is refused."""

import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import Refused
from ownerwise.mechanisms import (
    sum_of_unit_rows,
)
from tools import step_tools as tools

cross_entropy = functional.cross_entropy


_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "groups": lambda ps: torch.optim.SGD(
        [{"params": ps[:2], "lr": 0.1}, {"params": ps[2:], "lr": 0.01, "momentum": 0.5}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_optimizers_see_the_noised_mean_and_nothing_else(name, frozen):
    """Three steps equal the same optimizer fed by hand from the loop over records (pitfall 19)."""
    model, inputs, labels = tools.example("mlp")
    first = next(iter(model.parameters()))
    first.requires_grad_(not frozen)
    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    by_hand = OPTIMIZERS[name](list(plain.parameters()))
    if frozen:
        first.grad = torch.ones_like(first)  # left over from the user's own doings
    step = tools.make_step(model, cross_entropy, optimizer=optimizer)
    for number in range(3):
        batch = tools.batch_of(inputs, labels, number)
        sums = tools.loop_over_records(plain, cross_entropy, batch, step)
        sums = tools.noised(sums, step.plan, number)
        trained = [p for p in plain.parameters() if p.requires_grad]
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = total / step.plan.expected_batch_size
        by_hand.step()
        step(batch)
    torch.testing.assert_close(tools.weights_of(model), tools.weights_of(plain), rtol=0, atol=1e-9)


def test_the_model_stays_an_ordinary_module():
    """No wrapper, hook, attribute or gradient is left, and what was there is untouched."""
    model, inputs, labels = tools.example("cnn")
    names, entries = list(model.state_dict()), [set(vars(m)) for m in model.modules()]
    attributes = [set(vars(p)) for p in model.parameters()]
    step = tools.make_step(
        model, cross_entropy, weights=tools.ByRank(), performance=ow.Performance(micro_batch_size=4)
    )
    step(tools.batch_of(inputs, labels))
    assert list(model.state_dict()) == names
    assert [set(vars(m)) for m in model.modules()] == entries
    assert [set(vars(p)) for p in model.parameters()] == attributes
    assert all(p.grad is None and p.is_leaf and p.requires_grad for p in model.parameters())
    for module in model.modules():
        assert not any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))
    assert model.training
    copy.deepcopy(model)(inputs).sum().backward()


def test_freezing_and_thawing_between_steps():
    """Pitfall 19: who is frozen stays, who thaws is clipped and noised with the rest."""
    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy)
    bias = dict(model.named_parameters())["0.bias"]
    for number, trained in enumerate((True, False, True)):
        bias.requires_grad_(trained)
        before = bias.detach().clone()
        batch = tools.batch_of(inputs, labels, number)
        sums = tools.loop_over_records(model, cross_entropy, batch, step)
        found = [total for p, total in step.clipped_sum(batch).items() if p.requires_grad]
        for one, other in zip(found, sums, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        step(batch)
        assert torch.equal(bias, before) != trained


def test_all_problems_are_listed_at_once():
    """House rule 5: of the model, the optimizer, the loss and the arguments, with remedies."""
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Embedding(3, 3, max_norm=1.0), nn.Linear(8, 2)
    )
    foreign = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model[0].parameters(), foreign], lr=0.1)
    loss = nn.CrossEntropyLoss()
    loss.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ow.OwnerwiseError) as caught:
        ow.PrivateStep(
            model, tools.make_plan(), optimizer, loss, release=tools.CountClasses(),
            performance=ow.Performance(micro_batch_size=0),
        )  # fmt: skip
    text = str(caught.value)
    assert len(caught.value.problems) == 7
    for part in (
        "nn.LayerNorm(8), or nn.GroupNorm(2, 8) on [records, 8, length]", "without max_norm",
        "parameters that do not belong to the model (1 of them)",
        "the optimizer lacks the trainable parameters 1.weight, 1.bias, 2.weight and 2 more",
        "temperature", "the plan does not account for a release",
        "micro_batch_size=0",
    ):  # fmt: skip
        assert part in text


def test_optimizers_that_need_a_closure_are_refused():
    model, _, _ = tools.example("mlp")
    with pytest.raises(ow.OwnerwiseError, match="LBFGS"):
        tools.make_step(model, cross_entropy, optimizer=torch.optim.LBFGS(model.parameters()))


def test_batch_norm_works_in_eval_mode_and_only_there():
    """Running statistics are constants then; a later train() is refused, not obeyed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    inputs, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
    batch = tools.batch_of(inputs, labels)
    step = tools.make_step(model, cross_entropy)
    expected = tools.loop_over_records(model, cross_entropy, batch, step)
    for found, total in zip(step.clipped_sum(batch).values(), expected, strict=True):
        torch.testing.assert_close(found, total, rtol=0, atol=1e-9)
    step(batch)
    assert not model.training
    model.train()
    with pytest.raises(Refused, match="batch"):
        step(tools.batch_of(inputs, labels, 1))


def test_a_step_inside_no_grad_trains_all_the_same():
    """Pitfall 31: no silent step without gradients."""
    model, inputs, labels = tools.example("mlp")
    batch = tools.batch_of(inputs, labels)
    for size in (None, 4):
        step = tools.make_step(
            model, cross_entropy, performance=ow.Performance(micro_batch_size=size)
        )
        expected = tools.flat(step.clipped_sum(batch))
        with torch.no_grad():
            found = tools.flat(step.clipped_sum(batch))
        assert float(expected.norm()) > 0.1
        torch.testing.assert_close(found, expected)


class Standardised(nn.Module):
    """Mixes the records ahead of the first parameter, where no gradient shows it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer((x - x.mean(dim=0)) / x.std(dim=0))


class Accumulated(Standardised):
    def forward(self, x):
        return self.layer(x.cumsum(dim=0))


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Standardised, lambda out, y: (out - y).square()),
        (Accumulated, lambda out, y: (out - y).square()),
        (lambda: nn.Linear(4, 1), lambda out, y: (out - y[:, 0]).square()),  # [B, B]
        (lambda: nn.Linear(4, 3), lambda out, y: (out - y).square().sum(1) / y.abs().max()),
        (lambda: nn.Linear(4, 3), lambda out, y: (out - y).square().softmax(dim=0)),
    ],
)
@pytest.mark.parametrize("size", [None, 3])
def test_records_that_mix_are_refused(model, loss, size):
    """A loss that other records change has no bounded influence, whatever is clipped."""
    torch.manual_seed(0)
    model = model()
    step = tools.make_step(model, loss, performance=ow.Performance(micro_batch_size=size))
    before = tools.weights_of(model)
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        step(tools.batch_of(torch.randn(9, 4), torch.randn(9, 3)))
    assert torch.equal(tools.weights_of(model), before)


class Nested(nn.Module):
    """Takes what a tokenizer gives and returns more than logits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        tokens, mask = inputs["tokens"], inputs["more"].mask
        hidden = (self.embedding(tokens) * mask[..., None]).sum(dim=1)
        return self.head(hidden), hidden


More = namedtuple("More", ["mask", "unused"])


@pytest.mark.parametrize("size", [None, 3])
def test_nested_inputs_outputs_and_targets(size):
    torch.manual_seed(0)
    model = Nested()
    tokens, mask = torch.randint(0, 20, (8, 5)), torch.rand(8, 5)
    labels, other = torch.randint(0, 3, (8,)), torch.randn(8, 6)

    def loss(outputs, targets):
        logits, hidden = outputs
        fit = functional.mse_loss(hidden, targets["hidden"], reduction="none").mean(dim=1)
        return cross_entropy(logits, targets["label"], reduction="none") + fit

    inputs = {"tokens": tokens, "more": More(mask, [torch.zeros(8)])}
    batch = tools.batch_of(inputs, {"label": labels, "hidden": other})
    step = tools.make_step(model, loss, performance=ow.Performance(micro_batch_size=size))
    total = tools.flat(step.clipped_sum(batch))
    singles = torch.zeros_like(total)
    for i in range(8):
        rows = slice(i, i + 1)
        one = {"tokens": tokens[rows], "more": More(mask[rows], [torch.zeros(1)])}
        targets = {"label": labels[rows], "hidden": other[rows]}
        gradients = torch.autograd.grad(loss(model(one), targets).sum(), list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in gradients])
        limit = step.plan.clip_norms[i % 3] / (1 + step.slack)
        singles += gradient * min(1.0, limit / float(gradient.norm()))
    torch.testing.assert_close(total, singles, rtol=0, atol=1e-9)
    step(batch)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(9, 4), torch.zeros(9, 3)), "tensors with more or fewer rows than"),
        ((torch.zeros(6, 4), {"a": torch.zeros(6), "b": torch.zeros(())}), "fewer rows than"),
        (((torch.zeros(6, 4), torch.eye(4)), torch.zeros(6)), "fewer rows than records"),
        ((torch.zeros(6, 4), ["a"] * 6), "a batch contains a str"),
        ((torch.zeros(6, 4),), r"contains a tuple of length 1; expected \(inputs, targets\)"),
        (torch.zeros(6, 4), r"a batch contains a Tensor; expected \(inputs, targets\)"),
    ],
)
def test_data_without_one_row_per_record_is_refused(data, message):
    """Pitfall 33: padding rows, and tables that the records share."""
    step = tools.make_step(nn.Linear(4, 3), functional.mse_loss)
    with pytest.raises(ow.OwnerwiseError, match=message):
        step(ow.Batch(0, np.arange(6), np.zeros(6, dtype=np.int64), data))


def test_a_release_of_another_shape_is_refused_without_the_number_of_records():
    for rows in (torch.ones(23, 2), torch.ones(22, 3)):
        with pytest.raises(ow.OwnerwiseError, match=r"one row of shape \[3\]") as refusal:
            sum_of_unit_rows([rows], [slice(0, 23)], (3,))
        assert "2" not in str(refusal.value).replace("[2]", "")


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), None])
def test_weights_outside_of_0_and_1_are_refused(wrong):
    """Pitfall 23: a plug cannot exceed its bound through the step."""

    class Wrong(tools.ByRank):
        def bind(self, plan):
            return self

        def weights(self, losses, clip_norms, owner_index):
            return np.ones(3) if wrong is None else np.full(len(losses), wrong)

    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, cross_entropy, weights=Wrong())
    with pytest.raises(ow.OwnerwiseError, match=r"Wrong returned weights .* \[0, 1\]"):
        step(tools.batch_of(inputs, labels))


def test_each_run_has_one_root_stream():
    """Pitfall 15: two private steps on one stream would share their noise."""
    model, _, _ = tools.example("mlp")
    root, plan = ow.SecretStream(), tools.make_plan()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ow.PoissonBatches((torch.zeros(60, 4), torch.zeros(60)), plan, stream=root)
    ow.PrivateStep(model, plan, optimizer, cross_entropy, stream=root)
    with pytest.raises(RuntimeError, match="already in use"):
        ow.PrivateStep(model, plan, optimizer, cross_entropy, stream=root)
