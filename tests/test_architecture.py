"""The rooms of the package: how many there are, their order, and what each says of itself."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from ownerwise.mechanisms import ClippingRule, Closing, Release, Steering, Weights
from ownerwise.mechanisms.constraints import RateConstraints  # noqa: F401  (a known release)
from tools import imports
from tools.imports import Edge

PACKAGE = Path(__file__).parents[1] / "src" / "ownerwise"

LEAVES = ("errors", "files", "marks", "registry", "torch_internals", "wording")
"""Root modules that every room may import; they import nothing of the package but `errors`."""

ROOMS = (
    "owners",
    "accounting",
    "planning",
    "processes",
    "randomness",
    "batches",
    "gradients",
    "mechanisms",
    "repair",
    "step",
    "evaluation",
    "runs",
    "training",
    "tuning",
    "pate",
    "audit",
    "report",
    "data",
    "models",
    "estimators",
    "config",
    "cli",
    "__main__",
)
"""The direction of the data: a room imports rooms that stand before it, never one behind it."""

RESTRICTED = {"owners": {"errors"}, "gradients": {"errors", "torch_internals"}}
"""Rooms that may import less than what stands before them."""


ON_REQUEST = ("Run.report", "Run.card", "Run._preprocessed", "Run._trained_model")


def is_exception(edge: Edge) -> bool:
    """Return whether an import is one of the three exceptions to the order."""
    return (
        # 1. on request, a run writes its report and its privacy card, and builds its model again
        # and preprocesses new records as its configuration says
        (edge.importer == "ownerwise.runs.run" and edge.function in ON_REQUEST)
        # 2. public names are loaded when they are first used (PEP 562)
        or edge.importer == "ownerwise"
        # 3. optional extras: nothing loads the estimator, which needs scikit-learn, but its user
        or (edge.function == "__getattr__" and edge.imported.startswith("ownerwise.estimators"))
    )


def room_of(name: str) -> str:
    """Return the room of "ownerwise.room.module" or "ownerwise.room:name"."""
    parts = name.partition(":")[0].split(".")
    return parts[1] if len(parts) > 1 else ""


def order_problems(package: Path) -> list[str]:
    """Return every import that breaks the order of the rooms, or makes a cycle inside one."""
    problems = []
    order = dict.fromkeys(LEAVES, 0) | {name: at for at, name in enumerate(ROOMS, 1)}
    inside: dict[str, set[str]] = {}
    for edge in imports.edges(package):
        if is_exception(edge):
            continue
        importer, imported = room_of(edge.importer), room_of(edge.imported)
        if edge.imported == "ownerwise:__version__":
            continue
        if not imported:
            problems.append(f"{edge}: expected the room that defines it")
        elif importer == imported:
            target = edge.imported.partition(":")[0]
            inside.setdefault(edge.importer, set()).add(target)
        elif importer not in order or imported not in order:
            problems.append(f"{edge}: not in the list of rooms")
        elif importer in LEAVES and imported != "errors":
            problems.append(f"{edge}: expected nothing but errors")
        elif imported not in RESTRICTED.get(importer, {imported}):
            problems.append(
                f"{edge}: expected nothing but {', '.join(sorted(RESTRICTED[importer]))}"
            )
        elif importer not in LEAVES and order[imported] > order[importer]:
            problems.append(f"{edge}: {imported} stands behind {importer}")
    problems += [f"cycle: {', '.join(cycle)}" for cycle in imports.cycles(inside)]
    return problems


def test_no_import_goes_backwards_and_no_room_has_a_cycle():
    assert order_problems(PACKAGE) == []


def test_the_package_has_only_the_declared_rooms():
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    root_modules = list(PACKAGE.glob("*.py"))
    assert len(packages) <= 24
    assert len(root_modules) <= 8
    rooms = {path.name for path in packages} | {path.stem for path in root_modules}
    assert rooms == {*LEAVES, *ROOMS, "__init__"}


@pytest.mark.parametrize("room", [name for name in ROOMS if (PACKAGE / name).is_dir()])
def test_each_room_says_what_it_is_for_and_what_it_may_import(room):
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring is not None
    first, blank, *rest = docstring.splitlines()
    assert len(first) > 30
    assert blank == ""
    assert re.search(r"\bimports?\b", " ".join(rest), re.IGNORECASE)


NAMES_PLUGS = {
    "__init__": "the public names",
    "step.private_step": "the rule if none is given",
    "audit.heads": "the rule if none is given",
    "audit.network": "the release of an audited model, which is the user's",
    "audit.observation": "the release of an audited model, which is the user's",
}
"""Modules outside mechanisms/ that may name a mechanism's class, and why."""


def plug_names() -> set[str]:
    """Return the library's mechanisms: clipping rules, weights, orders, releases and steering."""
    kinds = [
        kind
        for base in (ClippingRule, Closing, Release, Steering, Weights)
        for kind in _below(base)
    ]
    own = {kind.__name__ for kind in kinds if kind.__module__.startswith("ownerwise.")}
    return own | {"BudgetAware", "ByLoss"}


def _below(base: type) -> list[type]:
    return [kind for child in base.__subclasses__() for kind in (child, *_below(child))]


def named_plugs(package: Path) -> list[str]:
    """Return every use of a mechanism's class in code outside its room; text may name it."""
    plugs, found = plug_names(), []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        if module.startswith(("mechanisms.", "repair.")) or module in NAMES_PLUGS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, field, None) for field in ("id", "attr")]
            names += [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            found += [f"{module}: {name}" for name in names if name in plugs]
    return found


def test_mechanisms_are_named_in_their_room_alone():
    assert {"INO", "Psac", "ImportanceSampling", "RateConstraints", "AcceptanceSteering"} <= (
        plug_names()
    )
    assert named_plugs(PACKAGE) == []


@pytest.mark.parametrize(
    "statement", ["from ownerwise.mechanisms import Psac as rule", "x = ow.INO()", "x = AutoS()"]
)
def test_a_mechanism_named_elsewhere_is_found(statement, tmp_path):
    (tmp_path / "cli.py").write_text(f'"""INO and Psac in text are fine."""\n{statement}\n')
    assert len(named_plugs(tmp_path)) == 1


def test_no_class_name_is_used_twice():
    twice = {name: where for name, where in imports.class_names(PACKAGE).items() if len(where) > 1}
    assert not twice


@pytest.mark.parametrize(
    ("module", "statement", "message"),
    [
        ("planning/solver.py", "from ownerwise.step import PrivateStep", "step stands behind"),
        (
            "batches/sampler.py",
            "if TYPE_CHECKING:\n    from ownerwise.training import Trainer",
            "training stands behind",
        ),
        (
            "runs/run.py",
            "def load():\n    from ownerwise.report import write_report",
            "report stands behind",
        ),
        ("gradients/tape.py", "from ownerwise.owners import Owners", "nothing but errors"),
        ("accounting/pld.py", "from ownerwise import Plan", "the room that defines it"),
        ("files.py", "from ownerwise.owners import Owners", "nothing but errors"),
        ("planning/table.py", "from ownerwise.planning.plans import Plan", "cycle"),
        ("accounting/schedule.py", "from ownerwise.accounting import epsilon", "cycle"),
    ],
)
def test_a_backward_import_is_found(module, statement, message, tmp_path):
    package = tmp_path / "ownerwise"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert order_problems(package) == []
    with (package / module).open("a") as file:
        file.write(f"\n{statement}\n")
    problems = order_problems(package)
    assert len(problems) == 1
    assert message in problems[0]
