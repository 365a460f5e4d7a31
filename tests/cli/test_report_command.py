"""`ownerwise report`: one run or several."""

import pytest

import ownerwise as ow
from ownerwise.cli.main import main
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


@pytest.fixture
def folders(tmp_path):
    made = []
    for name, weights in (("plain", None), ("weighted", ow.INO())):
        made.append(str(tmp_path / name))
        trainer = tools.make_trainer(folder=made[-1], weights=weights)
        trainer.fit(tools.data(), **tools.validation())
    return made


def test_runs_side_by_side(tmp_path, folders, capsys):
    out = tmp_path / "both.html"
    assert main(["report", *folders, "--out", str(out), "--title", "Two methods"]) == 0
    text = out.read_text()
    for part in ("Two methods", "IDP-SGD", "INO-SGD"):
        assert part in text
    assert str(out) in capsys.readouterr().out


def test_the_report_goes_into_the_present_folder_by_default(tmp_path, folders, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", folders[0]]) == 0
    assert (tmp_path / "report.html").exists()


def test_all_folders_that_are_no_runs_are_named(tmp_path, folders, capsys):
    (tmp_path / "empty").mkdir()
    bad = [str(tmp_path / "empty"), str(tmp_path / "absent")]
    assert main(["report", *bad, folders[0], "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "3 problems\n" in error
    for part in ("empty", "absent", "is a folder"):
        assert part in error
