"""Features of whole reviews beside an obvious version of them."""

import pytest
import torch

from ownerwise.models.features import extract
from ownerwise_reproduction import review_features
from ownerwise_reproduction.review_features import HashedWords, LastPieces, ReviewMiniLM
from tools.text_tools import HEADS, install, plain_features

TEXTS = ["mild fever", "", "severe cough , " * 70 + "mild " * 100, "unhappy " * 2000]


@pytest.fixture
def weights(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path / "site")


def average(weights, extractor, text, layer):
    """A layer's states over all pieces of a text, chunk by chunk, in float64."""
    ids = extractor.minilm.words.ids
    pieces = [piece for piece in extractor.encode([text])[0].tolist() if piece][1:-1]
    chunks = [pieces[at : at + 126] for at in range(0, len(pieces), 126)] or [[]]
    whole = [[ids["[CLS]"], *chunk, ids["[SEP]"]] for chunk in chunks]
    later = [f"encoder.layer.{at}." for at in range(layer + 1, 2)]
    kept = {k: v.bfloat16() for k, v in weights.items() if not k.startswith(tuple(later))}
    means = plain_features(kept, whole, HEADS)
    sizes = torch.tensor([float(len(chunk)) for chunk in whole]).double()
    return (means * sizes[:, None]).sum(dim=0) / sizes.sum()


def test_layers_are_averaged_over_all_pieces_and_centred(weights):
    extractor = ReviewMiniLM(layers=(0, 1))
    extractor.minilm.double()  # of the weights in bfloat16
    found = extract(extractor, TEXTS, batch_size=3)
    made_up = review_features._made_up().split("\n\n")
    assert len(made_up) == 16
    for at, layer in enumerate((0, 1)):
        rows = torch.stack([average(weights, extractor, text, layer) for text in TEXTS])
        centre = torch.stack([average(weights, extractor, text, layer) for text in made_up]).mean(0)
        expected = torch.nn.functional.normalize(rows - centre, dim=1) / 2**0.5
        part = found.unflatten(1, (2, -1))[:, at]
        torch.testing.assert_close(part, expected.float(), rtol=0, atol=1e-5)
    assert float((expected[0] - expected[2]).norm()) > 1e-2  # the texts differ


def test_features_are_stored_under_everything_that_determines_them(weights, monkeypatch):
    first = ReviewMiniLM(layers=(0, 1)).fingerprint
    assert ReviewMiniLM(layers=(1,)).fingerprint != first
    monkeypatch.setattr(review_features, "_made_up", lambda: "another text")
    assert ReviewMiniLM(layers=(0, 1)).fingerprint != first


def test_the_end_of_a_review(weights):
    pieces = LastPieces(letters=5, length=8)
    assert torch.equal(extract(pieces, ["severe fever"]), pieces.minilm.encode(["fever"]))


def test_words_occur_or_not():
    words = HashedWords(1000)
    found = extract(words, ["good, Good film", "a good film", ""])
    assert (found > 0).sum(dim=1).tolist() == [2, 3, 0]
    torch.testing.assert_close(found.norm(dim=1), torch.tensor([1.0, 1.0, 0.0]))
    assert float(found[0] @ found[1]) == pytest.approx(2 / 6**0.5)
