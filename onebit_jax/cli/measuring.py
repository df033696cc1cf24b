"""Times what ``plan`` can time here: an update, and the link between processes."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import onebit_jax

#: Larger updates are not run, but scaled up from this size: they take as long per entry.
LARGEST_UPDATE = 25_000_000

#: Entries of one parameter array, as of a matrix in a larger model.
LEAF = 2**20

#: Bytes of the array that is summed over the processes.
LINK_BYTES = 16 * 2**20

_TIMES = 5


def median_seconds(run: Callable[[], Any], times: int = _TIMES) -> float:
    """Median time of a call, after one that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def update_seconds(tx: optax.GradientTransformation, params: int, **extra: Any) -> float:
    """Seconds of one update of so many float32 parameters here, and adding it to them.

    ``extra`` are further arguments of ``tx.update``.
    """
    n = min(params, LARGEST_UPDATE)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, weights, **extra)
        return optax.apply_updates(weights, updates), state

    sizes = [min(LEAF, n - start) for start in range(0, n, LEAF)]
    gradients = [jnp.linspace(-1.0, 1.0, size) for size in sizes]
    weights = [jnp.zeros(size) for size in sizes]
    held = [weights, tx.init(weights)]

    def run() -> Any:
        held[:] = step(*held, gradients)
        return held

    return median_seconds(run) * params / n


def adam_seconds(params: int) -> float:
    """Of ``optax.adam``."""
    with jax.numpy_dtype_promotion("standard"):
        return update_seconds(optax.adam(1e-3), params)


def onebit_seconds(params: int) -> float:
    """Of a 1-bit round of 1-bit Adam, but for the exchange."""
    tx = onebit_jax.onebit_adam(1e-3, axis_name=None, variance=1)
    return update_seconds(tx, params, exact=False)


def join_processes() -> int:
    """How many processes there are, after joining them if the environment names others."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ and not jax.distributed.is_initialized():
        jax.distributed.initialize()
    return jax.process_count()


def link_rate() -> float:
    """Bits per second of the link between the processes, by an all-reduce among them.

    Returns:
      What the ring formula has each send, over the median time: the rate that an
      exchange reaches, which is less than that of the link.
    """
    firsts = {d.process_index: d for d in reversed(jax.devices())}
    devices = np.array([firsts[i] for i in sorted(firsts)])
    mesh, w = Mesh(devices, ("processes",)), len(devices)
    total = jax.jit(jax.shard_map(
        lambda x: lax.psum(x, "processes"), mesh=mesh, in_specs=P("processes"), out_specs=P()
    ))
    mine = np.ones(LINK_BYTES // 4, np.float32)
    sharding = jax.sharding.NamedSharding(mesh, P("processes"))
    x = jax.make_array_from_process_local_data(sharding, mine)
    return 2 * (w - 1) / w * LINK_BYTES * 8 / median_seconds(lambda: total(x))
