"""Time one private step of jax_privacy, in an environment of its own.

    python -m venv peers && peers/bin/pip install jax-privacy
    peers/bin/python benchmarks/peers.py mlp          # or: mnist

`benchmarks/step.py --peers peers/bin/python` runs this script and adds its figures. They are not
interleaved with those of torch, so the machine must be idle. The networks, batches, clip norm and
noise are those of `benchmarks/models.py` and `benchmarks/step.py`. jax_privacy is timed at several
micro-batch sizes; the best counts.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

import numpy as np

SECONDS = 4.0


def best(step, seconds: float = SECONDS) -> float:
    """Return the shortest time of a step, in milliseconds."""
    for _ in range(3):
        step()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def networks(name: str):
    """Return initial parameters, the loss of one record, and a batch, for JAX."""
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)

    def normal(*shape: int):
        return jnp.asarray(0.1 * random.standard_normal(shape), jnp.float32)

    def dense(x, layer):
        return x @ layer[0] + layer[1]

    def mlp(parameters, x):
        for layer in parameters[:-1]:
            x = jax.nn.relu(dense(x, layer))
        return dense(x, parameters[-1])

    def mnist(parameters, x):
        x = x[None]
        for kernel, bias, stride, padding in (
            (*parameters[0], 2, [(2, 2), (2, 2)]),
            (*parameters[1], 2, "VALID"),
        ):
            x = jax.lax.conv_general_dilated(
                x, kernel, (stride, stride), padding, dimension_numbers=("NCHW", "OIHW", "NCHW")
            )
            x = jnp.tanh(x + bias[:, None, None])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
        x = jnp.tanh(dense(x.reshape(-1), parameters[2]))
        return dense(x, parameters[3])

    if name == "mlp":
        sizes = [21, 47, 47, 47, 3]
        parameters = [(normal(i, o), normal(o)) for i, o in pairwise(sizes)]
        forward, inputs, batch, classes = mlp, (21,), 256, 3
    elif name == "mnist":
        parameters = [
            (normal(16, 1, 8, 8), normal(16)), (normal(32, 16, 4, 4), normal(32)),
            (normal(512, 32), normal(32)), (normal(32, 10), normal(10)),
        ]  # fmt: skip
        forward, inputs, batch, classes = mnist, (1, 28, 28), 512, 10
    else:
        raise SystemExit(f"no network {name!r} for JAX; there are mlp and mnist")

    def loss(parameters, x, y):
        return -jax.nn.log_softmax(forward(parameters, x))[y]

    x = jnp.asarray(random.standard_normal((batch, *inputs)), jnp.float32)
    return parameters, loss, x, jnp.asarray(random.integers(0, classes, batch))


def jax_privacy(name: str) -> dict[str, float]:
    """Return the milliseconds of a plain step and of jax_privacy's at each micro-batch size."""
    import jax
    from jax_privacy import clipping

    parameters, loss, x, y = networks(name)
    found = {}

    def plain(parameters, x, y, key):
        def mean(p):
            return jax.vmap(loss, (None, 0, 0))(p, x, y).mean()

        return jax.tree.map(lambda p, g: p - 0.01 * g, parameters, jax.grad(mean)(parameters))

    def private(size):
        clipped = clipping.clipped_grad(
            loss, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False,
            microbatch_size=size,
        )  # fmt: skip

        def step(parameters, x, y, key):
            sums = clipped(parameters, x, y)
            leaves, tree = jax.tree.flatten(sums)
            keys = jax.random.split(key, len(leaves))
            noised = [g + jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
            sums = jax.tree.unflatten(tree, noised)
            return jax.tree.map(lambda p, g: p - 0.01 * g / len(x), parameters, sums)

        return step

    sizes = [None, *(s for s in (16, 32, 64, 128, 256) if s < len(x) and len(x) % s == 0)]
    steps = {"plain JAX": plain}
    steps |= {f"jax_privacy, micro-batch {size or 'all'}": private(size) for size in sizes}
    key = jax.random.key(0)
    for label, step in steps.items():
        compiled = jax.jit(step)
        found[label] = best(lambda f=compiled: jax.block_until_ready(f(parameters, x, y, key)))
    return found


if __name__ == "__main__":
    print(json.dumps(jax_privacy(sys.argv[1])))
