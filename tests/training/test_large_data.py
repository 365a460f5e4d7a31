"""Data larger than memory: a file of 100 GB, most of which is a hole, trains in little memory."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
import numpy as np, torch
import ownerwise as ow
from ownerwise.files import write_json

RECORDS, NUMBERS = 1_000_000, 25_600  # of 4 bytes: 102.4 GB
path, out = sys.argv[1:]
inputs = np.lib.format.open_memmap(path, "w+", np.float32, (RECORDS, NUMBERS))
rng = np.random.default_rng(0)
targets = np.arange(RECORDS) % 2
for record in rng.integers(RECORDS, size=200).tolist():  # the others are zeros
    inputs[record] = rng.normal(size=NUMBERS)
inputs.flush()
inputs = np.load(path, mmap_mode="r")

plan = ow.plan(ow.Owners(np.arange(RECORDS) % 3, {0: 1.0, 1: 2.0, 2: 4.0}, 1e-7), "sample",
               steps=3, batch_size=32)
model = torch.nn.Linear(NUMBERS, 2)
options = {"lr": 0.1, "progress": False}
held_out = torch.zeros(4, NUMBERS), torch.zeros(4, dtype=torch.long)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = ow.Trainer(model, plan, **options).fit((inputs, targets), validation=held_out)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_json(out, {"before": before, "peak": peak, "steps": run.history[-1]["step"],
                 "bytes": inputs.nbytes, "private": run.private})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured in KB on Linux only")
def test_100_gigabytes_train_in_a_few_hundred_megabytes(tmp_path):
    """The largest batch is about 6 MB; the rest is torch's own, and the plan of a million rows."""
    data, out = tmp_path / "inputs.npy", tmp_path / "memory.json"
    subprocess.run([sys.executable, "-c", PROGRAM, data, out], check=True, timeout=300)
    assert data.stat().st_blocks * 512 < 100e6  # on disk, almost all of the file is a hole
    found = json.loads(out.read_text())
    assert found["bytes"] == 102_400_000_000
    assert found["steps"] == 3
    assert found["private"]
    assert found["peak"] - found["before"] < 300_000  # KB
