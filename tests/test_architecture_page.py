"""The architecture page names files and folders that exist, and every room."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ownerwise"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w.-]+/[\w./-]*|\w+\.py)`", PAGE)))


def test_every_path_exists():
    assert len(NAMED) > 40
    missing = [path for path in NAMED if not any((at / path).exists() for at in (PACKAGE, ROOT))]
    assert missing == []


def test_every_room_and_root_module_is_named():
    rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert rooms | modules <= set(NAMED)


def test_every_row_about_a_change_names_a_path():
    table = PAGE.partition("## Where to make changes")[2]
    rows = re.findall(r"^\| (?!to change)(?!-)(.*?) \| (.*?) \|", table, re.MULTILINE)
    assert len(rows) > 10
    assert [row for row, where in rows if not re.search(r"`[\w.-]+/", where)] == []
