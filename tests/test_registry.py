"""Names that other packages add by entry points."""

from importlib.metadata import EntryPoint

import pytest

from ownerwise import registry
from ownerwise.errors import OwnerwiseError
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


def entry(first, second, *, size, shade="red", secret=None):
    """Return the arguments, as a table with two leading and one hidden argument gets them."""
    if shade == "none":
        raise ValueError("shade must be a colour, got 'none'")
    return first, second, size, shade, secret


@pytest.fixture
def things(table):
    return Registry("another", {"thing": entry}, kind="thing", leading=2, hidden=("secret",))


def test_a_name_with_options_is_made(things):
    made = things.make({"name": "thing", "size": 3}, 1, 2, shade="blue", other="not taken")
    assert made == (1, 2, 3, "blue", None)
    assert things.make({"kind": "thing", "shade": "red"}, 1, 2, size=4, shade="blue") == (
        1, 2, 4, "red", None,
    )  # fmt: skip
    assert things.options("thing") == {"size": True, "shade": False}


def test_all_problems_with_names_and_options_come_at_once(things):
    given = {"name": "thing", "shde": "red", "secret": 1}
    assert things.problems(given, "box.thing", "box.thing.") == [
        "thing has no option box.thing.shde; did you mean 'shade'? Known names: size, shade",
        "thing has no option box.thing.secret; Known names: size, shade",
        "thing needs the option box.thing.size",
    ]
    assert things.problems({"name": "thing"}, offered=("size",)) == []
    assert things.problems("thign") == [
        "thing is 'thign'; did you mean 'thing'? Known names: thing"
    ]
    assert things.problems({}) == ["thing is missing; expected one of thing"]
    assert things.problems(3)[0].startswith("thing is 3; ")
    with pytest.raises(OwnerwiseError, match="needs the option size"):
        things.make("thing", 1, 2)


def test_errors_of_what_is_made_are_problems(things):
    with pytest.raises(OwnerwiseError, match=r"^shade must be a colour"):
        things.make({"name": "thing", "size": 1, "shade": "none"}, 1, 2)
    with pytest.raises(OwnerwiseError, match=r"thing thing cannot be created: .*missing"):
        things.make({"name": "thing", "size": 1}, 1)


def test_a_dotted_path_names_an_object_of_ones_own(table):
    assert table["math:ceil"](1.5) == 2
    assert table["collections:Counter.fromkeys"]
    assert "math:ceil" in table
    assert "math:cel" not in table
    assert "math:ceil" not in list(table), "only registered names are listed"
    (problem,) = table.problems("math:cel", "box.name")
    assert problem.startswith("box.name is 'math:cel', which cannot be imported (module 'math'")


def test_functions_are_the_result_and_get_options_bound():
    losses = Registry("another", {"f": entry, "Holder": Holder}, leading=2, functions=True)
    assert losses.make("f", size=1) is not entry
    assert losses.make({"name": "f", "size": 5})(1, 2) == (1, 2, 5, "red", None)
    assert losses.make({"name": "Holder", "held": 2}).held == 2
    assert losses.problems({"name": "Holder"}) == ["Holder needs the option held"]


class Holder:
    def __init__(self, held):
        self.held = held
