"""Time private steps of jax_privacy and TensorFlow Privacy, each in an environment of its own.

    python -m venv jax && jax/bin/pip install jax-privacy
    python -m venv tf && tf/bin/pip install tensorflow-cpu==2.15.1 tensorflow-privacy==0.9.0
    jax/bin/python benchmarks/peers.py mlp          # or mnist, lstm; likewise tf/bin/python

`benchmarks/step.py --peers jax/bin/python,tf/bin/python` runs this script and adds its figures.
They are not interleaved with those of torch, so the machine must be idle. The networks, batches,
clip norm and noise are those of `benchmarks/models.py` and `benchmarks/step.py`. The best way of
each library counts: jax_privacy is timed at several micro-batch sizes, and with convolutions by XLA
and by matrix products, whose gradients per record XLA computes much faster on a CPU; TensorFlow
Privacy likewise, with and without XLA, by its vectorised model and, if all layers are registered
for it, by fast gradient clipping.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import numpy as np

SECONDS = 2.0
LARGEST = 50_000_000  # numbers in the gradients of a micro-batch; the machine swaps if all are kept
WORDS, LENGTH = 10_000, 20  # of the LSTM
MODELS = {"mlp": ((21,), 256, 3), "mnist": ((1, 28, 28), 512, 10), "lstm": ((LENGTH,), 256, 2)}


def best(step: Callable[[], object], seconds: float = SECONDS) -> float:
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


def batch_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up inputs and classes."""
    random = np.random.default_rng(0)
    shape, count, classes = MODELS[name]
    if name == "lstm":
        inputs = random.integers(0, WORDS, (count, *shape))
    else:
        inputs = random.standard_normal((count, *shape)).astype(np.float32)
    return inputs, random.integers(0, classes, count)


def jax_network(name: str):
    """Return initial parameters and, for each way to compute it, the loss of one record in JAX."""
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

    def convolved(x, kernel, bias):  # [1, height, width, channels], stride 2
        form = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=form)
        return jnp.tanh(x + bias)

    def multiplied(x, kernel, bias):  # likewise
        side = kernel.shape[0]
        high, wide = ((size - side) // 2 + 1 for size in x.shape[1:3])
        corners = [(i, j) for i in range(side) for j in range(side)]
        patches = [x[:, i : i + 2 * high : 2, j : j + 2 * wide : 2] for i, j in corners]
        columns = jnp.stack(patches, 3).reshape(high * wide, -1)
        found = jnp.tanh(columns @ kernel.reshape(-1, kernel.shape[-1]) + bias)
        return found.reshape(1, high, wide, -1)

    def pooled(x):  # reduce_window has a slow gradient on the CPU
        rows = jnp.maximum(x[:, 1:], x[:, :-1])
        return jnp.maximum(rows[:, :, 1:], rows[:, :, :-1])

    def mnist(convolution, parameters, x):
        x = jnp.pad(x, ((0, 0), (2, 2), (2, 2))).transpose(1, 2, 0)[None]
        for kernel, bias in parameters[:2]:
            x = pooled(convolution(x, kernel, bias))
        x = jnp.tanh(dense(x.reshape(-1), parameters[2]))
        return dense(x, parameters[3])

    def lstm(parameters, x):
        words, weights, recurrent, bias, head = parameters
        steps = words[x] @ weights + bias

        def cell(state, given):
            hidden, memory = state
            i, f, g, o = jnp.split(given + hidden @ recurrent, 4)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

        zeros = jnp.zeros(128)
        (hidden, _), _ = jax.lax.scan(cell, (zeros, zeros), steps)
        return dense(hidden, head)

    if name == "mlp":
        sizes = [21, 47, 47, 47, 3]
        parameters = [(normal(i, o), normal(o)) for i, o in pairwise(sizes)]
        forwards = {"": mlp}
    elif name == "mnist":
        parameters = [
            (normal(8, 8, 1, 16), normal(16)), (normal(4, 4, 16, 32), normal(32)),
            (normal(512, 32), normal(32)), (normal(32, 10), normal(10)),
        ]  # fmt: skip
        forwards = {
            ", convolutions": partial(mnist, convolved),
            ", matrix products": partial(mnist, multiplied),
        }
    else:
        head = normal(128, 2), normal(2)
        parameters = (
            normal(WORDS, 64), normal(64, 512), normal(128, 512), normal(512), head,
        )  # fmt: skip
        forwards = {"": lstm}

    def loss(forward, parameters, x, y):
        return -jax.nn.log_softmax(forward(parameters, x))[y]

    return parameters, {way: partial(loss, forward) for way, forward in forwards.items()}


def jax_privacy(name: str) -> dict[str, float]:
    """Return the milliseconds of a plain step and of jax_privacy's at each micro-batch size."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import clipping

    parameters, losses = jax_network(name)
    x, y = map(jnp.asarray, batch_of(name))
    found = {}

    def plain(loss):
        def step(parameters, x, y, key):
            def mean(p):
                return jax.vmap(loss, (None, 0, 0))(p, x, y).mean()

            return jax.tree.map(lambda p, g: p - 0.01 * g, parameters, jax.grad(mean)(parameters))

        return step

    def private(loss, size):
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

    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    sizes = [s for s in (1, 16, 64, 128, len(x)) if s * count <= LARGEST]
    steps = {}
    for way, loss in losses.items():
        steps[f"plain JAX{way}"] = plain(loss)
        for size in sizes:
            whole = None if size == len(x) else size
            steps[f"jax_privacy{way}, micro-batch {size}"] = private(loss, whole)
    key = jax.random.key(0)
    for label, step in steps.items():
        compiled = jax.jit(step)
        found[label] = best(lambda f=compiled: jax.block_until_ready(f(parameters, x, y, key)))
    return found


def tensorflow_privacy(name: str) -> dict[str, float]:
    """Return the milliseconds of a plain step and of TensorFlow Privacy's steps."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    from tensorflow_privacy.privacy.fast_gradient_clipping import (
        gradient_clipping_utils,
        layer_registry,
    )
    from tensorflow_privacy.privacy.keras_models.dp_keras_model import make_dp_model_class

    tf.get_logger().setLevel("CRITICAL")
    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras = tf.keras
    inputs, classes = batch_of(name)
    if name == "mnist":
        inputs = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))  # the layout of TensorFlow
    x, y = tf.constant(inputs), tf.constant(classes)

    def patches(side):
        sizes = [1, side, side, 1], [1, 2, 2, 1], [1, 1, 1, 1]
        return keras.layers.Lambda(lambda x: tf.image.extract_patches(x, *sizes, "VALID"))

    def layers(products, unrolled):
        dense = keras.layers.Dense
        if name == "mlp":
            return [*(dense(47, "relu") for _ in range(3)), dense(3)]
        if name == "mnist":
            found = [keras.layers.ZeroPadding2D(2)]
            for channels, side in ((16, 8), (32, 4)):
                if products:  # the same convolution, in a layer that fast clipping knows
                    found += [patches(side), dense(channels, "tanh")]
                else:
                    found += [keras.layers.Conv2D(channels, side, 2, activation="tanh")]
                found += [keras.layers.MaxPool2D(2, 1)]
            return [*found, keras.layers.Flatten(), dense(32, "tanh"), dense(10)]
        lstm = keras.layers.LSTM(128, unroll=unrolled)
        return [keras.layers.Embedding(WORDS, 64), lstm, dense(2)]

    def built(kind, xla, products, **options):
        start = keras.Input(inputs.shape[1:], dtype=x.dtype)
        end = start
        # gradients per record of a loop that is not unrolled raise an error
        for layer in layers(products, unrolled=kind is private):
            end = layer(end)
        model = kind(inputs=start, outputs=end, **options)
        registry = options.get("layer_registry")
        registered = gradient_clipping_utils.all_trainable_layers_are_registered
        if registry is not None and not registered(model, registry):
            raise NotImplementedError("not all layers are registered")
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum_over_batch_size"
        )
        # the legacy optimizer has a cheaper update on the CPU
        model.compile(optimizer=keras.optimizers.legacy.SGD(0.01), loss=loss)
        step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=xla)
        return lambda: float(step(x, y)["loss"])

    private = make_dp_model_class(keras.Model)
    registry = layer_registry.make_default_layer_registry()
    noised = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "use_xla": False}
    kinds = {
        "plain TensorFlow": (keras.Model, {}),
        "TensorFlow Privacy, fast clipping": (private, {**noised, "layer_registry": registry}),
        "TensorFlow Privacy, vectorised": (private, noised),
    }
    ways = (False, True) if name == "mnist" else (False,)
    found: dict[str, float] = {}
    for (title, (kind, options)), products, xla in product(kinds.items(), ways, (False, True)):
        label = title + ", matrix products" * products + ", XLA" * xla
        try:
            found[label] = best(built(kind, xla, products, **options))
        except Exception as error:  # a way that does not support the model
            print(f"{label}: {type(error).__name__}: {error}"[:90], file=sys.stderr)
    return found


def main() -> None:
    name = sys.argv[1]
    if name not in MODELS:
        raise SystemExit(f"no network {name!r} for the peers; there are {', '.join(MODELS)}")
    peers = {"jax_privacy": jax_privacy, "tensorflow_privacy": tensorflow_privacy}
    installed = [peer for peer in peers if importlib.util.find_spec(peer) is not None]
    if not installed:
        raise SystemExit(f"neither {' nor '.join(peers)} is installed in this environment")
    print(json.dumps({k: v for peer in installed for k, v in peers[peer](name).items()}))


if __name__ == "__main__":
    main()
