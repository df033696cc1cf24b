"""What a compiled step keeps and needs, in bytes per parameter; nothing is run."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import AXIS, mesh
from programs import gpt2_leaves

import onebit_jax

#: Means of nu by 512 entries, which the floor needs in every 1-bit round.
SPANS = 4 / 512


def bytes_per_parameter(tx, shapes, w):
    """``(state, temporaries)`` of one device; the parameters and the state are donated."""
    on = mesh(w)
    params = {f"p{i}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    with jax.set_mesh(on):
        state = jax.eval_shape(tx.init, params)
    specs = onebit_jax.state_specs(state, AXIS)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((w, *p.shape), p.dtype), params)

    def step(params, state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    in_specs = (jax.tree.map(lambda _: P(), params), specs, jax.tree.map(lambda _: P(AXIS), grads))
    mapped = jax.shard_map(step, mesh=on, in_specs=in_specs, out_specs=in_specs[:2])
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec))
    args = jax.tree.map(place, (params, state, grads), in_specs)
    with jax.numpy_dtype_promotion("standard"):  # for optax.adam
        lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(*args)
    memory = lowered.compile().memory_analysis()
    n = sum(map(math.prod, shapes))
    held = memory.argument_size_in_bytes / n - 8  # without parameters and gradients
    assert memory.alias_size_in_bytes >= (4 + held) * n - 1000, "all of it is updated in place"
    return held, memory.temp_size_in_bytes / n


def onebit(**options):
    return onebit_jax.onebit_adam(1e-3, AXIS, **options)


ADAM = optax.chain(onebit_jax.exact_mean(AXIS), optax.adam(1e-3))


@pytest.mark.parametrize(("w", "tx", "state", "most"), [
    (8, ADAM, 4 + 4, 8),
    (8, onebit(), 4 + 4 + 4 + 4 / 8 + SPANS, 8),
    *(pytest.param(w, onebit(**options), state + SPANS, most, marks=pytest.mark.slow)
      for w, options, state, most in (
          (2, {}, 4 + 4 + 4, 8),
          (2, {"error_dtype": "bfloat16"}, 4 + 4 + 2, 8),
          (8, {"error_dtype": "bfloat16"}, 4 + 4 + 2 + 2 / 8, 8),
          # The first moment is copied to float32 as a whole.
          (8, {"error_dtype": "bfloat16", "mu_dtype": "bfloat16"}, 2 + 4 + 2 + 2 / 8, 10),
      )),
])
def test_100_million_parameters(w, tx, state, most):
    held, temporaries = bytes_per_parameter(tx, [(100_000_000,)], w)
    print(f"{held:.3f} bytes of state, {temporaries:.2f} of temporaries per parameter")
    assert held <= state + 1e-4
    assert temporaries <= most + 1e-4


@pytest.mark.slow
def test_100_million_parameters_in_many_leaves():
    shapes = list(gpt2_leaves(768, 50257, 1024, blocks=8))
    held, temporaries = bytes_per_parameter(onebit_jax.onebit_adam(1e-3, AXIS), shapes, 8)
    print(f"{held:.3f} bytes of state, {temporaries:.2f} of temporaries per parameter")
    assert held <= 4 + 4 + 4 + 4 / 8 + SPANS + 1e-2  # chunks of whole words
    assert temporaries <= 8
