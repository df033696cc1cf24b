"""What metrics says of errors and of the second moment's age, and when it warns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from meshes import AXIS, mesh, run

import onebit_jax
from onebit_jax.optimizers.variance import Decision, VariancePolicy
from onebit_jax.training import progress

SHAPES = {"w": (20, 40), "b": (7,), "none": (0, 3)}


def gradients(w, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    draw = lambda s: (scale * (1 + rng.normal(size=(w, *s)))).astype(np.float32)
    return {name: draw(shape) * 10.0 ** -i for i, (name, shape) in enumerate(SHAPES.items())}


def train(tx, w, steps=12, mode="vma"):
    """The last mean and the state, stacked: every leaf with a leading axis of workers."""

    def fn(rounds):
        first = jax.tree.map(lambda g: g[0], rounds)
        return jax.lax.scan(
            lambda state, g: tx.update(g, state)[::-1], tx.init(first), rounds
        )

    rounds = [gradients(w, t) for t in range(steps)]
    state, means = run(mode, w, fn, jax.tree.map(lambda *g: np.stack(g, axis=1), *rounds))
    return jax.tree.map(lambda x: x[0, -1], means), state


def by_hand(state, w):
    """Errors relative to the momentum, with NumPy in float64, leaf by leaf."""
    lost = there = size = 0.0
    for name in ("w", "b"):
        take = lambda x: np.asarray(x[name], np.float64)  # noqa: B023
        v = take(state.nu)[0].mean()
        size += np.square(take(state.mu)[0]).sum() / v
        lost += sum(np.square(e).sum() for e in take(state.errors.worker_error)) / w / v
        if w > 2:
            there += np.square(take(state.errors.server_error)).sum() / v
    return np.sqrt(lost / size), np.sqrt(there / size) if w > 2 else None


@pytest.mark.parametrize(
    ("mode", "w", "dtype", "paper"),
    [("pmap", 2, None, True), ("vma", 3, "bfloat16", False)],
)
def test_errors_are_relative_to_the_momentum_in_units_of_the_update(mode, w, dtype, paper):
    tx = onebit_jax.scale_by_onebit_adam(
        AXIS, variance=3, error_dtype=dtype, precondition=not paper,
        quantizer=onebit_jax.SignQuantizer(None if paper else 32),
    )
    _, state = train(tx, w, mode=mode)
    expected = by_hand(state, w)
    for held in (state, jax.device_get(state), {"params": jnp.ones(3), "opt": (state,)}):
        done = onebit_jax.metrics(held)
        assert done["variance_age"] == 9
        np.testing.assert_allclose(done["worker_error"], expected[0], rtol=1e-4)
        if w > 2:
            np.testing.assert_allclose(done["server_error"], expected[1], rtol=1e-4)
        else:
            assert done["server_error"] is None
    assert 0.1 < done["worker_error"] < 5


@pytest.mark.parametrize(("w", "block_size"), [(2, 32), (3, 32), (4, None)])
def test_of_a_compressed_mean_relative_to_what_it_returned(w, block_size):
    tx = onebit_jax.compressed_mean(AXIS, onebit_jax.SignQuantizer(block_size))
    mean, state = train(tx, w, steps=4)
    done = onebit_jax.metrics(state)
    squares = lambda tree: sum(np.square(np.asarray(x)).sum() for x in jax.tree.leaves(tree))
    norm = np.sqrt(squares(mean))
    if w == 2:  # of what each has sent: where the two differ in sign, the mean is small
        assert 0.5 * state.norm[0] < norm < state.norm[0]
        norm = state.norm[0]
    lost = np.sqrt(squares(state.errors.worker_error) / w)
    np.testing.assert_allclose(done["worker_error"], lost / norm, rtol=1e-4)
    there = np.sqrt(squares(state.errors.server_error)) / norm
    assert done["server_error"] == (pytest.approx(there, rel=1e-4) if w > 2 else None)
    assert done["variance_age"] is None


def test_a_skipped_round_changes_neither():
    for tx in (onebit_jax.compressed_mean(None), onebit_jax.onebit_adam(0.1, None, variance=1)):
        params = jnp.ones(40)
        update, state = jax.jit(tx.update), tx.init(params)
        for t in range(3):
            _, state = update(gradients(1, t)["w"][0, 0], state)
        before = onebit_jax.metrics(state)
        _, state = update(params * np.nan, state)
        assert onebit_jax.metrics(state) == {**before, "skipped_rounds": 1}


def test_none_where_there_is_none():
    for tx, age in ((onebit_jax.onebit_adam(0.1, None), 0), (onebit_jax.exact_mean(None), None)):
        _, state = jax.jit(tx.update)(jnp.ones(3), tx.init(jnp.ones(3)))
        done = onebit_jax.metrics(state)
        assert (done["worker_error"], done["server_error"]) == (None, None)
        assert done["variance_age"] == age
    only_empty = onebit_jax.onebit_adam(0.1, None, variance=1)
    state = only_empty.init(jnp.ones((0, 3)))
    for _ in range(2):
        _, state = only_empty.update(jnp.ones((0, 3)), state)
    assert onebit_jax.metrics(state)["worker_error"] is None


def test_the_age_is_that_of_any_policy():
    """Also of one that updates in between and asks for no decay of the steps left out."""
    every_third = VariancePolicy(
        lambda b2: (), lambda s, t, signals: (Decision(t % 3 == 0, jnp.int32(1)), s)
    )
    tx = onebit_jax.onebit_adam(0.1, None, variance=every_third)
    update, state, ages = jax.jit(tx.update), tx.init(jnp.ones(3)), []
    for _ in range(8):
        _, state = update(jnp.ones(3), state)
        ages.append(onebit_jax.metrics(state)["variance_age"])
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]


def test_of_several_transformations_the_largest():
    """In a partition, accumulated, with hyperparameters, on an explicit mesh."""
    adam = optax.inject_hyperparams(onebit_jax.onebit_adam, static_args=("axis_name", "variance"))
    tx = onebit_jax.accumulate(
        optax.partition(
            {"adam": adam(0.1, axis_name=AXIS, variance=1),
             "sgd": optax.chain(onebit_jax.compressed_mean(AXIS), optax.sgd(0.1))},
            {"w": "adam", "b": "sgd"},
        ), 2,
    )
    on = mesh(4, AxisType.Explicit)
    step = onebit_jax.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2) + jnp.sum(p["b"] ** 2), tx, on
    )
    params = {"w": jnp.zeros((6, 40)), "b": jnp.arange(7.0)}
    with jax.set_mesh(on):
        state = (params, tx.init(params))
    for t in range(8):
        x = np.random.default_rng(t).normal(size=(8, 6)).astype(np.float32)
        state, _ = step(state, x)
    done = onebit_jax.metrics(state)
    assert done["variance_age"] == 3
    inner = state[1].inner_state.inner_states
    alone = [onebit_jax.metrics(inner[name])["worker_error"] for name in ("adam", "sgd")]
    assert done["worker_error"] == max(alone)
    assert min(alone) > 0


def test_warns_once_in_a_run_whose_second_moment_was_frozen_while_gradients_grew():
    """Ten times larger after the warm-up; with `refresh` the second moment follows."""

    def warned(tx):
        update, state, found = jax.jit(tx.update), tx.init(jnp.zeros(64)), []
        for t in range(30):
            g = gradients(1, t, scale=1.0 if t < 4 else 10.0)["w"][0].reshape(-1)[:64]
            _, state = update(g, state)
            with warnings.catch_warnings(record=True, action="always") as caught:
                onebit_jax.metrics(state)
            found += [(t, str(w.message), w.category, w.filename) for w in caught]
        return found

    for bad in (onebit_jax.onebit_adam(0.1, None, variance=4),
                onebit_jax.paper_1bit_adam(0.1, None, 4)) * 2:  # each of them is a new run
        ((step, text, category, filename),) = warned(bad)
        assert category is onebit_jax.EarlyFreezeWarning
        assert filename == __file__
        assert 5 <= step < 10
        assert "gradients have grown since" in text
        assert "more exact steps" in text
        assert "refresh" in text
    assert not warned(onebit_jax.onebit_adam(0.1, None, variance=onebit_jax.refresh(exact_steps=4)))


def test_warns_of_a_second_moment_that_is_too_old_for_what_it_has_seen():
    def steps_until_warned(b2, n):
        tx = onebit_jax.scale_by_onebit_adam(None, b2=b2, variance=2)
        update, state = jax.jit(tx.update), tx.init(jnp.zeros(64))
        for t in range(n):
            g = gradients(1, t, scale=1 / (1 + t))["w"][0].reshape(-1)[:64]
            _, state = update(g, state)
            with warnings.catch_warnings(record=True, action="always") as caught:
                onebit_jax.metrics(state)
            if caught:
                return t + 1, str(caught[0].message)
        return None

    steps, text = steps_until_warned(0.999, 60)
    assert steps == 2 + 2 * progress.STALE + 1
    assert "41 steps ago, after 2 steps, fewer than it averages over" in text
    assert steps_until_warned(0.4, 60) is None, "it averages over fewer than 2 steps"
