import pytest
from hypothesis import settings

from ownerwise.training import outside_the_plan

# The same cases in every run; `make test-long` draws fresh ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _no_earlier_trainings(monkeypatch):
    """Let every test be a process of its own for the count of trainings on the same owners."""
    monkeypatch.setattr(outside_the_plan, "_trainings", type(outside_the_plan._trainings)())
