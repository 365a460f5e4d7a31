"""Configuration files: sections, reading, and building a run from them.

May import every room but the command line.
"""

from ownerwise.config.build import assemble
from ownerwise.config.reading import read_config

__all__ = [
    "assemble",
    "read_config",
]
