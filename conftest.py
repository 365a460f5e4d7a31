"""What all tests share: numerical libraries use one thread, in this process and those it starts."""

import os

# Before torch and numpy are loaded. Each worker of pytest has a core of its own; on small models,
# more threads would mostly wait for each other. Tests of several threads set their number.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
