"""`ownerwise audit`: a run folder, a configuration, and what is found stands on report and card."""

from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.audit import load_audits
from ownerwise.cli.main import main
from ownerwise.randomness import Noise
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"
QUICK = ["--set", "plan.steps=12"]


@pytest.fixture
def folder(tmp_path):
    trainer = tools.make_trainer(folder=tmp_path / "run", weights=ow.INO())
    trainer.fit(tools.data(), **tools.validation())
    return tmp_path / "run"


def test_a_run_is_audited_and_says_so(folder, capsys):
    assert main(["audit", str(folder), "--canaries", "80"]) == 0
    (audit,) = load_audits(folder)
    assert audit.plan == ow.Run.load(folder).plan.hash
    assert audit.compared > 20
    assert "large losses" in audit.groups[0].name
    card, report = (folder / "CARD.md").read_text(), (folder / "report.html").read_text()
    out = capsys.readouterr().out
    for text in (card, report, out):
        assert "An attack that fails proves nothing" in text
        assert audit.groups[0].finding[:25] in text
    assert '<section id="audit"' in report
    assert audit.private
    assert "The run itself is NOT PRIVATE: fixed seed" in out
    assert "NOT PRIVATE: records" not in card


def test_a_run_without_an_audit_does_not_mention_one(folder):
    run = ow.Run.load(folder)
    run.card(folder / "CARD.md")
    run.report(folder / "report.html")
    assert "## Audit" not in (folder / "CARD.md").read_text()
    assert '<section id="audit"' not in (folder / "report.html").read_text()


def test_a_configuration_is_audited_with_its_model_and_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--canaries", "80", "--attack", "loss"]
    assert main(["audit", str(EXAMPLE), *options, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "loss, on 80 canaries, 12 steps" in out
    assert "ε = 10" in out
    assert "NOT PRIVATE: records of people took part" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", '{"format": 1, "audits": []}'])
def test_an_unreadable_file_of_audits_is_refused_before_the_audit(folder, content, capsys):
    (folder / "audit.json").write_text(content)
    assert main(["audit", str(folder), "--canaries", "80"]) == 2
    error = capsys.readouterr()
    assert "delete the file, then audit the run again" in error.err
    assert not error.out
    assert (folder / "audit.json").read_text() == content


def test_a_failed_comparison_is_an_error(folder, capsys, monkeypatch):
    real = Noise.gaussian

    def quieter(self, step, sums, std, *further, **options):
        return real(self, step, sums, std / 4, *further, **options)

    monkeypatch.setattr(Noise, "gaussian", quieter)
    assert main(["audit", str(folder), "--canaries", "80"]) == 2
    error = capsys.readouterr().err
    assert "noise: variance" in error
    assert "FAILED" in (folder / "CARD.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "plan.steps=5"], "apply only to a configuration"),
        (["--attack", "loss"], "needs a model and its data"),
        (["--canaries", "2"], "2 canaries for"),
    ],
)
def test_what_a_run_cannot_be_asked(folder, options, message, capsys):
    assert main(["audit", str(folder), *options]) == 2
    assert message in capsys.readouterr().err
    assert load_audits(folder) == []
