"""A prototype of the step on parameters that FSDP2 shards: exact, but not yet part of the package.

Every process holds a shard of each parameter and of the optimizer's state. It gathers the
parameters, sums the clipped gradients of its own elements, and keeps its own shards of the noised
total. The noise comes from the one stream that all processes share, so it is added once.

What is missing before the package can offer this (`step.wrappers` refuses such models so far):

- Layers are gathered all at once. To save memory, they must be gathered one by one in the forward
  and backward pass, where the tape needs parameters that are whole and stay the same objects.
- The total reaches every process. A reduce-scatter would send each only its own shards.
- A stream must be able to start at an offset; here, every process draws all of the noise.
- The watch for undeclared changes, checkpoints, averaging and evaluation need whole parameters.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

import ownerwise as ow
from tools import groups, step_tools

STEPS = 3


def whole(parameter):
    return parameter.full_tensor()


def sharded_step(step, optimizer, shards, batch):
    """One step in which each process updates its shards only."""
    with torch.no_grad():
        for parameter, shard in zip(step.model.parameters(), shards, strict=True):
            parameter.copy_(whole(shard))  # gathered for the forward and backward pass
    randomness = step._randomness.of_step(batch.step)
    sums = step.clipped_sum(batch, randomness)
    noised = step._randomness.noised(batch.step, sums, 1.0, 1 / step.plan.expected_batch_size)
    for parameter, shard in zip(step.model.parameters(), shards, strict=True):
        mesh = shard.device_mesh
        shard.grad = distribute_tensor(noised[parameter], mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()


def trained(plan):
    """Train with sharded parameters, and as usual; return both models and the size of a share."""
    torch.set_default_dtype(torch.float64)
    model, *data = step_tools.example("cnn", step_tools.RECORDS)
    sharded, computing = copy.deepcopy(model), copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(sharded, mesh=mesh)
    shards = list(sharded.parameters())
    optimizer = torch.optim.Adam(shards, lr=0.1)
    usual = step_tools.make_step(
        model, functional.cross_entropy, plan=plan, weights=ow.INO(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
    )  # fmt: skip
    step = step_tools.make_step(computing, functional.cross_entropy, plan=plan, weights=ow.INO())
    with pytest.raises(ow.OwnerwiseError, match="is sharded over processes"):
        ow.PrivateStep(sharded, plan, optimizer, functional.cross_entropy)
    batches = [
        ow.PoissonBatches(tuple(data), plan, stream=step_tools.seeded(), steps=STEPS)
        for _ in range(2)
    ]
    for batch, same in zip(*batches, strict=True):
        usual(batch)
        sharded_step(step, optimizer, shards, same)
    held = sum(shard.to_local().numel() for shard in shards)
    found = torch.cat([whole(shard).detach().flatten() for shard in shards])
    return found, step_tools.weights_of(model), held


@pytest.mark.long
def test_sharded_parameters_get_the_same_updates():
    found = groups.in_group(trained, 2, step_tools.make_plan())
    numbers = len(found[0][1])
    assert sum(held for *_, held in found) == numbers
    for sharded, usual, _ in found:
        assert torch.equal(sharded, found[0][0])
        torch.testing.assert_close(sharded, usual, rtol=0, atol=1e-12)
