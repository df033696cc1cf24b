"""Accumulation, and every Optax wrapper of the table in docs/wrappers.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import AXIS, MODES, run

import onebit_jax
from onebit_jax.optimizers.rounds import rounds_in

PARAMS = {"w": np.zeros((4, 10), np.float32), "b": np.zeros(5, np.float32)}


def gradients(w, steps, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(w, steps, *p.shape)).astype(np.float32), PARAMS
    )


def train(mode, w, tx, grads, params=None):
    def worker(grads, params):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), (updates, params)

        (params, state), (updates, _) = jax.lax.scan(step, (params, tx.init(params)), grads)
        return params, state, updates

    params = PARAMS if params is None else params
    copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (w, *p.shape)), params)
    return run(mode, w, worker, grads, copies)


@pytest.mark.parametrize(
    ("mode", "variance"), [*((mode, 1) for mode in MODES), ("vma", 100), ("pmap", 100)]
)
def test_micro_batches_equal_one_batch_of_all(mode, variance):
    k, w = 4, 3
    grads = gradients(w, 6 * k)
    whole = jax.tree.map(lambda g: g.reshape(w, 6, k, *g.shape[2:]).mean(axis=2), grads)
    tx = onebit_jax.onebit_adamw(1e-2, AXIS, weight_decay=0.1, variance=variance)
    params, state, updates = train(mode, w, onebit_jax.accumulate(tx, k), grads)
    expected, expected_state, _ = train(mode, w, tx, whole)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-6)
        between = np.asarray(updates[name]).reshape(w, 6, k, -1)[:, :, :-1]
        assert not between.any(), "nothing moves between exchanges"
    rounds, expected_rounds = state.inner_state[0].rounds, expected_state[0].rounds
    np.testing.assert_array_equal(rounds.sent, expected_rounds.sent)
    assert int(rounds.exact.ravel()[0] + rounds.onebit.ravel()[0]) == 6


def test_accumulation_around_the_exact_mean():
    grads = gradients(2, 6)
    tx = optax.chain(onebit_jax.exact_mean(AXIS), optax.sgd(0.1))
    params, _, _ = train("vma", 2, onebit_jax.accumulate(tx, 3), grads)
    total = np.asarray(grads["w"]).reshape(2, 2, 3, 4, 10).mean(axis=(0, 2)).sum(axis=0)
    np.testing.assert_allclose(params["w"][0], -0.1 * total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["vma", "pmap"])
def test_a_bad_micro_batch_skips_its_exchange_only(mode):
    grads = gradients(4, 12)
    grads["w"][1, 4, 2, 2] = np.nan
    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(1e-2, AXIS, variance=1), 3)
    params, state, updates = train(mode, 4, tx, grads)
    rounds = state.inner_state[0].rounds
    assert [int(x.ravel()[0]) for x in (rounds.exact, rounds.onebit, rounds.skipped)] == [1, 2, 1]
    assert not np.asarray(updates["w"])[:, 3:6].any()
    assert np.isfinite(np.asarray(params["w"])).all()


def test_accumulation_needs_something_that_synchronises():
    with pytest.raises(ValueError, match="exchanges nothing between workers"):
        onebit_jax.accumulate(optax.adam(1e-3), 2).init(PARAMS)


ONEBIT = lambda: onebit_jax.onebit_adam(1e-2, AXIS, variance=2)
REFUSED = {
    "MultiSteps": (lambda: optax.MultiSteps(ONEBIT(), 4), "accumulate"),
    "apply_if_finite": (lambda: optax.apply_if_finite(ONEBIT(), 5), "Leave it out"),
    "conditionally_transform": (
        lambda: optax.conditionally_transform(ONEBIT(), lambda step: step < 5), "learning rate",
    ),
    "conditionally_mask": (
        lambda: optax.conditionally_mask(ONEBIT(), lambda step: step < 5), "learning rate",
    ),
    "masked": (lambda: optax.masked(ONEBIT(), {"w": True, "b": False}), "optax.partition"),
}


@pytest.mark.parametrize("mode", ["vma", "no_vma", "pmap"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", ["alone", "chain"])
def test_wrappers_that_cannot_work_name_the_alternative(mode, name, inside):
    make, alternative = REFUSED[name]
    tx = make()
    if inside == "chain":
        tx = optax.chain(optax.identity(), optax.GradientTransformation(tx.init, tx.update))
    with pytest.raises(ValueError, match=f"optax.{name} .*{alternative}"):
        train(mode, 4, tx, gradients(4, 2))


@pytest.mark.parametrize("sync", [onebit_jax.compressed_mean, onebit_jax.exact_mean])
def test_the_other_transformations_refuse_them_too(sync):
    tx = optax.MultiSteps(optax.chain(sync(AXIS), optax.sgd(0.1)), 4)
    with pytest.raises(ValueError, match="onebit_jax.accumulate"):
        train("no_vma", 2, tx, gradients(2, 2))


def group(axis):
    return optax.chain(onebit_jax.exact_mean(axis), optax.adam(1e-2))


WORKING = {
    "masked, all leaves": lambda: optax.masked(ONEBIT(), {"w": True, "b": True}),
    "partition": lambda: optax.partition(
        {"big": ONEBIT(), "small": group(AXIS)}, {"w": "big", "b": "small"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        onebit_jax.onebit_adam, static_args=("variance",)
    )(optax.constant_schedule(1e-2), AXIS, variance=2),
    "chain": lambda: optax.chain(
        onebit_jax.clip_by_global_norm(1.0, AXIS), ONEBIT(), optax.add_decayed_weights(1e-4)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(ONEBIT(), 1e-2, b1=0.9),
    "flatten": lambda: optax.flatten(ONEBIT()),
    "ema after": lambda: optax.chain(ONEBIT(), optax.ema(0.9)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(ONEBIT()),
}


@pytest.mark.parametrize("mode", ["vma", "pmap"])
@pytest.mark.parametrize("name", WORKING)
def test_wrappers_that_work_keep_the_workers_together(mode, name):
    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic mixes dtypes
        params, _, _ = train(mode, 4, WORKING[name](), gradients(4, 8))
    for leaf in jax.tree.leaves(params):
        replicas = np.asarray(leaf)
        assert np.isfinite(replicas).all()
        assert replicas[0].any()
        for replica in replicas:
            np.testing.assert_array_equal(replica, replicas[0])


def test_injected_hyperparameters_equal_plain_ones():
    grads = gradients(2, 8)
    with jax.numpy_dtype_promotion("standard"):
        injected, _, _ = train("vma", 2, WORKING["inject_hyperparams"](), grads)
    plain, _, _ = train("vma", 2, ONEBIT(), grads)
    np.testing.assert_allclose(injected["w"], plain["w"], rtol=1e-5, atol=1e-6)


def test_variance_as_injected_hyperparameter_says_how():
    tx = optax.inject_hyperparams(onebit_jax.onebit_adam)(1e-2, None, variance=5)
    with pytest.raises(ValueError, match=r"static_args=\('variance',\)"):
        tx.init(PARAMS)


def test_partition_compresses_only_its_group():
    with jax.numpy_dtype_promotion("standard"):
        _, state, _ = train("vma", 2, WORKING["partition"](), gradients(2, 5))
    counts = [int(np.asarray(x.onebit).ravel()[0]) for x in rounds_in(state)]
    assert sorted(counts) == [0, 3]
