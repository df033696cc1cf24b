"""Models, in plain JAX, and methods of the network benchmark."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import onebit_jax

PyTree = Any


class Model(NamedTuple):
    """What a train step is made of.

    Attributes:
      init: a key to the parameters.
      batch: a NumPy generator to one worker's batch.
      loss: ``loss(params, batch)``, a mean.
    """

    init: Callable[[jax.Array], PyTree]
    batch: Callable[[np.random.Generator], PyTree]
    loss: Callable[[PyTree, PyTree], jax.Array]


def mlp(widths: tuple[int, ...], examples: int) -> Model:
    """Dense layers with ReLU between them and a mean squared loss."""

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, len(widths) - 1)
        return [_dense(k, *pair) for k, *pair in zip(keys, widths, widths[1:], strict=False)]

    def batch(rng: np.random.Generator) -> PyTree:
        x = rng.normal(size=(examples, widths[0])).astype(np.float32)
        return x, rng.normal(size=(examples, widths[-1])).astype(np.float32)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        h, y = batch
        for layer in params[:-1]:
            h = jax.nn.relu(_apply(layer, h))
        return jnp.mean((_apply(params[-1], h) - y) ** 2)

    return Model(init, batch, loss)


class Sizes(NamedTuple):
    """Of a :func:`transformer`."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    examples: int


def transformer(sizes: Sizes) -> Model:
    """A decoder with 16 leaves per layer and 10 around them, predicting the next token."""
    width = sizes.width

    def layer(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 6)
        square = {n: _dense(k, width, width) for n, k in zip("qkvo", keys[:4], strict=True)}
        ends = {"up": _dense(keys[4], width, 4 * width), "down": _dense(keys[5], 4 * width, width)}
        return {**square, **ends, "norm1": _norm(width), "norm2": _norm(width)}

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, sizes.layers + 4)
        return {
            "token": 0.02 * jax.random.normal(keys[0], (sizes.vocabulary, width)),
            "position": 0.02 * jax.random.normal(keys[1], (sizes.length, width)),
            "norm": _norm(width),
            "layers": [layer(k) for k in keys[4:]],
            "transform": _dense(keys[2], width, width),
            "last_norm": _norm(width),
            "head": _dense(keys[3], width, sizes.vocabulary),
        }

    def batch(rng: np.random.Generator) -> PyTree:
        size = (sizes.examples, sizes.length + 1)
        return rng.integers(sizes.vocabulary, size=size, dtype=np.int32)

    def loss(params: PyTree, tokens: PyTree) -> jax.Array:
        h = params["token"][tokens[:, :-1]] + params["position"][None]
        h = _normalise(params["norm"], h)
        for p in params["layers"]:
            h = h + _attention(p, _normalise(p["norm1"], h), sizes.heads)
            up = jax.nn.gelu(_apply(p["up"], _normalise(p["norm2"], h)))
            h = h + _apply(p["down"], up)
        h = _normalise(params["last_norm"], jax.nn.gelu(_apply(params["transform"], h)))
        log_p = jax.nn.log_softmax(_apply(params["head"], h))
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    return Model(init, batch, loss)


#: By the names of the command line; tiny is for tests.
MODELS = {
    "mlp": mlp((1024, *[2048] * 6, 1024), examples=16),
    "transformer": transformer(
        Sizes(layers=10, width=448, heads=7, vocabulary=256, length=32, examples=4)
    ),
    "tiny": mlp((64, 384, 384, 64), examples=4),
}

#: A small learning rate: the numbers do not matter, but must stay finite.
RATE = 1e-4

#: Measured besides the methods: the exchange of a step of onebit_adam, alone.
EXCHANGE = "exchange"

#: The default quantizer and options, and the paper's. One exact round, then 1-bit
#: rounds, with the stage chosen in the step as in a real run.
#: "adam" is a step by hand, see :func:`adam_by_hand`.
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(RATE),
    "adam_bf16": lambda: optax.chain(
        onebit_jax.exact_mean("data", "bfloat16"), optax.adam(RATE)
    ),
    "onebit_adam": lambda: onebit_jax.onebit_adam(RATE, "data", variance=1),
    "paper": lambda: onebit_jax.paper_1bit_adam(RATE, "data", warmup_steps=1),
}


def adam_by_hand(loss: Callable[..., jax.Array], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """The step of plain data-parallel Adam: a mean of the gradients, and ``optax.adam``."""
    tx = METHODS["adam"]()

    def local(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        value, grads = jax.lax.pmean((value, grads), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    everywhere, data = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, data), out_specs=everywhere, check_vma=False
    )
    return jax.jit(step, donate_argnums=0)


def _dense(key: jax.Array, n_in: int, n_out: int) -> PyTree:
    return {"w": jax.random.normal(key, (n_in, n_out)) * n_in**-0.5, "b": jnp.zeros(n_out)}


def _apply(layer: PyTree, x: jax.Array) -> jax.Array:
    y = x @ layer["w"]
    return y + jnp.broadcast_to(layer["b"], y.shape)


def _norm(width: int) -> PyTree:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _normalise(p: PyTree, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    unit = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return unit * jnp.broadcast_to(p["scale"], x.shape) + jnp.broadcast_to(p["bias"], x.shape)


def _attention(p: PyTree, x: jax.Array, heads: int) -> jax.Array:
    split = lambda y: y.reshape(*y.shape[:-1], heads, -1)
    q, k, v = (split(_apply(p[name], x)) for name in "qkv")
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return _apply(p["o"], out.reshape(x.shape))
