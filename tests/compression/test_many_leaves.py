"""A tree of many leaves costs about what one large leaf costs."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import AXIS, mesh
from programs import always, gpt2_leaves

import onebit_jax


def prepared(shapes, w):
    """A compiled 1-bit update and its arguments on the mesh."""
    tx = onebit_jax.scale_by_onebit_adam(AXIS, variance=always(False))
    on = mesh(w)
    shapes = {f"p{i}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    with jax.set_mesh(on):
        state = jax.eval_shape(tx.init, shapes)
    specs = onebit_jax.state_specs(state, AXIS)
    is_spec = lambda x: isinstance(x, P)
    shardings = jax.tree.map(lambda s: NamedSharding(on, s), specs, is_leaf=is_spec)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    state = jax.jit(lambda: zeros(state), out_shardings=shardings)()
    grads = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.ones((w, *x.shape), x.dtype), shapes),
        out_shardings=NamedSharding(on, P(AXIS)),
    )()

    def update(state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
        return state, sum(jnp.sum(u[:1]) for u in jax.tree.leaves(updates))

    mapped = jax.shard_map(update, mesh=on, in_specs=(specs, P(AXIS)), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0), state, grads


@pytest.mark.slow
def test_49_leaves_cost_at_most_one_and_a_half_times_one_leaf():
    w = 4
    shapes = list(gpt2_leaves(768, 50257, 1024, blocks=4))[:49]
    sizes = [sum(map(math.prod, shapes)), 4096 * (sum(map(math.prod, shapes)) // 4096)]
    cases = [prepared(shapes, w), prepared([(4096, sizes[1] // 4096)], w)]
    seconds = [[], []]
    for _ in range(6):
        for i, (step, state, grads) in enumerate(cases):
            start = time.perf_counter()
            state, total = step(state, grads)
            jax.block_until_ready(total)
            seconds[i].append(time.perf_counter() - start)
            cases[i] = (step, state, grads)
    many, one = (np.median(s[1:]) / n for s, n in zip(seconds, sizes, strict=True))
    print(f"per parameter, many leaves over one leaf: {many / one:.2f}")
    assert many / one < 1.5
