"""Exported models give the run's own predictions, without ownerwise, and store no record."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.repair.folding import subtract_in_hook
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)
REPAIR = {"tau": 3.0, "counts": [[40, 5, 5], [3, 30, 8], [4, 5, 60]]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return tools.make_trainer(folder=folder, progress=False).fit(tools.data())


def by_torch(path, inputs):
    return torch.export.load(path).module()(inputs).detach().double()


def by_onnx(path, inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"inputs": inputs.numpy()})
    return torch.from_numpy(outputs).double()


@pytest.mark.parametrize("repaired", [False, True])
def test_both_files_give_the_probabilities_of_the_run(trained, tmp_path, repaired):
    pytest.importorskip("onnxscript")
    repair = ow.PullAdjustment(**REPAIR) if repaired else None
    written = trained.export(tmp_path / "out", tools.data()[0][:2], repair=repair)
    assert [path.name for path in written] == ["model.pt2", "model.onnx", "model.json", "CARD.md"]
    for records in (1, 7, 600):
        inputs = torch.randn(records, 4, generator=torch.Generator().manual_seed(records))
        expected = trained.predict_proba(inputs, repair=repair)
        for outputs in (by_torch(written[0], inputs), by_onnx(written[1], inputs)):
            np.testing.assert_allclose(outputs.softmax(dim=1), expected, atol=1e-6)
    if repaired:  # the shift is not something that changes nothing
        assert np.abs(expected - trained.predict_proba(inputs)).max() > 0.05
    assert "Privacy card" in written[-1].read_text(encoding="utf-8")


def test_the_model_stays_as_it_was(trained, tmp_path):
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    mode = trained.model.training
    trained.export(tmp_path, tools.data()[0], formats=["torch"])
    assert trained.model.training == mode
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, before[name])


class Single(nn.Module):
    """One logit; the calibration or repair of such a model needs a hook."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.inner(inputs).tanh().flatten()


def test_a_correction_in_a_hook_is_exported(tmp_path):
    """As a calibration leaves it in a model whose last layer cannot take it."""
    plan = ow.plan(ow.Owners(np.arange(200), 4.0, 1e-5), steps=4, batch_size=50)
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.binary_cross_entropy_with_logits
    trainer = ow.Trainer(Single(), plan, lr=0.5, progress=False, loss=loss)
    run = trainer.fit((inputs, (inputs[:, 0] > 0).float()))
    plain = run.predict_proba(inputs)[:, 1]
    subtract_in_hook(run.model, torch.tensor([0.0, 0.7]))
    (path, *_) = run.export(tmp_path, inputs, formats=["torch"])
    found = by_torch(path, inputs).sigmoid()
    np.testing.assert_allclose(found, run.predict_proba(inputs)[:, 1], atol=1e-6)
    assert np.abs(found.numpy() - plain).min() > 0.05


def test_neither_records_nor_paths_of_this_machine_are_stored(trained, tmp_path):
    """torch.export stores the inputs with which a model was traced, and where its code is."""
    pytest.importorskip("onnxscript")
    inputs = torch.full((5, 4), 0.123456)
    torch_file, onnx_file, *_ = trained.export(tmp_path, inputs)
    needle = inputs[0, :1].numpy().tobytes()
    content = b"".join(
        zipfile.ZipFile(torch_file).read(n) for n in zipfile.ZipFile(torch_file).namelist()
    )
    assert needle not in content
    assert needle not in onnx_file.read_bytes()
    stored = torch.export.load(torch_file).example_inputs
    assert stored is None or not stored[0][0].any()
    assert str(Path(ow.__file__).parent).encode() not in onnx_file.read_bytes()
    assert str(Path(ow.__file__).parent).encode() not in content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["tflite", "onnx7"]}, "unknown formats tflite, onnx7; expected torch or onnx"),
        ({"formats": []}, "no format was given"),
        ({"X": None}, "pass a few inputs, run.export"),
        ({"X": np.zeros((2, 3))}, "the model fails on the first records"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    trained, tmp_path, options, message
):
    with pytest.raises(ow.OwnerwiseError, match=message):
        trained.export(tmp_path / "out", **{"X": tools.data()[0], "formats": ["torch"], **options})
    assert not list(tmp_path.rglob("model.*"))


def test_the_command_exports_a_run_from_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["id,age,ward,outcome"]
    for number in range(300):
        age = rng.integers(20, 90)
        outcome = "admitted" if age + rng.normal(0, 10) > 60 else "home"
        lines.append(f"p{number},{age},{rng.choice(['day', 'night'])},{outcome}")
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    owners = "\n".join(["owner,epsilon", *(f"p{n},{1 + n % 4}" for n in range(300))])
    Path("budgets.csv").write_text(owners + "\n")
    Path("visits.toml").write_text(
        '[run]\nname = "v"\nfolder = "run"\n[data]\nfile = "visits.csv"\ntarget = "outcome"\n'
        'owner = "id"\nclasses = ["home", "admitted"]\ntest_share = 0.2\n'
        'features = { age = [0, 110], ward = ["day", "night"] }\n'
        '[owners]\nbudgets = "budgets.csv"\ndelta = 1e-4\n'
        '[plan]\nsteps = 5\nbatch_size = 40\n[model]\nname = "mlp"\nhidden = [4]\n'
        "[training]\nlr = 0.5\n"
    )
    assert main(["train", "visits.toml"]) == 0
    assert main(["export", "run", "--format", "torch"]) == 0
    assert "model.pt2, model.json, CARD.md" in capsys.readouterr().out
    described = json.loads(Path("run/exported/model.json").read_text())
    assert described["inputs"] == ["age", "ward=day", "ward=night"]
    assert described["classes"] == ["home", "admitted"]
    assert described["private"] is True
    run = ow.Run.load("run")
    inputs = torch.randn(9, 3)
    found = by_torch(Path("run/exported/model.pt2"), inputs).softmax(dim=1)
    np.testing.assert_allclose(found, run.predict_proba(inputs), atol=1e-6)
    Path("file").write_text("")
    assert main(["export", "run", "--out", "file"]) == 2
    assert main(["export", "nowhere"]) == 2
