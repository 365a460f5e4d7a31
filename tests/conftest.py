import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The same cases in every run; `make test-long` draws fresh ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
