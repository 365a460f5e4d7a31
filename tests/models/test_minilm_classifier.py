"""MiniLM with a head, trained further: exact gradients, adapters alone, and its pretraining."""

import pytest
import torch

from ownerwise.gradients import check
from ownerwise.models import MiniLMClassifier
from ownerwise.models.features import MiniLM
from tools.record_loop import assert_matches_loop
from tools.text_tools import WIDTH, install

TEXTS = ["Mild fever, cough", "severe", "unhappily a severe fever"]


@pytest.fixture
def model(monkeypatch, tmp_path):
    torch.manual_seed(0)
    install(monkeypatch, tmp_path / "site")
    model = MiniLMClassifier(classes=2, length=8).double()
    torch.nn.init.normal_(model.head.weight)
    return model


def test_every_parameter_is_trained_exactly(model):
    assert all(p.requires_grad for p in model.parameters())
    assert model.head.in_features == WIDTH
    ids = model.encode(TEXTS)
    assert_matches_loop(model, ids, lambda outputs: outputs.sin().sum(dim=1))
    assert check(model, ids) == []


def test_padding_has_no_effect(model):
    torch.testing.assert_close(
        model(model.encode(["mild"] * 2)), model(model.encode(["mild", *TEXTS[2:]]))[[0, 0]]
    )


def test_adapters_of_peft(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["head"])
    adapted = peft.get_peft_model(model, config).double()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or "head" in name for name in trained)
    assert_matches_loop(adapted, model.encode(TEXTS), lambda outputs: outputs.sin().sum(dim=1))


def test_the_pretraining_is_stated(model):
    assert model.pretraining == MiniLM.pretraining
    assert not any(p.requires_grad for p in MiniLM(8).parameters())
