"""Flax NNX, which makes dictionaries of tuples and has a container around each array."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import AXIS, mesh

import onebit_jax
from onebit_jax import checkpoints

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 32, 8)).astype(np.float32)
Y = np.tanh(X).sum(-1, keepdims=True)


def model_of():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(8, 70, rngs=rngs), nnx.relu, nnx.Linear(70, 1, rngs=rngs))


@pytest.fixture(autouse=True)
def _as_flax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def optimizer_of(model, w, variance=5):
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=variance)
    with jax.set_mesh(mesh(w)):
        return nnx.Optimizer(model, tx, wrt=nnx.Param)


def run(w, steps, state=None, start=0):
    """``nnx.Optimizer`` by hand in shard_map: parameters and the optimizer's state."""
    model = model_of()
    optimizer = optimizer_of(model, w)
    graph, params = nnx.split(model, nnx.Param)
    optimizer_graph, opt_state = nnx.split(optimizer)
    params, opt_state = state or (params, opt_state)

    def step(params, opt_state, x, y):
        model = nnx.merge(graph, params, copy=True)
        optimizer = nnx.merge(optimizer_graph, opt_state, copy=True)
        grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state(model, nnx.Param), nnx.state(optimizer)

    specs = onebit_jax.state_specs(opt_state, AXIS)
    mapped = jax.jit(jax.shard_map(
        step, mesh=mesh(w), in_specs=(P(), specs, P(AXIS), P(AXIS)), out_specs=(P(), specs),
        check_vma=False,
    ))
    for t in range(start, start + steps):
        params, opt_state = mapped(params, opt_state, X[t], Y[t])
    return params, opt_state


def plain(w, steps):
    """The same with a tuple and ``make_train_step``."""
    graph, params = nnx.split(model_of(), nnx.Param)
    loss_fn = lambda p, batch: jnp.mean((nnx.merge(graph, p)(batch[0]) - batch[1]) ** 2)
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=5)
    with jax.set_mesh(mesh(w)):
        state = (params, tx.init(params))
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(w))
    for t in range(steps):
        state, _ = step(state, (X[t], Y[t]))
    return state


@pytest.mark.parametrize("w", [2, 4])
def test_specs_shard_what_is_each_workers_own(w):
    state = nnx.state(optimizer_of(model_of(), w))
    specs = onebit_jax.state_specs(state, AXIS)
    named = jax.tree_util.tree_leaves_with_path(state)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    own = 0
    for (path, leaf), spec in zip(named, flat, strict=True):
        name = jax.tree_util.keystr(path)
        mine = "_error" in name or "'sent" in name
        assert spec == (P(AXIS) if mine else P()), name
        assert not mine or leaf.shape[0] == w
        own += mine
    assert own == (9 if w == 4 else 5)


@pytest.mark.parametrize("w", [2, 4])
def test_it_trains_as_a_plain_tuple_does(w):
    params, opt_state = run(w, 12)
    expected_params, expected = plain(w, 12)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert jax.tree.leaves(params)[0].shape == (70,)
    assert onebit_jax.bytes_sent(opt_state) == onebit_jax.bytes_sent(expected) > 0
    found, wanted = onebit_jax.metrics(opt_state), onebit_jax.metrics(expected)
    assert found.keys() == wanted.keys()
    assert found["stage"] == "1-bit"
    assert found["onebit_rounds"] == 7
    for key in ("worker_error", "server_error", "variance_age"):
        if wanted[key] is None:  # two workers have no server
            assert found[key] is None
        else:
            assert found[key] == pytest.approx(wanted[key], rel=1e-2), key
    onebit_jax.assert_replicas_equal((params, opt_state), AXIS)


def test_replicas_that_differ_are_found():
    params, opt_state = run(4, 2)
    leaf = opt_state["opt_state"][0]["nu"]["layers"][0]["bias"]
    parts = [np.asarray(s.data) for s in leaf.get_value().addressable_shards]
    parts[2] = parts[2] + 1
    bad = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.get_value().sharding,
        [jax.device_put(p, d) for p, d in zip(parts, jax.devices()[:4], strict=True)],
    )
    leaf.set_value(bad)
    with pytest.raises(AssertionError, match=r"nu.*bias.* on worker 2"):
        onebit_jax.assert_replicas_equal(opt_state, AXIS)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3)])
def test_resized_it_goes_on_and_owes_the_same(old, new):
    params, opt_state = run(old, 8)
    resized = onebit_jax.resize_workers(opt_state, new)

    def owed(state):
        errors = state["opt_state"][0]["errors"]
        mean = [np.asarray(x).mean(0).ravel() for x in jax.tree.leaves(
            errors["worker_error (per worker)"])]
        server = jax.tree.leaves(errors["server_error (per worker)"])
        lost = [np.asarray(x).ravel() for x in server] or [np.zeros(1)] * len(mean)
        fit = lambda x, n: np.pad(x, (0, max(n - len(x), 0)))[:n]
        return [m + fit(s, len(m)) for m, s in zip(mean, lost, strict=True)]

    for before, after in zip(owed(opt_state), owed(resized), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    fresh = nnx.state(optimizer_of(model_of(), new))
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    host = jax.tree.map(np.asarray, (params, resized))
    _, going_on = run(new, 3, host, start=8) if 32 % new == 0 else (None, None)
    if going_on:
        assert onebit_jax.metrics(going_on)["onebit_rounds"] == 6


def test_saved_and_restored(tmp_path):
    state = run(4, 8)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(8, args=ocp.args.Composite(**checkpoints.items(state)))
        manager.wait_until_finished()
        restored = checkpoints.restore(manager, like=state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    unbroken = run(4, 11)
    for a, b in zip(
        jax.tree.leaves(run(4, 3, restored, start=8)), jax.tree.leaves(unbroken), strict=True
    ):
        np.testing.assert_array_equal(a, b)
