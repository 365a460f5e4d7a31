"""Models of the transformers library, with padding and tied weights, against a float64 loop."""

import warnings

import pytest
import torch

from ownerwise.gradients import Tape, check
from tools.record_loop import assert_equal, averaged, norms_of, segments_of, wavy

pytest.importorskip("transformers", reason="pip install 'ownerwise[dev]'")
from tools.transformer_zoo import LENGTH, ZOO, loop, make

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries


def run(tape, batch, segments=None):
    with tape:
        outputs = tape.model(**batch)
    return tape.backward(wavy(outputs), segments)


@pytest.mark.parametrize("name", ZOO)
def test_per_record_gradients_are_those_of_a_loop(name):
    model, batch = make(name)
    expected = loop(model, batch, wavy)
    assert float(norms_of(expected).min()) > 1e-3
    tape = Tape(model)
    for _ in range(2):  # the second time with the layouts known
        assert_equal(run(tape, batch), expected)
    assert_equal(run(Tape(model, lean=True), batch), expected)
    assert_equal(run(tape, batch, segments_of(2, 1)), averaged(expected, [2, 1]))


@pytest.mark.parametrize("records", [1, 2, LENGTH, 2 * LENGTH])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart", "deberta-v2", "xlnet", "swin"])
def test_any_number_of_records(name, records):
    """As many records as tokens, or twice as many: no dimension is taken for another."""
    model, batch = make(name, records)
    assert_equal(run(Tape(model), batch), loop(model, batch, wavy))


ONE_PASS = [
    *("bert", "albert", "electra", "roberta", "distilbert", "fnet", "gpt2", "llama", "qwen2"),
    *("gemma", "mistral", "bart", "t5", "vit", "lora-gpt2", "lora-bert"),
]


@pytest.mark.parametrize("name", ONE_PASS)
def test_known_layouts_are_used_without_further_backward_passes(name):
    """Attention masks are made with constant indices, which move no records."""
    model, batch = make(name)
    tape = Tape(model)
    run(tape, batch)
    passes = []
    with tape:
        outputs = model(**batch)
    outputs.register_hook(passes.append)
    tape.backward(wavy(outputs))
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "xlnet", "swin", "whisper", "wav2vec2"])
def test_a_record_changes_the_clipped_sum_by_no_more_than_its_clip_norm(name):
    """Removing any record changes nothing in what the others contribute."""
    model, batch = make(name, 4)
    norms = (0.3, 1e-3, 0.05, 7.0)

    def clipped(rows):
        records = run(Tape(model), {key: values[rows] for key, values in batch.items()})
        bounds = torch.tensor([norms[row] for row in rows])
        sums = records.weighted_sum((bounds / records.norms).clamp_max(1))
        return torch.cat([total.flatten() for total in sums.values()])

    everyone = clipped([0, 1, 2, 3])
    for missing in range(4):
        change = everyone - clipped([row for row in (3, 1, 0, 2) if row != missing])
        assert float(change.norm()) <= norms[missing] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["bert", "bart", "fnet", "longformer", "lora-bert"])
def test_the_check_before_training_accepts_them(name):
    model, batch = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(model, batch) == []


def test_lora_trains_the_adapters_alone():
    model, batch = make("lora-bert")
    records = run(Tape(model), batch)
    sums = records.weighted_sum(torch.ones(3))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in named)
    assert set(sums) == set(named.values())
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_are_one_parameter():
    model, batch = make("gpt2")
    names = [name for name, _ in model.named_parameters()]
    assert not any("lm_head" in name for name in names)
    weight = model.network.transformer.wte.weight
    assert model.network.lm_head.weight is weight
    expected = loop(model, batch, wavy)[weight]
    torch.testing.assert_close(run(Tape(model), batch).per_record()[weight], expected)
