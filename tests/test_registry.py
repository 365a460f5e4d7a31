"""Names that other packages add by entry points."""

from importlib.metadata import EntryPoint

import pytest

from ownerwise import registry
from ownerwise.registry import Registry

POINTS = (
    EntryPoint("square root", "math:sqrt", "made.up"),
    EntryPoint("own", "math:floor", "made.up"),
    EntryPoint("broken", "no_such_module:function", "made.up"),
)


@pytest.fixture
def table(monkeypatch):
    found = {"made.up": POINTS}
    monkeypatch.setattr(registry, "entry_points", lambda group: found.get(group, ()))
    return Registry("made.up", {"own": abs})


def test_own_names_come_first_and_take_precedence(table):
    assert list(table) == ["own", "broken", "square root"]
    assert len(table) == 3
    assert table["own"] is abs


def test_an_entry_point_is_loaded_when_it_is_looked_up(table):
    assert table["square root"](9.0) == 3.0
    assert "broken" in table, "listing names imports nothing"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        table["broken"]


def test_an_unknown_name_is_a_key_error(table):
    assert "other" not in table
    with pytest.raises(KeyError):
        table["other"]


def test_other_groups_add_nothing(table):
    assert list(Registry("another.group", {"own": abs})) == ["own"]
