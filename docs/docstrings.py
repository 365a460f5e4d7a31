"""Reference docstrings: "alpha, beta: shape of the tail" becomes one entry per name."""

import re

from griffe import Extension, Object

_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)


class SeveralNames(Extension):
    """Splits entries that describe several arguments or attributes."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = _SEVERAL.sub(_apart, obj.docstring.value)


def _apart(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))
