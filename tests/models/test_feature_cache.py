"""Features on disk: found again, computed again if anything changed or the file is damaged."""

import warnings

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ownerwise.errors import OwnerwiseError
from ownerwise.marks import mark, marks_of
from ownerwise.models import features
from ownerwise.models.features import EfficientNetLite0, Scattering, extract
from tools.pretrained_tools import install


class Doubled(nn.Module):
    """Twice the inputs; counts the records it has seen."""

    def __init__(self, fingerprint: str = "doubled"):
        super().__init__()
        self.fingerprint, self.seen = fingerprint, 0

    def forward(self, x):
        self.seen += len(x)
        return 2 * x


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(features, "_PIECE", 4)
    monkeypatch.delenv("OWNERWISE_CACHE", raising=False)


INPUTS = torch.arange(20.0).reshape(10, 2)


def files(folder):
    return sorted(folder.glob("*.safetensors"))


def test_features_are_computed_once(tmp_path):
    first, second = Doubled(), Doubled()
    for extractor in (first, second):
        assert torch.equal(extract(extractor, INPUTS, 3, cache=tmp_path), 2 * INPUTS)
    assert (first.seen, second.seen) == (10, 0)
    assert len(files(tmp_path)) == 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"] * 3  # no leftovers


def test_files_say_that_they_are_not_private(tmp_path):
    extract(Doubled(), INPUTS, cache=tmp_path)
    with safe_open(files(tmp_path)[0], "pt") as file:
        assert "NOT PRIVATE" in file.metadata()["warning"]


@pytest.mark.parametrize(
    ("extractor", "inputs"),
    [
        (Doubled("other"), INPUTS),
        (Doubled(), INPUTS + 1),
        (Doubled(), INPUTS.double()),
        (Doubled(), INPUTS.reshape(10, 1, 2)),
        (Doubled(), -INPUTS),  # -0.0 differs from 0.0
    ],
    ids=["extractor", "values", "type", "shape", "sign"],
)
def test_anything_else_is_computed(tmp_path, extractor, inputs):
    extract(Doubled(), INPUTS, cache=tmp_path)
    extractor.seen = 0
    assert torch.equal(extract(extractor, inputs, cache=tmp_path), 2 * inputs)
    assert extractor.seen == 10


def test_only_changed_pieces_are_computed(tmp_path):
    extract(Doubled(), INPUTS, cache=tmp_path)
    changed = INPUTS.clone()
    changed[5] = 0
    extractor = Doubled()
    assert torch.equal(extract(extractor, changed, cache=tmp_path), 2 * changed)
    assert extractor.seen == 4


@pytest.mark.parametrize("damage", ["empty", "shortened", "one bit", "other content"])
def test_damaged_files_are_replaced(tmp_path, damage):
    extract(Doubled(), INPUTS, cache=tmp_path)
    path = files(tmp_path)[0]
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "shortened": content[:-1],
        "one bit": content[:-1] + bytes([content[-1] ^ 1]),
        "other content": files(tmp_path)[1].read_bytes()[:-4] + b"0000",
    }
    path.write_bytes(damaged[damage])
    with pytest.warns(UserWarning, match="is damaged, so the features are computed again"):
        assert torch.equal(extract(Doubled(), INPUTS, cache=tmp_path), 2 * INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extract(Doubled(), INPUTS, cache=tmp_path)


def test_an_interrupted_extraction_keeps_whole_pieces(tmp_path):
    class Stopped(Doubled):
        def forward(self, x):
            if self.seen >= 6:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        extract(Stopped(), INPUTS, 2, cache=tmp_path)
    extractor = Doubled()
    extract(extractor, INPUTS, 2, cache=tmp_path)
    assert extractor.seen == 6


def test_the_environment_names_the_default_folder(monkeypatch, tmp_path):
    extract(Doubled(), INPUTS)
    assert not files(tmp_path)
    monkeypatch.setenv("OWNERWISE_CACHE", str(tmp_path / "default"))
    extract(Doubled(), INPUTS)
    assert len(files(tmp_path / "default")) == 3
    extract(Doubled(), INPUTS, cache=tmp_path / "given")
    assert len(files(tmp_path / "given")) == 3


def test_extractors_without_a_fingerprint_are_not_cached(monkeypatch, tmp_path):
    images = torch.rand(3, 1, 8, 8)
    with pytest.raises(OwnerwiseError, match="features of a Scattering cannot be cached"):
        extract(Scattering(8, 8), images, cache=tmp_path)
    monkeypatch.setenv("OWNERWISE_CACHE", str(tmp_path))
    extract(Scattering(8, 8), images)
    assert not files(tmp_path)


def test_settings_and_weights_of_a_network_are_told_apart(monkeypatch, tmp_path):
    images = torch.rand(2, 3, 32, 32)
    found = []
    for seed in (0, 1):
        with monkeypatch.context() as patch:
            install(patch, tmp_path / f"site {seed}", seed)
            for options in ({}, {"size": 40}, {"normalise": "l2"}):
                extractor = EfficientNetLite0(**{"size": 32, **options})
                found.append(extract(extractor, images, cache=tmp_path / "cache"))
                again = extract(extractor, images, cache=tmp_path / "cache")
                assert torch.equal(again, found[-1])
    assert len(files(tmp_path / "cache")) == 6
    assert not any(torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


def test_progress_is_shown_on_request(capsys, tmp_path):
    for _ in ("computed", "cached"):
        extract(Doubled(), INPUTS, cache=tmp_path, progress=True)
        assert "10/10" in capsys.readouterr().err
    extract(Doubled(), INPUTS, progress=False)
    assert capsys.readouterr().err == ""


def test_marks_of_inputs_carry_over_to_features(tmp_path):
    inputs = mark(INPUTS.clone(), "scaled by the mean of the records")
    for options in ({}, {"cache": tmp_path}):
        assert marks_of(extract(Doubled(), inputs, **options)) == [
            "scaled by the mean of the records"
        ]
    assert marks_of(extract(Doubled(), INPUTS)) == []
