"""The software versions a run used, without host, user or folder names."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

_PACKAGES = ("ownerwise", "torch", "numpy", "dp-accounting")


def environment() -> dict[str, Any]:
    """Return the versions, the platform and the number of threads."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
