"""`import ownerwise`: which names it offers, and that it loads them only when they are used."""

import importlib
import subprocess
import sys

import pytest

import ownerwise as ow
from ownerwise.accounting import ACCOUNTANTS
from ownerwise.planning import METHODS


def modules_after(statement: str) -> set[str]:
    program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nfinally:\n"
    program += "    print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ownerwise",
        "from ownerwise.cli.main import main; main(['--help'])",
        "from ownerwise.cli.main import main; main(['plan', '--help'])",
        "from ownerwise.cli.main import main; main(['train', '--help'])",
    ],
)
def test_help_needs_neither_torch_nor_scipy(statement):
    loaded = modules_after(statement)
    assert "ownerwise" in loaded
    assert not {"torch", "scipy", "ownerwise_reproduction"} & loaded


def test_every_public_name_is_there_and_listed():
    assert sorted(ow.__all__) == sorted(set(ow.__all__))
    for name in ow.__all__:
        assert getattr(ow, name) is not None
    assert set(ow.__all__) <= set(dir(ow))
    assert {*ow._ROOM_OF, *ow._PUBLIC_ROOMS} == set(ow.__all__)


def test_public_rooms_are_the_packages():
    assert ow.data is importlib.import_module("ownerwise.data")
    assert ow.models is importlib.import_module("ownerwise.models")
    assert ow.constraints is importlib.import_module("ownerwise.mechanisms.constraints")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Onwers'"):
        _ = ow.Onwers  # type: ignore[attr-defined]


def test_the_help_of_plan_names_every_method_and_accountant(capsys):
    from ownerwise.cli.main import main

    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(METHODS[:-1])} or {METHODS[-1]} [sample]" in text
    assert f"{' or '.join(ACCOUNTANTS)} [pld]" in text
