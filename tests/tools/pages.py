"""The documentation's pages, as the site is built."""

import importlib.util
from pathlib import Path
from types import ModuleType

_DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    """The module that fills pages in when the site is built."""
    spec = importlib.util.spec_from_file_location("generate", _DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
