"""What bad input gets: an error that says what was found and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import AXIS, mesh, run

import onebit_jax

PARAMS = {"w": jnp.ones(8), "b": jnp.ones(3)}
SYNCS = {
    "onebit_adam": lambda axis: onebit_jax.onebit_adam(1e-2, axis),
    "compressed_mean": onebit_jax.compressed_mean,
    "exact_mean": onebit_jax.exact_mean,
    "accumulate": lambda axis: onebit_jax.accumulate(onebit_jax.onebit_adam(1e-2, axis), 2),
    "clip": lambda axis: optax.chain(
        onebit_jax.clip_by_global_norm(1.0, axis), onebit_jax.onebit_adam(1e-2, axis)
    ),
}


def on_workers(fn, *args, check_vma=True, out_specs=P()):
    mapped = jax.shard_map(
        fn, mesh=mesh(4), in_specs=P(), out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped)(*args)


@pytest.mark.parametrize("name", SYNCS)
def test_no_axis_size_known(name):
    with pytest.raises(ValueError, match=r"no size is known for axis_name='data' \(mesh axes in "
                                         r"reach: none\).*jax.set_mesh"):
        SYNCS[name](AXIS).init(PARAMS)


@pytest.mark.parametrize("name", SYNCS)
def test_misspelt_axis_names_those_that_exist(name):
    tx = SYNCS[name]("dta")
    with pytest.raises(ValueError, match=r"axis_name='dta' \(mesh axes in reach: 'data'\)"):
        on_workers(lambda p: tx.init(p) and p, PARAMS)
    with jax.set_mesh(mesh(4)), pytest.raises(ValueError, match="'dta'.*'data'"):
        tx.init(PARAMS)


@pytest.mark.parametrize("name", SYNCS)
def test_update_outside_the_mesh_never_runs_silently(name):
    tx = SYNCS[name](AXIS)
    with jax.set_mesh(mesh(4)):
        state = tx.init(PARAMS)
        with pytest.raises(ValueError, match="not bound here.*make_train_step"):
            jax.jit(tx.update)(PARAMS, state, PARAMS)


@pytest.mark.parametrize("name", SYNCS)
def test_gradients_already_reduced_are_refused_with_the_cure(name):
    tx = SYNCS[name](AXIS)

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * x[0] + jnp.sum(p["b"]))(params)
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=mesh(4), in_specs=(P(), P(AXIS)), out_specs=P())
    with pytest.raises(ValueError, match=r"\['b'\] is already reduced over axis 'data'.*"
                                         r"per_worker\(params, 'data'\)"):
        jax.jit(mapped)(PARAMS, jnp.ones(4))


def test_per_worker_is_that_cure():
    tx = onebit_jax.onebit_adam(1e-2, AXIS)

    def step(params, x):
        own = onebit_jax.per_worker(params, AXIS)
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * x[0] + jnp.sum(p["b"]))(own)
        again = onebit_jax.per_worker(own, AXIS)  # values that already vary pass
        assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, own)
        state = tx.init(params)
        return tx.update(grads, state, params)[1][0].mu

    mapped = jax.shard_map(step, mesh=mesh(4), in_specs=(P(), P(AXIS)), out_specs=P())
    mu = jax.jit(mapped)(PARAMS, jnp.asarray([1.0, 2.0, 3.0, 6.0]))
    np.testing.assert_allclose(mu["w"], 0.1 * 3.0, rtol=1e-6)  # the mean, not the sum


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
@pytest.mark.parametrize("axis", [AXIS, None])
def test_gradients_must_be_real_floats(dtype, axis):
    tx = onebit_jax.onebit_adam(1e-2, axis)
    grads = {"w": jnp.ones(8, dtype), "b": jnp.ones(3)}

    def update(grads):
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

    def on_mesh(grads):
        return on_workers(lambda g: update(onebit_jax.per_worker(g, AXIS)), grads)

    with pytest.raises(TypeError, match=rf"\['w'\] has dtype {jnp.dtype(dtype)}: gradients must"):
        (update if axis is None else on_mesh)(grads)


@pytest.mark.parametrize("name", ["onebit_adam", "compressed_mean", "accumulate"])
def test_another_tree_than_at_init(name):
    def update(grads):
        tx = SYNCS[name](AXIS)
        return tx.update(grads, tx.init(PARAMS), None)[0]

    grads = {"w": jnp.ones((4, 8))}
    with pytest.raises(ValueError, match="the tree of the updates differs from the parameters"):
        run("no_vma", 4, update, grads)
    grads = {"w": jnp.ones((4, 9)), "b": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(9,\), but init saw \(8,\)"):
        run("no_vma", 4, update, grads)


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("old", [1, 2, 8])
def test_a_state_of_another_worker_count_names_resize_workers(name, old):
    tx = SYNCS[name](AXIS)
    with jax.set_mesh(mesh(old)):
        state = tx.init(PARAMS)
    specs = onebit_jax.state_specs(state, AXIS)

    def step(state, params):
        grads = onebit_jax.per_worker(params, AXIS)
        return tx.update(grads, state, params)[1]

    step_fn = onebit_jax.make_train_step(lambda p, b: jnp.sum(p["w"]), tx, mesh(4))
    with pytest.raises(ValueError, match="another number of workers.*resize_workers"):
        step_fn((PARAMS, state), jnp.ones(4))
    if old > 4:  # fewer do not divide: shard_map itself refuses
        mapped = jax.shard_map(step, mesh=mesh(4), in_specs=(specs, P()), out_specs=specs)
        with pytest.raises(ValueError, match="another number of workers.*resize_workers"):
            jax.jit(mapped)(jax.device_get(state), PARAMS)


def test_a_server_error_of_another_size_is_refused():
    tx = onebit_jax.compressed_mean(AXIS)
    with jax.set_mesh(mesh(4)):
        state = tx.init({"w": jnp.ones(1000)})
    errors = state.errors._replace(server_error={"w": jnp.zeros((4, 512))})

    def step(state, grads):
        return tx.update(onebit_jax.per_worker(grads, AXIS), state)[0]

    state = state._replace(errors=errors)
    specs = onebit_jax.state_specs(state, AXIS)
    mapped = jax.shard_map(step, mesh=mesh(4), in_specs=(specs, P()), out_specs=P())
    with pytest.raises(ValueError, match=r"local shape \(1, 512\), 4 workers need \(1, 256\)"):
        jax.jit(mapped)(jax.device_get(state), {"w": jnp.ones(1000)})


def test_misspelt_keyword():
    with pytest.raises(TypeError, match="freeze_steps"):
        onebit_jax.onebit_adam(1e-3, AXIS, freeze_steps=100)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_policy_counts_below_one(bad):
    with pytest.raises(ValueError, match=f"variance: the number of exact steps.*found {bad}"):
        onebit_jax.onebit_adam(1e-3, AXIS, variance=bad)
    with pytest.raises(ValueError, match=f"exact steps.*found {bad}"):
        onebit_jax.paper_1bit_adam(1e-3, AXIS, warmup_steps=bad)
    with pytest.raises(ValueError, match=f"every must be an int of at least 1, found {bad}"):
        onebit_jax.refresh(every=bad)
    with pytest.raises(ValueError, match=f"exact_steps must be an int of at least 1, found {bad}"):
        onebit_jax.refresh(exact_steps=bad)
    with pytest.raises(ValueError, match=f"window must be .* found {bad}"):
        onebit_jax.freeze_when_stable(window=bad)
    with pytest.raises(ValueError, match=f"min_steps must be at least 1, found {bad}"):
        onebit_jax.freeze_when_stable(min_steps=bad)
    with pytest.raises(ValueError, match=f"every_k must be .* found {bad}"):
        onebit_jax.accumulate(onebit_jax.exact_mean(AXIS), bad)


def test_other_policy_arguments():
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\), found 1.5"):
        onebit_jax.freeze_when_stable(threshold=1.5)
    with pytest.raises(ValueError, match="until must be .* at least exact_steps=100, found 50"):
        onebit_jax.refresh(until=50)
    with pytest.raises(ValueError, match='grid must be "proportional" or "doubling", found'):
        onebit_jax.refresh(grid="linear")
    with pytest.raises(ValueError, match="static_args"):
        onebit_jax.onebit_adam(1e-3, AXIS, variance=jnp.int32(5))
    with pytest.raises(ValueError, match="wire_dtype must be None .* found 'int8'"):
        onebit_jax.exact_mean(AXIS, "int8")


def test_make_train_step_checks_its_arguments():
    tx = onebit_jax.onebit_adam(1e-3, AXIS)
    with pytest.raises(ValueError, match=r"axis_name='model' is not an axis of the mesh"):
        onebit_jax.make_train_step(lambda p, b: 0.0, tx, mesh(2), "model")
    loss = lambda p, b: jnp.sum(p["w"]) + jnp.sum(b)
    with jax.set_mesh(mesh(4)):
        state = (PARAMS, tx.init(PARAMS))
    step = onebit_jax.make_train_step(loss, tx, mesh(4))
    with pytest.raises(ValueError, match=r"leading axis that 4 workers can share.*\(6, 2\)"):
        step(state, jnp.ones((6, 2)))
    with pytest.raises(TypeError, match=r"TrainState or a tuple \(params, opt_state\), found list"):
        step(list(state), jnp.ones((4, 2)))
    plain = onebit_jax.make_train_step(loss, optax.adam(1e-3), mesh(4))
    with pytest.raises(ValueError, match="tx exchanges nothing between workers"):
        plain((PARAMS, optax.adam(1e-3).init(PARAMS)), jnp.ones((4, 2)))
    aux = onebit_jax.make_train_step(lambda p, b: (loss(p, b), 3.0), tx, mesh(4), has_aux=True)
    with pytest.raises(TypeError, match="dict of metrics without the key 'loss', found"):
        aux(state, jnp.ones((4, 2)))


def test_param_specs_must_be_a_container():
    with pytest.raises(ValueError, match="container of PartitionSpecs, found one leaf"):
        onebit_jax.state_specs({"a": jnp.ones(3)}, AXIS, P("model"))


def test_resize_needs_a_worker():
    with pytest.raises(ValueError, match="new_size must be at least 1, found 0"):
        onebit_jax.resize_workers({}, 0)
