import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from meshes import AXIS, mesh, run

import onebit_jax

PARAMS = {"w": np.zeros((3, 70), np.float32), "b": np.zeros(5, np.float32)}


def test_specs_shard_what_differs_between_workers_and_nothing_else():
    tx = optax.chain(
        onebit_jax.clip_by_global_norm(1.0, AXIS),
        onebit_jax.accumulate(onebit_jax.onebit_adam(1e-2, AXIS), 2),
    )
    with jax.set_mesh(mesh(4)):
        state = tx.init(PARAMS)
    specs = onebit_jax.state_specs((PARAMS, state), AXIS)
    is_spec = lambda x: isinstance(x, P)
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure((PARAMS, state))
    leaves = jax.tree_util.tree_leaves_with_path((PARAMS, state))
    flat = jax.tree.leaves(specs, is_leaf=is_spec)
    for (path, leaf), spec in zip(leaves, flat, strict=True):
        name = jax.tree_util.keystr(path)
        sharded = any(f in name for f in ("worker_error", "server_error", "worker_sum", "sent"))
        assert spec == (P(AXIS) if sharded else P()), name
        assert not sharded or leaf.shape[0] == 4, name


def test_a_parameter_may_be_called_like_a_field():
    specs = onebit_jax.state_specs({"worker_error": jnp.zeros(3)}, AXIS)
    assert specs == {"worker_error": P()}


@pytest.mark.parametrize("inside", [True, False])
def test_init_inside_and_outside_the_mesh_agree(inside):
    tx = onebit_jax.onebit_adam(1e-2, AXIS)
    with jax.set_mesh(mesh(4)):
        outside = tx.init(PARAMS)
    specs = onebit_jax.state_specs(outside, AXIS)
    within = jax.jit(jax.shard_map(tx.init, mesh=mesh(4), in_specs=P(), out_specs=specs))(PARAMS)
    assert jax.tree.map(jnp.shape, within) == jax.tree.map(jnp.shape, outside)


@pytest.mark.parametrize("check_vma", [True, False])
def test_model_parallel_shards_never_mix(check_vma):
    """Mesh (2 data, 2 model): equal to two separate runs of 2 workers."""
    n, steps = 300, 12
    rng = np.random.default_rng(0)
    # (data, model, step, entry): data-parallel worker d has shard m of the gradient.
    grads = rng.normal(size=(2, 2, steps, n)).astype(np.float32)
    shared = rng.normal(size=(2, steps, 9)).astype(np.float32)
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=onebit_jax.refresh(2, exact_steps=3))

    def train(grads, shared):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = {"sharded": jnp.zeros(n), "shared": jnp.zeros(9)}
        if check_vma and "model" in jax.sharding.get_abstract_mesh().axis_names:
            params["sharded"] = onebit_jax.per_worker(params["sharded"], "model")
        g = {"sharded": grads, "shared": shared}
        return jax.lax.scan(step, (params, tx.init(params)), g)[0][0]

    two_by_two = jax.make_mesh((2, 2), (AXIS, "model"), devices=jax.devices()[:4],
                               axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda g, s: train(g[0, 0], s[0]), mesh=two_by_two,
        in_specs=(P(AXIS, "model"), P(AXIS)),
        out_specs={"sharded": P("model"), "shared": P()}, check_vma=check_vma,
    )
    together = jax.jit(mapped)(grads, shared)
    for m in range(2):
        alone = run("vma", 2, train, grads[:, m], shared)
        # Not the same program: a shared leaf's scale is the same, the floor's
        # reference for a leaf without gradient is not used here.
        np.testing.assert_allclose(
            np.asarray(together["sharded"]).reshape(2, n)[m], alone["sharded"][0],
            rtol=1e-5, atol=1e-6,
        )
        np.testing.assert_allclose(together["shared"], alone["shared"][0], rtol=1e-5, atol=1e-6)


def test_specs_of_model_parallel_parameters():
    param_specs = {"w": P(None, "model"), "b": P()}
    tx = onebit_jax.onebit_adam(1e-2, AXIS)
    two_by_two = jax.make_mesh((2, 2), (AXIS, "model"), devices=jax.devices()[:4],
                               axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(two_by_two):
        shapes = jax.eval_shape(tx.init, PARAMS)
    specs = onebit_jax.state_specs(shapes, AXIS, param_specs)
    adam = specs[0]
    assert adam.mu == adam.nu == param_specs
    assert adam.errors.worker_error == {"w": P(AXIS, None, "model"), "b": P(AXIS)}
    assert adam.nu_spans == {"w": P(("model",)), "b": P(None)}
    assert adam.errors.server_error == {"w": None, "b": None}, "two workers need no server"
    assert adam.count == P()
    state = jax.jit(jax.shard_map(
        tx.init, mesh=two_by_two, in_specs=(param_specs,), out_specs=specs,
    ))(PARAMS)
    assert state[0].errors.worker_error["w"].shape == (2, 3, 70)
    assert state[0].nu_spans["w"].shape == (2,)
    assert state[0].errors.server_error["w"] is None, "two workers need no server"


@pytest.mark.parametrize("new", [1, 2, 3, 8])
def test_resizing_keeps_the_mean_worker_error_and_the_server_error(new):
    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(1e-2, AXIS, variance=1), 3)

    def worker(grads):
        def step(state, g):
            return tx.update(g, state)[1], None

        return jax.lax.scan(step, tx.init(PARAMS), grads)[0]

    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: rng.normal(size=(4, 10, *p.shape)).astype(np.float32), PARAMS
    )
    # run() stacks the workers; per-worker leaves then have (4, 1, ...).
    stacked = jax.device_get(run("no_vma", 4, worker, grads))
    specs = onebit_jax.state_specs(stacked, AXIS)
    state = jax.tree.map(
        lambda x, s: x[:, 0] if s == P(AXIS) else x[0], stacked, specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    resized = onebit_jax.resize_workers(state, new)
    old, fresh = state.inner_state[0].errors, resized.inner_state[0].errors
    for name, p in PARAMS.items():
        assert np.asarray(old.worker_error[name]).any()
        flat = np.asarray(old.server_error[name]).reshape(-1)[: p.size]
        assert flat.any()
        worker_mean = old.worker_error[name].mean(axis=0)
        if new <= 2:  # no server: its error is the workers' now
            worker_mean = worker_mean + flat.reshape(p.shape)
            assert fresh.server_error[name] is None
        else:
            now = np.asarray(fresh.server_error[name])
            np.testing.assert_array_equal(now.reshape(-1)[: p.size], flat)
        for now, mean in ((fresh.worker_error, worker_mean),
                          (resized.worker_sum, state.worker_sum[name].mean(axis=0))):
            assert now[name].shape == (new, *p.shape)
            np.testing.assert_allclose(now[name].mean(axis=0), mean, atol=1e-6)
    with jax.set_mesh(mesh(new)):
        assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, tx.init(PARAMS))
    assert onebit_jax.bytes_sent(resized) == onebit_jax.bytes_sent(state) > 0
    np.testing.assert_array_equal(resized.inner_state[0].nu["w"], state.inner_state[0].nu["w"])
