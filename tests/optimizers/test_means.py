import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import AXIS, COUNTS, MODES, run

import onebit_jax
from onebit_jax.optimizers import means


@pytest.mark.parametrize("mode", MODES)
def test_compressed_mean_in_front_of_sgd_trains(mode):
    """A noisy quadratic: ends near the minimum, all workers alike."""
    w, n = 4, 700
    target = np.random.default_rng(0).normal(size=n).astype(np.float32)
    tx = optax.chain(onebit_jax.compressed_mean(AXIS), optax.sgd(0.01, momentum=0.9))

    def worker(noise):
        def step(carry, noise):
            x, state = carry
            updates, state = tx.update(x - target + noise, state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.zeros(n)
        return jax.lax.scan(step, (x, tx.init(x)), noise)[0][0]

    noise = 0.1 * np.random.default_rng(1).normal(size=(w, 300, n)).astype(np.float32)
    x = np.asarray(run(mode, w, worker, noise))
    for replica in x:
        np.testing.assert_array_equal(replica, x[0])
    assert np.sqrt(((x[0] - target) ** 2).mean()) < 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w", COUNTS)
def test_clip_uses_one_factor_on_all_workers(mode, w):
    norms = np.asarray([1, 2, 5, 100, 3, 3, 3, 3][:w], np.float32)
    grads = {"a": np.zeros((w, 3, 2), np.float32), "b": np.zeros((w, 4), np.float32)}
    grads["a"][:, 0, 0], grads["b"][:, 1] = 0.6 * norms, 0.8 * norms
    tx = onebit_jax.clip_by_global_norm(1.0, AXIS)
    clipped = run(mode, w, lambda g: tx.update(g, tx.init(g))[0], grads)
    factor = min(1.0, 1 / np.sqrt((norms**2).mean()))
    for name in grads:
        np.testing.assert_allclose(clipped[name], factor * grads[name], rtol=1e-6)


def test_clip_equals_clipping_the_mean_when_all_gradients_are_equal():
    grads = np.tile(np.random.default_rng(0).normal(size=50).astype(np.float32), (4, 1))
    tx = onebit_jax.clip_by_global_norm(1.0, AXIS)
    clipped = run("vma", 4, lambda g: tx.update(g, tx.init(g))[0], grads)
    expected, _ = optax.clip_by_global_norm(1.0).update(grads[0], None)
    np.testing.assert_allclose(clipped[2], expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_clip_lets_a_bad_number_reach_the_check(bad):
    grads = np.ones((2, 5), np.float32)
    grads[1, 3] = bad
    tx = optax.chain(onebit_jax.clip_by_global_norm(1.0, AXIS), onebit_jax.exact_mean(AXIS))

    def worker(g):
        updates, state = tx.update(g, tx.init(g))
        return updates, state[1].rounds.skipped

    updates, skipped = run("vma", 2, worker, grads)
    assert not np.asarray(updates).any()
    assert np.asarray(skipped).tolist() == [1, 1]


@pytest.mark.parametrize("make", [onebit_jax.compressed_mean, onebit_jax.exact_mean])
def test_a_bad_round_gives_zeros_and_is_counted(make):
    grads = np.random.default_rng(0).normal(size=(4, 3, 20)).astype(np.float32)
    grads[3, 1, 5] = np.nan
    tx = make(AXIS)

    def worker(grads):
        state = tx.init(grads[0])

        def step(state, g):
            updates, state = tx.update(g, state)
            return state, updates

        return jax.lax.scan(step, state, grads)

    state, updates = run("vma", 4, worker, grads)
    updates = np.asarray(updates)
    assert not updates[:, 1].any()
    assert updates[:, 0].any()
    assert updates[:, 2].any()
    assert np.isfinite(updates).all()
    assert np.asarray(state.rounds.skipped).tolist() == [1] * 4
    done = np.asarray(state.rounds.exact) + np.asarray(state.rounds.onebit)
    assert done.tolist() == [2] * 4


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_exact_mean_keeps_the_dtype(wire):
    grads = {"h": jnp.ones((2, 7), jnp.bfloat16), "f": jnp.full((2, 7), 3.0)}
    tx = onebit_jax.exact_mean(AXIS, wire)
    updates = run("vma", 2, lambda g: tx.update(g, tx.init(g))[0], grads)
    assert updates["h"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates["f"], 3.0)


def test_the_byte_counter_carries_into_its_high_half():
    rounds = means.init_rounds(None)
    finite = jnp.bool_(True)
    for _ in range(5):
        rounds = means.count_round(rounds, True, finite, (3_000_000_000, 1))
    rounds = means.count_round(rounds, jnp.bool_(False), finite, (3, 2**33 + 7))
    assert onebit_jax.bytes_sent(rounds) == 15_000_000_000 + 2**33 + 7
    assert onebit_jax.metrics(rounds)["exact_rounds"] == 5
