"""Every setting of the papers: its values, and a few steps on tiny made data."""

import pytest
import torch

from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation import groups, metrics
from ownerwise.models import patches
from ownerwise_reproduction import methods, settings
from ownerwise_reproduction.trials import Trial, run_trial
from tools.text_tools import install

TINY = ("plan.steps=2", "run.evaluate_every=1", 'plan.accountant="rdp"')  # rdp plans faster
INO_PAPER = (
    *("CA-MLP", "PN", "MN-PC", "CM-PC", "CL-PC", "CR-PC", "CS-PC", "COL-PC", "COM-PC", "CH-PC"),
    *("CF-PC", "CFS-PC", "CFN-PC", "CM-RN", "SU-LS"),
)
IDP_PAPER = tuple(
    f"IDP-{data}-{shares}" for data in ("MNIST", "SVHN", "CIFAR10") for shares in "AB"
)
SCALE = {"pneumoniamnist", "cifar10"}  # Sample elsewhere


def test_all_settings_are_there():
    assert {*INO_PAPER, *IDP_PAPER, "digits"} <= set(settings.names())
    assert settings.setting("mn-pc").name == "MN-PC"
    with pytest.raises(OwnerwiseError, match="MN-PC"):
        settings.setting("MN")


@pytest.fixture
def quick_patches(monkeypatch):
    """Constants from a few images of noise; those from synthetic pictures take half a minute."""
    monkeypatch.setattr(patches, "small_images", lambda *_: torch.rand(60, 3, 32, 32))
    patches._constants.cache_clear()
    yield
    patches._constants.cache_clear()


@pytest.fixture
def groups_may_be_small(monkeypatch):
    """Made data has a few records of each class, too few for results of their own."""
    for module in (groups, metrics):
        monkeypatch.setattr(module, "SMALLEST_GROUP", 1)


@pytest.mark.parametrize("name", settings.names())
def test_a_setting_runs(name, tmp_path, quick_patches, groups_may_be_small, monkeypatch):
    install(monkeypatch, tmp_path / "site")  # a MiniLM of two layers
    layers = ("data.extractor.layers=[0, 1]",) if name == "DPIS-IMDB-LM" else ()
    (method,) = methods.parse("ino-budget")
    # made data has few records; the strict ones of CS-EN need less noise than the lax ones allow
    batch = () if name == "digits" else (f"plan.batch_size={20 if name == 'CS-EN' else 6}",)
    trial = Trial(settings.setting(name), method, 1, "short", (*TINY, *batch, *layers))
    result = run_trial(trial, tmp_path / "run")
    assert [line["step"] for line in result["history"]] == [0, 1, 2]
    assert result["final"]["groups"].keys() <= result["budgets"].keys()
    assert result["within_budgets"]
    assert result["not_private"] == ["science: fixed seed 1"]


@pytest.mark.parametrize("name", INO_PAPER)
def test_variants_are_those_of_the_paper(name):
    config = settings.setting(name).configure(0)
    expected = "scale" if config["data"]["name"] in SCALE else "sample"
    assert config["plan"]["method"] == expected


def test_values_of_idp_sgd():
    config = settings.setting("IDP-MNIST-A").configure(3)
    assert dict(config["plan"]) == {
        "method": "sample", "steps": 9375, "batch_size": 512, "clip_norm": 0.2,
    }  # fmt: skip
    assert config["training"]["lr"] == 0.6
    assignment = config["owners"]["assignment"]
    assert assignment["budgets"] == [1.0, 2.0, 3.0]
    assert assignment["shares"] == [0.34, 0.43, 0.23]
    assert assignment["seed"] == 3  # owners are drawn anew


def test_even_budgets():
    budgets = settings.setting("CH-PC").configure(0)["owners"]["assignment"]["budgets"]
    assert len(budgets) == 100
    assert budgets[0] == 1
    assert budgets[-1] == 10
    assert budgets[11] == pytest.approx(2)


def test_profiles_and_changes():
    setting = settings.setting("MN-PC")
    assert setting.configure(0)["plan"]["steps"] == 9375
    assert setting.configure(0)["run"]["evaluate_every"] == 9375 // settings.EVALUATIONS
    assert setting.configure(0, "short")["plan"]["steps"] == 2344
    changed = setting.configure(0, "short", ["plan.steps=100", "training.lr=2"])
    assert changed["plan"]["steps"] == 100
    assert changed["run"]["evaluate_every"] == 2
    assert changed["training"]["lr"] == 2
    with pytest.raises(OwnerwiseError, match="quick"):
        setting.configure(0, "quick")
    with pytest.raises(OwnerwiseError, match="lrr"):
        setting.configure(0, "paper", ["training.lrr=2"])


def test_a_bad_file_is_refused_with_all_problems():
    text = '[experiment]\ntitle = 3\nlength = 2\n[data]\nname = "digits"\n'
    with pytest.raises(OwnerwiseError) as error:
        settings.make_setting("X", text)
    assert len(error.value.problems) == 3  # title is no text, no source, an unknown key
    with pytest.raises(OwnerwiseError, match="not valid TOML"):
        settings.make_setting("X", "[experiment")
