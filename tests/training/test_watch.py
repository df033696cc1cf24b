"""Skipped steps in a row, replicas that differ; bad numbers with loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import AXIS, mesh

import onebit_jax

W = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=(6, 2))).astype(np.float32)


def loss_fn(params, batch):
    x, y, bad = batch
    # A NaN or Inf of `bad` reaches the gradient of b on its worker, not that of w.
    return jnp.mean((x @ params["w"] - y) ** 2) + jnp.sum(params["b"] * bad[0])


def build(tx, **kwargs):
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(W), **kwargs)
    params = {"w": jnp.zeros((6, 2)), "b": jnp.zeros(1)}
    with jax.set_mesh(mesh(W)):
        return step, step.place((params, tx.init(params)))


def run(step, state, batches):
    """Trains until the batches end or an error; returns the last state and the error."""
    for b in batches:
        try:
            state, _ = step(state, b)
        except (FloatingPointError, AssertionError) as error:
            return state, error
    return state, None


def batch(bad_worker=None, value=np.nan):
    bad = np.zeros((W, 1), np.float32)
    if bad_worker is not None:
        bad[bad_worker] = value
    return X, Y, bad


@pytest.mark.parametrize("variance", [2, 100])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_raises_after_so_many_skips_with_the_bad_leaf_and_worker(variance, value):
    tx = onebit_jax.onebit_adam(0.05, AXIS, variance=variance)
    step, state = build(tx, max_consecutive_skips=3)
    for _ in range(4):
        state, _ = step(state, batch())
    good = jax.device_get(state[0])
    state, error = run(step, state, [batch(2, value)] * 10)
    assert isinstance(error, FloatingPointError)
    assert "3 steps in a row were skipped" in str(error)
    assert "['b'] on worker 2." in str(error)
    assert "'w'" not in str(error)
    assert onebit_jax.metrics(state)["skipped_rounds"] == 4, "noticed one step later"
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state[0]), good)


def test_a_good_step_in_between_starts_the_count_anew():
    step, state = build(onebit_jax.onebit_adam(0.05, AXIS), max_consecutive_skips=2)
    for t in range(12):
        state, _ = step(state, batch(1 if t % 2 else None))
    assert onebit_jax.metrics(state)["skipped_rounds"] == 6


def test_while_accumulating_the_bad_micro_batch_is_found_in_the_sum():
    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(0.05, AXIS, variance=1), 3)
    step, state = build(tx, max_consecutive_skips=2)
    state, error = run(step, state, [batch(1 if t % 3 == 0 else None) for t in range(12)])
    assert "['b'] on worker 1." in str(error)
    assert onebit_jax.metrics(state)["skipped_rounds"] == 2


def test_finite_values_that_overflow_are_told_apart():
    step, state = build(onebit_jax.onebit_adam(0.05, AXIS), max_consecutive_skips=1)
    _, error = run(step, state, [batch(0, 3e38)] * 3)
    assert "none of this process's own" in str(error)


def test_replicas_are_compared_before_the_first_and_every_kth_step():
    step, state = build(onebit_jax.onebit_adam(0.05, AXIS), check_replicas_every=3)

    def broken(state):
        """The second worker's copy of w has another last bit."""
        held = np.asarray(state[0]["w"])
        other = np.nextafter(held, np.float32(9))
        parts = [jax.device_put(other if i == 1 else held, d)
                 for i, d in enumerate(mesh(W).devices.flat)]
        w = jax.make_array_from_single_device_arrays(
            held.shape, NamedSharding(mesh(W), P()), parts
        )
        return ({**state[0], "w": w}, state[1])

    with pytest.raises(AssertionError, match=r"\['w'\] on worker 1"):
        step(broken(state), batch())
    # A difference that comes later is found at the next check, before donation.
    state, error = run(step, state, [batch()] * 2)
    assert error is None
    state, error = run(step, broken(state), [batch()] * 4)
    assert "['w'] on worker 1" in str(error)
    assert np.isfinite(np.asarray(state[0]["w"])).all(), "not donated"


@pytest.mark.parametrize("argument", ["max_consecutive_skips", "check_replicas_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_numbers_below_one_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be None or an int of at least 1"):
        build(onebit_jax.onebit_adam(0.05, AXIS), **{argument: value})


@pytest.mark.parametrize("variance", [10, 1000])
def test_float16_loss_scaling_skips_overflows_on_all_workers(variance):
    """Scaled by 2^15 in float16 and unscaled before update; an overflow every 20 steps."""
    scale = 2.0**15
    tx = onebit_jax.onebit_adam(0.02, AXIS, variance=variance)
    unscale = optax.chain(optax.scale(1 / scale), tx)

    def scaled_loss(params, batch):
        x, y, boost = batch
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        out = x.astype(jnp.float16) @ half["w"]
        error = (out - y.astype(jnp.float16)) * boost[0].astype(jnp.float16)
        return jnp.mean(error**2).astype(jnp.float32) * scale

    step = onebit_jax.make_train_step(scaled_loss, unscale, mesh(W))
    params = {"w": jnp.zeros((6, 2))}
    with jax.set_mesh(mesh(W)):
        state = step.place((params, unscale.init(params)))
    small, first = 0.1 * Y, None
    for t in range(200):
        boost = np.full(W, 1, np.float32)
        if t % 20 == 19:
            boost[t // 20 % W] = 3e4  # squared it is above what float16 holds
        held = jax.device_get(state)
        state, metrics = step(state, (X, small, boost))
        if t % 20 == 19:
            for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(held),
                                        jax.tree.leaves(jax.device_get(state)), strict=True):
                if not jax.tree_util.keystr(path).endswith((".skipped", ".sent")):
                    np.testing.assert_array_equal(new, old)
        first = float(metrics["loss"]) if first is None else first
    done = onebit_jax.metrics(state)
    assert done["skipped_rounds"] == 10
    assert done["exact_rounds"] + done["onebit_rounds"] == 190
    assert done["exact_rounds"] == min(variance, 190)
    onebit_jax.assert_replicas_equal(state, AXIS)
    _, metrics = step(state, (X, small, np.full(W, 1, np.float32)))
    assert float(metrics["loss"]) < 0.02 * first
