"""Rules that compute per-record gradients for torch functions: one file per family of layers.

A rule runs the call, taps its output, and defines how the gradient of the output is turned into
contributions. Rules see a forward pass only as a `Context`. This package may import
`contributions` and the modules that it needs, but never the tape.
"""

from ownerwise.gradients.rules.context import Context, Rule
from ownerwise.gradients.rules.fallback import fallback
from ownerwise.gradients.rules.table import RULES, WITHOUT_DATA, WITHOUT_PARAMETERS

__all__ = ["RULES", "WITHOUT_DATA", "WITHOUT_PARAMETERS", "Context", "Rule", "fallback"]
