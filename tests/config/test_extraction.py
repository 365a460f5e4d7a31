"""Configured features: the same for every part, after the split, and declared."""

import re

import numpy as np
import pytest
import torch

from ownerwise.config import prepare_run
from ownerwise.config.reading import make_config
from ownerwise.data import DataSet, Records, load_table
from ownerwise.data.registry import LOADERS
from ownerwise.errors import OwnerwiseError
from ownerwise.models.features import EfficientNetLite0, MiniLM, Scattering, extract
from ownerwise.report import card_text
from tools import step_tools
from tools.data_tools import write
from tools.pretrained_tools import install
from tools.text_tools import WIDTH
from tools.text_tools import install as install_minilm

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

SETTINGS = {
    "run": {"seed": 3},
    "data": {"name": "digits", "extractor": {"name": "scattering", "height": 8, "width": 8}},
    "owners": {
        "assignment": {
            "kind": "by_classes",
            "classes": {"low": list("01234"), "high": list("56789")},
            "budgets": [1.0, 5.0],
        }
    },
    "plan": {"steps": 2, "batch_size": 100},
    "model": {"name": "linear-head"},
    "training": {"lr": 0.5},
}


def without_extractor(settings):
    data = {key: value for key, value in settings["data"].items() if key != "extractor"}
    return settings | {"data": data}


def scattered(records):
    return extract(Scattering(8, 8), torch.from_numpy(records.inputs))


@pytest.mark.parametrize("share", [None, 0.2])
def test_the_inputs_of_every_part_become_features_after_the_split(tmp_path, share):
    data = SETTINGS["data"] | ({} if share is None else {"validation_share": share})
    settings = SETTINGS | {"data": data}
    made = prepare_run(make_config(settings), folder=tmp_path)
    plain = prepare_run(make_config(without_extractor(settings)), folder=tmp_path)
    pairs = [(made.data.train, plain.data.train), (made.validation, plain.validation)]
    pairs += [(made.test, plain.test)] if share else []
    for found, records in pairs:
        np.testing.assert_array_equal(found.targets, records.targets)
        np.testing.assert_array_equal(found.inputs, scattered(records).numpy())
    if share is None:
        assert made.validation is made.data.test  # extracted once
    assert made.data.form == "float32 features [81, 2, 2]"
    run = made.fit()
    assert "pretraining" not in run.config  # fixed filters


def test_pretrained_features_are_declared(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "site")
    images = np.random.default_rng(0).random((60, 3, 16, 16), dtype=np.float32)
    records = Records(images, np.arange(60) % 10)
    data = DataSet("pictures", records, records.take(np.arange(10)), tuple("0123456789"))
    monkeypatch.setitem(LOADERS._own, "pictures", lambda data_dir, download: data)
    extractor = {"name": "efficientnet-lite0", "size": 32}
    settings = SETTINGS | {
        "data": {"name": "pictures", "extractor": extractor},
        "plan": {"steps": 2, "batch_size": 20},
    }
    made = prepare_run(make_config(settings), folder=tmp_path / "run")
    expected = extract(EfficientNetLite0(32), torch.from_numpy(images))
    np.testing.assert_array_equal(made.data.train.inputs, expected.numpy())
    run = made.fit()
    assert run.config["pretraining"] == "pretrained on ImageNet (EfficientNet-Lite0)"
    assert run.config["settings"]["data"]["extractor"] == extractor
    assert "pretrained on ImageNet (EfficientNet-Lite0)" in card_text(run)


def test_unknown_extractors_and_options_are_refused():
    settings = SETTINGS | {"data": {"name": "digits", "extractor": {"name": "efficientnet"}}}
    with pytest.raises(OwnerwiseError, match=r"data.extractor.name is 'efficientnet'"):
        make_config(settings)
    settings["data"]["extractor"] = {"name": "scattering", "height": 8, "breadth": 8}
    with pytest.raises(OwnerwiseError) as refused:
        prepare_run(make_config(settings))
    assert len(refused.value.problems) == 2


NOTES = {
    "run": {"seed": 3},
    "data": {
        "file": "notes.csv",
        "target": "outcome",
        "owner": "clinic",
        "classes": ["home", "admitted"],
        "features": {"note": "text"},
        "extractor": {"name": "minilm", "length": 8},
    },
    "owners": {"epsilon": {"north": 1.0, "south": 4.0}},
    "plan": {"steps": 2, "batch_size": 20},
    "model": {"name": "linear-head"},
    "training": {"lr": 0.5},
}


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A folder with a table of notes, and the weights of a made-up network for texts."""
    install_minilm(monkeypatch, tmp_path / "site")
    said = (("mild fever, unhappily", "home"), ("Severe COUGH", "admitted"), ("", "home"))
    rows = [
        f'{("north", "south")[k % 2]},"{said[k % 3][0]} {k}",{said[k % 3][1]}' for k in range(90)
    ]
    write(tmp_path / "notes.csv", "\n".join(["clinic,note,outcome", *rows]))
    return tmp_path


def changed(**data):
    return NOTES | {"data": NOTES["data"] | data}


def test_a_column_of_texts_becomes_features(notes):
    made = prepare_run(make_config(changed(validation_share=0.2), notes), folder=notes / "run")
    loaded = load_table(
        notes / "notes.csv",
        **{key: value for key, value in NOTES["data"].items() if key not in ("file", "extractor")},
    )
    np.testing.assert_array_equal(made.test.inputs, extract(MiniLM(8), loaded.test.inputs).numpy())
    assert len(made.data.train) + len(made.validation) == len(loaded.train)
    assert made.data.form == f"float32 features [{WIDTH}]"
    run = made.fit()
    assert run.config["pretraining"] == MiniLM.pretraining
    assert MiniLM.pretraining in card_text(run)


@pytest.mark.parametrize(
    ("extractor", "words"),
    [
        ({}, 'turns them into numbers: set data.extractor = { name = "minilm" }'),
        (
            {"extractor": SETTINGS["data"]["extractor"]},
            "'scattering' takes numbers, but the inputs",
        ),
    ],
    ids=["none", "of images"],
)
def test_texts_without_an_extractor_of_texts_are_refused(notes, extractor, words):
    table = {key: value for key, value in NOTES["data"].items() if key != "extractor"}
    config = make_config(NOTES | {"data": table | extractor}, notes)
    with pytest.raises(OwnerwiseError, match=re.escape(words)):
        prepare_run(config)


def test_an_extractor_of_texts_refuses_numbers(notes):
    settings = SETTINGS | {"data": {"name": "digits", "extractor": {"name": "minilm"}}}
    with pytest.raises(OwnerwiseError, match="'minilm' takes texts, but the inputs of digits are"):
        prepare_run(make_config(settings))
