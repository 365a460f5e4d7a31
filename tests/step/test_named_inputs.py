"""Inputs by name: a dict of tensors is passed to the model as keywords."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.marks import mark
from tools import step_tools
from tools import training_tools as tools


class Words(nn.Module):
    """Takes tokens and a mask, as transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, tokens, mask=None, **ignored):
        kept = torch.ones_like(tokens) if mask is None else mask
        words = self.table(tokens) * kept[:, :, None]
        return self.head(words.sum(1) / kept.sum(1, keepdim=True).clamp(min=1))


class Unnamed(Words):
    """Takes the whole dict."""

    def forward(self, batch):
        return super().forward(**batch)


def texts(records=120):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 20, (records, 5), generator=generator)
    lengths = torch.randint(1, 6, (records, 1), generator=generator)
    return {"tokens": tokens, "mask": (torch.arange(5) < lengths).long()}, tools.task()[1][:records]


class Encodings(Dataset):
    """Yields mappings that are not dicts, as tokenizers do."""

    def __init__(self, named, targets):
        self.named, self.targets = named, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, number):
        return {key: value[number] for key, value in self.named.items()}, self.targets[number]


def encoded(samples):
    names = samples[0][0].keys()
    named = UserDict({key: torch.stack([x[key] for x, _ in samples]) for key in names})
    return named, torch.stack([y for _, y in samples])


@pytest.mark.parametrize("model", [Words, Unnamed])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_sums_equal_the_loop_over_the_records(model, micro_batch_size):
    network = model().double()
    step = step_tools.make_step(
        network,
        functional.cross_entropy,
        performance=ow.Performance(micro_batch_size=micro_batch_size),
    )
    named, targets = texts(11)
    batch = step_tools.batch_of(named, targets)
    sums = step_tools.flat(step.clipped_sum(batch))
    expected = torch.zeros_like(sums)
    for number in range(11):
        row = {key: value[number : number + 1] for key, value in named.items()}
        loss = functional.cross_entropy(Words.forward(network, **row), targets[number : number + 1])
        back = torch.autograd.grad(loss, list(network.parameters()))
        gradient = torch.cat([g.flatten() for g in back])
        limit = step.plan.clip_norms[batch.owner_index[number]] / (1 + step.slack)
        expected += gradient * min(1.0, float(limit / gradient.norm()))
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-9)
    assert ow.check(network, named) == []


FORMS = {
    "dict": (lambda x, y: (x, y), {}),
    "other mapping": (lambda x, y: (UserDict(x), y), {}),
    "arrays": (lambda x, y: ({key: value.numpy() for key, value in x.items()}, y.numpy()), {}),
    "dataset": (Encodings, {}),
    "dataset, workers": (Encodings, {"num_workers": 1}),
    "collate": (Encodings, {"collate": encoded}),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_named_data_give_the_same_batches(form):
    make, options = FORMS[form]
    named, targets = texts()
    plan = tools.make_plan()
    for batch in ow.PoissonBatches(
        make(named, targets), plan, stream=step_tools.seeded(), steps=3, **options
    ):
        inputs, classes = batch.data
        assert type(inputs) is dict
        assert torch.equal(inputs["tokens"], named["tokens"][batch.indices])
        assert torch.equal(inputs["mask"], named["mask"][batch.indices])
        assert torch.equal(classes, targets[batch.indices])


@pytest.mark.parametrize("form", ["dict", "arrays", "dataset"])
@pytest.mark.parametrize("calibration", [None, ow.Calibration()])
def test_a_trainer_trains_evaluates_and_calibrates(form, calibration):
    plan = tools.make_plan(calibration=calibration)
    data = FORMS[form][0](*texts())
    model = Words()
    run = tools.make_trainer(model=model, plan=plan).fit(data, validation=data)
    other = Unnamed()
    expected = tools.make_trainer(model=other, plan=plan).fit(Encodings(*texts()), validation=data)
    for one, reference in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, reference)
    assert run.history[-1]["validation"] == expected.history[-1]["validation"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x, y: ({**x, "text": ["a"] * 120}, y), "contains str"),
        (lambda x, y: ({**x, "more": x["mask"][:7]}, y), r"has \[7, 120\] rows"),
        (lambda x, y: ({}, y), "rows"),
        (lambda x, y: (x, y[:0]), "rows"),
    ],
)
def test_mappings_with_something_else_are_refused(wrong, words):
    with pytest.raises(ow.OwnerwiseError, match=words):
        ow.PoissonBatches(wrong(*texts()), tools.make_plan())


def test_marks_are_found_in_mappings():
    """Pitfall 65."""
    named, targets = texts()
    mark(named["tokens"], "a reason")
    (batch, *_) = ow.PoissonBatches((named, targets), tools.make_plan())
    assert not batch.private
    run = ow.Trainer(Words(), tools.make_plan(), lr=0.5).fit((named, targets))
    assert not run.private
