"""`torchrun --standalone --nproc-per-node=2`: the command line, and a loop of one's own."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from ownerwise.audit import load_audits
from ownerwise.runs import Run
from ownerwise.step import read_account
from tools import training_tools as tools

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"
SCRIPT = """
import sys
import numpy as np
import torch
import ownerwise as ow

torch.manual_seed(torch.seed())
model = torch.nn.Linear(4, 3)
owners = ow.Owners(np.resize(["a", "b"], 200), {"a": 1.0, "b": 4.0}, delta=1e-5)
plan = ow.plan(owners, steps=5, batch_size=20)
data = torch.ones(200, 4), torch.zeros(200, dtype=torch.int64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    ow.PrivateStep(model, plan, optimizer, torch.nn.functional.cross_entropy)
except ow.OwnerwiseError as error:
    alone = str(error)
torch.distributed.init_process_group("gloo")
stream = ow.SecretStream()
step = ow.PrivateStep(model, plan, optimizer, torch.nn.functional.cross_entropy, stream=stream)
drawn = []
for batch in ow.PoissonBatches(data, plan, stream=stream):
    step(batch)
    drawn.append(batch.indices)
step.save(sys.argv[1] + "/own")
found = {"alone": alone, "model": model.state_dict(), "drawn": drawn}
torch.save(found, f"{sys.argv[1]}/{torch.distributed.get_rank()}.pt")
torch.distributed.destroy_process_group()
"""


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_a_loop_of_ones_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun(str(script), str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert "torchrun started 2 processes, but there is no process group" in second["alone"]
    assert tools.same(first["model"], second["model"])
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert not set(one) & set(other)
        assert 0 <= len(one) - len(other) <= 1
    assert read_account(tmp_path / "own").spent == 5


def test_the_command_line(tmp_path):
    done = torchrun(
        "-m", "ownerwise", "train", str(EXAMPLE), "--folder", str(tmp_path / "run"),
        "--set", "plan.steps=12", "--set", "plan.method=uniform",
    )  # fmt: skip
    run = Run.load(tmp_path / "run")
    assert run.private
    assert run.updates == run.steps_spent == 12
    assert run.config["processes"] == 2
    assert done.stdout.count("validation accuracy") == 1
    audited = torchrun("-m", "ownerwise", "audit", str(tmp_path / "run"), "--canaries", "80")
    (audit,) = load_audits(tmp_path / "run")
    assert audit.passed
    assert audit.compared > 20
    assert audited.stdout.count("white-box, on 80 canaries, 12 steps") == 1
    assert "## Audit" in (tmp_path / "run" / "CARD.md").read_text()
