"""What all tests share: one thread per process, and each privacy cost is computed once."""

import os

# Before torch and numpy are loaded. Each worker of pytest has a core of its own; on small models,
# more threads would mostly wait for each other. Tests of several threads set their number.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the core to others

from functools import cache  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _each_cost_is_computed_once():
    """Remember what accountants returned to planning and verification: many tests make one plan.

    A cost is a function of numbers alone, and only the same numbers get a stored one. Whatever
    plans, verifies and refuses runs as ever; `pld.epsilon` and `rdp.epsilon` store nothing.
    """
    from ownerwise.accounting import RunCost, reference

    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((RunCost, "epsilon"), (reference, "epsilon")):
            patch.setattr(place, name, cache(getattr(place, name)))
        yield
