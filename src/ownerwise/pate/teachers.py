"""Many small teachers trained at once: one vmapped step over a stack of networks.

Teachers are NOT private: their parameters, predictions and losses must not leave the process. Only
noised answers do (`answering`). What one teacher learns depends on its own records, on its number
and on public constants: the initial weights and the draws of batches come from a public seed, and
no kernel mixes the rows of different teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from ownerwise.errors import OwnerwiseError

_AT_ONCE = 25_000  # teachers times questions answered together


def train_teachers(
    make_model: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    shards: Sequence[np.ndarray],
    *,
    steps: int,
    batch_size: int = 32,
    lr: float = 1e-3,
    augment: Callable[[Tensor, int], Tensor] | None = None,
    seed: int = 0,
) -> Teachers:
    """Return one trained teacher for each shard.

    Each step draws `batch_size` records of every teacher, with replacement, and takes a step of
    Adam. A teacher without records keeps its initial weights.

    Args:
        make_model: returns a new network without buffers that training changes; called once per
            teacher.
        inputs, targets: the records, [records, ...] and [records].
        shards: positions of each teacher's records.
        steps: number of steps, the same for every teacher.
        batch_size: records per teacher and step.
        lr: learning rate.
        augment: function of a step's inputs, [teachers, batch, ...], and its number; it must treat
            each teacher's inputs separately.
        seed: PUBLIC seed of the initial weights and the draws of batches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [make_model() for _ in shards]
    if any(True for _ in models[0].buffers()):
        raise OwnerwiseError(
            "the network has buffers, such as those of BatchNorm; expected a network without: "
            "teachers are trained as a stack of parameters. Use GroupNorm or LayerNorm"
        )
    parameters, _ = stack_module_state(models)
    parameters = {name: value.detach().clone() for name, value in parameters.items()}
    base = models[0]

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(base, parameters, (x,)), y)

    step = vmap(grad(loss), randomness="different")
    sizes = torch.tensor([len(shard) for shard in shards])
    table = torch.zeros(len(shards), max(1, int(sizes.max())), dtype=torch.int64)
    for row, shard in enumerate(shards):
        table[row, : len(shard)] = torch.from_numpy(shard)
    optimizer = torch.optim.Adam(parameters.values(), lr=lr)
    draws = torch.Generator().manual_seed(seed)
    for number in range(steps):
        share = torch.rand(len(shards), batch_size, generator=draws, dtype=torch.float64)
        rows = table.gather(1, (share * sizes[:, None]).long())
        drawn = inputs[rows] if augment is None else augment(inputs[rows], number)
        gradients = step(parameters, drawn, targets[rows])
        for name, value in parameters.items():
            gradients[name][sizes == 0] = 0.0  # of a record that these teachers do not hold
            value.grad = gradients[name]
        optimizer.step()
    return Teachers(base, parameters)


class Teachers:
    """A stack of trained teachers; `votes` is what they say. NOT private."""

    def __init__(self, base: nn.Module, parameters: dict[str, Tensor]):
        self._base = base
        self._parameters = parameters

    def __len__(self) -> int:
        return len(next(iter(self._parameters.values())))

    def votes(self, questions: Tensor) -> np.ndarray:
        """Return the class that each teacher votes for, int64 [teachers, questions]."""

        def outputs(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self._base, parameters, (x,)).argmax(1)

        ask = vmap(outputs, in_dims=(0, None))
        with torch.no_grad():
            at_once = max(1, _AT_ONCE // len(self))
            parts = [ask(self._parameters, some) for some in questions.split(at_once)]
        return torch.cat(parts, dim=1).numpy()
