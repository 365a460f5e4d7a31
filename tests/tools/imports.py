"""What the modules of a package import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Edge:
    """An import statement: who imports what, and inside which function ("" at module level)."""

    importer: str
    imported: str
    function: str
    line: int

    def __str__(self) -> str:
        inside = f" in {self.function}" if self.function else ""
        return f"{self.importer}, line {self.line}{inside}: imports {self.imported}"


def modules(package: Path) -> dict[str, Path]:
    """Return the modules of a package by their full names; a package is its `__init__`."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted(package.rglob("*.py"))
    }


def edges(package: Path) -> list[Edge]:
    """Return every import within a package, TYPE_CHECKING and functions included.

    `from package.room import name` imports the module `package.room.name` if there is one, and
    otherwise a name of `package.room`, which is then written `package.room:name`.
    """
    known = modules(package)
    found = []
    for module, path in known.items():
        for function, statement in _imports_of(path.read_text(encoding="utf-8")):
            for target in _targets(statement, known, package.name):
                found.append(Edge(module, target, function, statement.lineno))
    return found


@cache
def _imports_of(source: str) -> list[tuple[str, ast.Import | ast.ImportFrom]]:
    """Return the import statements of a module; copies of a package share most of their source."""
    return list(_imports(ast.parse(source)))


def _imports(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield inside, child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _imports(child, f"{inside}.{child.name}".lstrip("."))
        else:
            yield from _imports(child, inside)


def _targets(
    statement: ast.Import | ast.ImportFrom, known: dict[str, Path], package: str
) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
        yield from (name for name in names if name.partition(".")[0] == package)
        return
    assert statement.level == 0, "imports are absolute"
    module = statement.module or ""
    if module.partition(".")[0] != package:
        return
    for alias in statement.names:
        inner = f"{module}.{alias.name}"
        yield inner if inner in known else f"{module}:{alias.name}"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def class_names(package: Path) -> dict[str, list[str]]:
    """Return the modules in which a class of each name is defined, nested classes included."""
    found: dict[str, list[str]] = {}
    for module, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found
