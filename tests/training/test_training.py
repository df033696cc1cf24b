import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from meshes import AXIS, COUNTS, mesh

import onebit_jax

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=(6, 2))).astype(np.float32)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


def fresh():
    return {"w": jnp.zeros((6, 2)), "b": jnp.zeros(2)}


def train(tx, w, steps=20, axis_type=AxisType.Auto):
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(w, axis_type))
    with jax.set_mesh(mesh(w, axis_type)):
        state = (fresh(), tx.init(fresh()))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, (X, Y))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("w", "axis_type"), [*((w, AxisType.Auto) for w in COUNTS), (4, AxisType.Explicit)]
)
def test_in_the_warm_up_it_is_adam_on_the_whole_batch(w, axis_type):
    (params, _), losses = train(onebit_jax.onebit_adam(0.05, AXIS), w, axis_type=axis_type)
    tx, expected = optax.adam(0.05), fresh()
    state = tx.init(expected)
    with jax.numpy_dtype_promotion("standard"):
        for t in range(20):
            loss, grads = jax.value_and_grad(loss_fn)(expected, (X, Y))
            np.testing.assert_allclose(losses[t], loss, rtol=1e-5)
            updates, state = tx.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_a_step_returns_is_in_place_for_the_next(axis_type):
    params = {**fresh(), "scalar": jnp.zeros(())}
    tx = onebit_jax.onebit_adam(0.05, AXIS, variance=2)
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(4, axis_type))
    with jax.set_mesh(mesh(4, axis_type)):
        state = (params, tx.init(params))
    state = step.place(state)
    assert step.place(state) is state
    state, _ = step(state, (X, Y))
    assert step.place(state) is state


def test_trains_and_tells_what_it_did():
    state, losses = train(onebit_jax.onebit_adam(0.05, AXIS, variance=5), 4, steps=200)
    assert losses[-1] < 0.01 * losses[0]
    exact = 2 * 3 * 14 * 4 // 4
    # w: 12 entries, b: 2; each takes one word and one scale for each of 4 chunks
    onebit = 2 * 3 * 4 * 4
    with pytest.warns(onebit_jax.EarlyFreezeWarning, match="195 steps ago, after 5 steps"):
        done = onebit_jax.metrics(state)
    assert 0 < done.pop("worker_error") < 3
    assert 0 < done.pop("server_error") < 3
    assert done == {
        "stage": "1-bit", "exact_rounds": 5, "onebit_rounds": 195, "skipped_rounds": 0,
        "bytes_sent": 5 * exact + 195 * onebit, "variance_age": 195,
    }


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


class BatchNormState(TrainState):
    batch_stats: typing.Any


def bn_loss(params, batch_stats, batch, rng):
    x, y = batch
    out, changed = Model().apply(
        {"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"],
        rngs={"dropout": rng},
    )
    per_worker = {"error": jnp.mean(jnp.abs(out - y)), "draw": jax.random.uniform(rng)}
    return jnp.mean((out - y) ** 2), (changed["batch_stats"], per_worker)


@pytest.mark.parametrize("kind", ["TrainState", "tuple"])
def test_flax_state_batch_norm_dropout_and_metrics(kind):
    tx = onebit_jax.onebit_adam(0.02, AXIS, variance=10)
    variables = Model().init(jax.random.key(0), X[:1], train=False)
    stats = variables["batch_stats"]
    with jax.set_mesh(mesh(4)):
        if kind == "TrainState":
            state = BatchNormState.create(
                apply_fn=Model().apply, params=variables["params"], tx=tx, batch_stats=stats
            )
        else:
            state = (variables["params"], tx.init(variables["params"]), stats)
    step = onebit_jax.make_train_step(
        bn_loss, tx, mesh(4), has_aux=True, mutable="batch_stats"
    )
    first = step.place(jax.tree.map(jnp.copy, state))
    out, metrics = step(first, (X, Y), jax.random.key(1))
    got = out.batch_stats if kind == "TrainState" else out[2]

    # Each quarter of the batch by hand: statistics and metrics are their mean.
    means, errors, draws = [], [], []
    for i in range(4):
        key = jax.random.fold_in(jax.random.key(1), i)
        part = (X[i * 12 : (i + 1) * 12], Y[i * 12 : (i + 1) * 12])
        _, (changed, aux) = bn_loss(variables["params"], stats, part, key)
        means.append(changed["BatchNorm_0"]["mean"])
        errors.append(aux["error"])
        draws.append(aux["draw"])
    np.testing.assert_allclose(got["BatchNorm_0"]["mean"], np.mean(means, axis=0), rtol=1e-5,
                               atol=1e-6)
    np.testing.assert_allclose(metrics["error"], np.mean(errors), rtol=1e-5)
    np.testing.assert_allclose(metrics["draw"], np.mean(draws), rtol=1e-5)
    assert len(set(map(float, draws))) == 4, "every worker has its own key"
    for i in range(2, 62):
        out, metrics = step(out, (X, Y), jax.random.key(i))
    assert metrics["loss"] < 3.0
    if kind == "TrainState":
        assert int(out.step) == 61


def test_a_scan_in_the_model_needs_no_casts():
    """A carry that starts as a constant; types that track the mesh would object."""

    def loss(params, batch):
        def cell(h, x):
            return jnp.tanh(x @ params["w"] + params["b"][None] + h), None

        steps = jnp.broadcast_to(batch[0], (3, *batch[0].shape))
        h, _ = jax.lax.scan(cell, jnp.zeros((batch[0].shape[0], 2)), steps)
        return jnp.mean((h - batch[1]) ** 2)

    tx = onebit_jax.onebit_adam(0.05, AXIS)
    step = onebit_jax.make_train_step(loss, tx, mesh(2))
    with jax.set_mesh(mesh(2)):
        state = (fresh(), tx.init(fresh()))
    _, metrics = step(state, (X, Y))
    assert np.isfinite(float(metrics["loss"]))


def test_a_transformation_that_leaves_gradients_local_is_caught():
    """The group "rest" is not synchronised; the types say so."""
    tx = optax.partition(
        {"one": onebit_jax.onebit_adam(0.05, AXIS), "rest": optax.sgd(0.1)},
        {"w": "one", "b": "rest"},
    )
    with pytest.raises(ValueError, match="replicat|vary"):
        train(tx, 2, steps=1)


@pytest.mark.parametrize("make", [
    lambda: onebit_jax.onebit_adamw(0.05, AXIS, weight_decay=0.1, variance=1),
    lambda: optax.chain(onebit_jax.compressed_mean(AXIS), optax.sgd(0.01, momentum=0.9)),
    lambda: optax.chain(
        onebit_jax.exact_mean(AXIS), optax.adam(0.05), optax.add_decayed_weights(0.1)
    ),
])
def test_a_skipped_step_changes_nothing_but_counts(make):
    tx = make()
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(4))
    with jax.set_mesh(mesh(4)):
        state = (fresh(), tx.init(fresh()))
    bad = X.copy()
    bad[20, 3] = np.nan
    with jax.numpy_dtype_promotion("standard"):  # for optax.adam
        for _ in range(3):
            state, _ = step(state, (X, Y))
        before = jax.device_get(state)
        state, _ = step(state, (bad, Y))
    assert onebit_jax.metrics(state)["skipped_rounds"] == 1
    named = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(state), strict=True)
    for (path, old), new in named:
        name = jax.tree_util.keystr(path)
        if not name.endswith((".skipped", ".sent")):
            np.testing.assert_array_equal(new, old, err_msg=name)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))


@pytest.mark.parametrize("bad_batch", [3, 4, 5])
def test_a_bad_micro_batch_is_forgotten_after_its_exchange(bad_batch):
    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(0.05, AXIS, variance=2), 3)
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(2))
    with jax.set_mesh(mesh(2)):
        state = (fresh(), tx.init(fresh()))
    bad = np.full_like(X, np.nan)
    for t in range(12):
        before = np.asarray(state[0]["w"])
        state, _ = step(state, (bad if t == bad_batch else X, Y))
        moved = (np.asarray(state[0]["w"]) != before).any()
        assert moved == (t in (2, 8, 11))
    done = onebit_jax.metrics(state)
    assert (done["exact_rounds"], done["onebit_rounds"], done["skipped_rounds"]) == (2, 1, 1)


def test_batch_statistics_survive_a_bad_micro_batch():
    def loss(params, stats, batch):
        x, y = batch
        out = x @ params["w"] + params["b"][None]
        return jnp.mean((out - y) ** 2), {"mean": 0.9 * stats["mean"] + 0.1 * x.mean()}

    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(0.05, AXIS), 3)
    step = onebit_jax.make_train_step(loss, tx, mesh(2), mutable="stats")
    with jax.set_mesh(mesh(2)):
        state = (fresh(), tx.init(fresh()), {"mean": jnp.zeros(())})
    for t in range(6):
        state, _ = step(state, (np.full_like(X, np.nan) if t == 1 else X, Y))
        assert np.isfinite(np.asarray(state[2]["mean"]))


def test_the_mean_loss_reaches_the_chain_as_value():
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(
            onebit_jax.onebit_adam(0.05, AXIS), optax.contrib.reduce_on_plateau(patience=1)
        )
        step = onebit_jax.make_train_step(loss_fn, tx, mesh(2))
        with jax.set_mesh(mesh(2)):
            state = (fresh(), tx.init(fresh()))
        state, metrics = step(state, (X, Y))
    np.testing.assert_allclose(state[1][1].best_value, metrics["loss"], rtol=1e-6)


def test_a_state_from_a_mesh_can_be_resized_and_used():
    tx = onebit_jax.onebit_adam(0.05, AXIS, variance=2)
    (params, state), _ = train(tx, 4, steps=6, axis_type=AxisType.Explicit)
    resized = onebit_jax.resize_workers((params, state), 3)
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(3))
    new, _ = step(resized, (X, Y))
    assert onebit_jax.metrics(new)["onebit_rounds"] == 5
    assert new[1][0].errors.worker_error["w"].shape == (3, 6, 2)


def test_a_group_that_finished_its_round_is_held_with_the_other():
    tx = optax.partition(
        {"one": onebit_jax.onebit_adam(0.05, AXIS), "two": onebit_jax.onebit_adam(0.05, AXIS)},
        {"w": "one", "b": "two"},
    )
    loss = lambda p, b: jnp.sum(p["b"]) + jnp.mean(b[0] @ p["w"])
    step = onebit_jax.make_train_step(loss, tx, mesh(2))
    with jax.set_mesh(mesh(2)):
        state = (fresh(), tx.init(fresh()))
    state, _ = step(state, (np.full_like(X, np.nan), Y))
    done = onebit_jax.metrics(state)
    assert (done["exact_rounds"], done["skipped_rounds"]) == (0, 1)
    assert not np.asarray(state[0]["b"]).any()


def test_metrics_of_a_foreign_state():
    with pytest.raises(ValueError, match="no counts of rounds in this state"):
        onebit_jax.metrics(optax.adam(1e-3).init(fresh()))


def test_a_skipped_step_keeps_flax_step_and_batch_statistics():
    tx = onebit_jax.onebit_adam(0.02, AXIS)
    variables = Model().init(jax.random.key(0), X[:1], train=False)
    with jax.set_mesh(mesh(2)):
        state = BatchNormState.create(apply_fn=None, params=variables["params"], tx=tx,
                                      batch_stats=variables["batch_stats"])
    step = onebit_jax.make_train_step(
        bn_loss, tx, mesh(2), has_aux=True, mutable="batch_stats"
    )
    state, _ = step(state, (np.full_like(X, np.inf), Y), jax.random.key(0))
    assert int(state.step) == 0
    for leaf in jax.tree.leaves(state.batch_stats):
        assert np.isfinite(np.asarray(leaf)).all()


@pytest.mark.parametrize("make", [
    lambda: onebit_jax.onebit_adam(0.05, AXIS, variance=2),
    lambda: optax.chain(onebit_jax.compressed_mean(AXIS), optax.sgd(0.1)),
])
def test_empty_and_none_leaves_train(make):
    params = {**fresh(), "empty": jnp.zeros((0, 4)), "none": None}
    tx = make()
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(4))
    with jax.set_mesh(mesh(4)):
        state = (params, tx.init(params))
    for _ in range(4):
        state, metrics = step(state, (X, Y))
    assert state[0]["empty"].shape == (0, 4)
    assert np.isfinite(float(metrics["loss"]))
