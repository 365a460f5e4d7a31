"""One file outside the package adds mechanisms, a loss, a data set and a model, used by name."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.config.reading import make_config

TOYS = Path(__file__).parent / "tools" / "outside.py"
SOURCE = Path(ow.__file__).parents[1]

ENTRY_POINTS = """\
[ownerwise.datasets]
dots = toys:load_dots
[ownerwise.models]
net = toys:Net
[ownerwise.losses]
squared = toys:squared
[ownerwise.weights]
halved = toys:Halved
[ownerwise.clipping_rules]
whole = toys:Whole
[ownerwise.releases]
counts = toys:ClassCounts
[ownerwise.report_sections]
halved = toys:SECTION
"""

CONFIG = """\
[data]
name = "dots"
options = { records = 600 }
[owners]
assignment = { kind = "by_class", budgets = [2, 4, 8] }
[plan]
steps = 6
batch_size = 60
release_std = 8.0
[model]
name = "net"
width = 5
[training]
lr = 0.5
loss = { name = "squared", scale = 2.0 }
clipping = "whole"
release = { kind = "counts", classes = 3 }
[weights]
kind = "halved"
weight = 0.25
"""

OBJECTS = {
    "dots": "load_dots", "net": "Net", "squared": "squared", "whole": "Whole",
    "counts": "ClassCounts", "halved": "Halved",
}  # fmt: skip


def train(folder, *arguments, installed):
    """Run `ownerwise train` in a process of its own; `installed`: the toys are a package."""
    shutil.copy(TOYS, folder / "toys.py")
    if installed:
        metadata = folder / "toys-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    code = "import sys; from ownerwise.cli.main import main; sys.exit(main())"
    path = os.pathsep.join([str(SOURCE), *([str(folder)] if installed else [])])
    return subprocess.run(
        [sys.executable, "-c", code, "train", folder / "run.toml", *arguments],
        capture_output=True, text=True, cwd="/", env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize("installed", [True, False], ids=["entry points", "package.module:Name"])
def test_everything_from_outside_is_used_by_name(installed, tmp_path):
    """The second way needs no installation: the file stands next to the configuration."""
    text = CONFIG
    if not installed:
        for name, thing in OBJECTS.items():
            text = text.replace(f'"{name}"', f'"toys:{thing}"')
    (tmp_path / "run.toml").write_text(text)
    done = train(tmp_path, "--folder", tmp_path / "run", installed=installed)
    assert done.returncode == 0, done.stderr
    run = ow.Run.load(tmp_path / "run")
    assert run.private
    assert run.steps_spent == 6
    assert (run.epsilon() <= run.plan.targets).all()
    assert run.config["weights"] == {"kind": "Halved", "weight": 0.25}
    assert run.config["clipping"] == {"kind": "Whole"}
    assert run.config["constraints"] == {"kind": "ClassCounts", "classes": 3}
    assert (run.config["loss"], run.config["loss_options"]) == ("squared", {"scale": 2.0})
    assert run.plan.release_std == 8.0
    assert run.config["data"].startswith("dots")
    assert "squared" in (tmp_path / "run" / "CARD.md").read_text()
    assert ("Halved was used by" in (tmp_path / "run" / "report.html").read_text()) is installed
    again = train(tmp_path, "--folder", tmp_path / "run", "--resume", installed=installed)
    assert again.returncode == 0, again.stderr  # the states of weights and release are restored


def test_mistakes_with_names_from_outside_are_listed_at_once(tmp_path):
    """An option that is unknown, missing or wrong, and a module that is not there."""
    text = CONFIG.replace("width = 5", "wdith = 5").replace(", classes = 3", "")
    text = text.replace("weight = 0.25", "weight = 2.0").replace('"whole"', '"tois:Whole"')
    (tmp_path / "run.toml").write_text(text)
    done = train(tmp_path, installed=True)
    assert done.returncode == 2
    for part in (
        "net has no option model.wdith; did you mean 'width'?",
        "counts needs the option training.release.classes",
        "weights.weight 2.0: expected a number from 0 to 1",
        "training.clipping is 'tois:Whole', which cannot be imported (No module named 'tois')",
    ):
        assert part in done.stderr, part


@pytest.mark.parametrize("name", ["os:no_such_name", "no_such_package:Name", "os.path:", ":Name"])
def test_what_cannot_be_imported_is_explained(name):
    content = tomllib.loads(CONFIG) | {"model": {"name": name}}
    content["data"], content["weights"] = {"name": "digits"}, {}
    content["training"] = {"lr": 1.0}
    with pytest.raises(ow.OwnerwiseError, match=r"model\.name is .*, which cannot be imported"):
        make_config(content)
