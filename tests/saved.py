"""A small run whose state is saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from meshes import AXIS, mesh

import onebit_jax
from onebit_jax import checkpoints

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 12)).astype(np.float32)
Y = (X @ RNG.normal(size=(12, 5)) + 0.1 * RNG.normal(size=(64, 5))).astype(np.float32)


def loss_fn(params, batch):
    x, y = batch
    out = x @ params["w"].astype(jnp.float32) + params["b"][None]
    return jnp.mean((out - y) ** 2)


def build(w, axis_type=AxisType.Auto, every_k=1, **kwargs):
    """A train step on w workers and a fresh state; the tree has odd leaves too."""
    kwargs = {"variance": onebit_jax.refresh(8, exact_steps=25), **kwargs}
    tx = onebit_jax.onebit_adamw(optax.linear_schedule(1e-1, 0.0, 260), AXIS, **kwargs)
    if every_k > 1:
        tx = onebit_jax.accumulate(tx, every_k)
    params = {"w": jnp.zeros((12, 5)), "b": jnp.zeros(5), "none": None, "empty": jnp.zeros((0, 3))}
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(w, axis_type))
    with jax.set_mesh(mesh(w, axis_type)):
        return step, step.place((params, tx.init(params)))


def train(step, state, start, stop):
    for t in range(start, stop):
        rows = np.random.default_rng(t).integers(0, 64, 48)
        state, _ = step(state, (X[rows], Y[rows]))
    return state, float(loss_fn(jax.device_get(state[0]), (X, Y)))


def save(folder, step, state, **options):
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options)) as manager:
        manager.save(step, args=ocp.args.Composite(**checkpoints.items(state)))


def load(folder, like, **kwargs):
    with ocp.CheckpointManager(folder) as manager:
        return checkpoints.restore(manager, like, **kwargs)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree_util.tree_leaves_with_path(expected)
    for (path, old), new in zip(named, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        assert (new.shape, new.dtype) == (old.shape, old.dtype), name
        if not old.size:
            continue  # JAX fails to convert some empty sharded arrays
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim), name
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old), err_msg=name)
