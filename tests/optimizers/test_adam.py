import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from meshes import AXIS, COUNTS, MODES, run

import onebit_jax


def gradients(w, steps, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (6, 50), "b": (3,), "s": (), "empty": (0, 4)}
    return {k: rng.normal(size=(w, steps, *s)).astype(np.float32) for k, s in shapes.items()}


def parameters():
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda g: rng.normal(size=g.shape[2:]).astype(np.float32), gradients(1, 1))


def train(mode, w, tx, grads, params):
    """Every worker's parameters and state after each step."""

    def worker(grads, params):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, state)

        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (w, *p.shape)), params)
    return run(mode, w, worker, grads, copies)


def train_exactly(tx, grads, params):
    """Optax on the mean gradient, without workers."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32
        return jax.lax.scan(step, (params, tx.init(params)), mean)[0][0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w", [1, 4])
def test_before_the_first_1bit_round_it_is_adam(mode, w):
    grads, params = gradients(w, 100), parameters()
    trained, state = train(mode, w, onebit_jax.onebit_adam(1e-2, AXIS, variance=100),
                           grads, params)
    expected = train_exactly(optax.adam(1e-2), grads, params)
    for name in expected:
        for replica in np.asarray(trained[name])[:, -1]:
            np.testing.assert_allclose(replica, expected[name], rtol=1e-6, atol=1e-6)
    assert np.asarray(state[0].rounds.exact)[:, -1].tolist() == [100] * w


@pytest.mark.parametrize("w", [2, 4])
def test_exact_rounds_may_send_two_bytes_per_entry(w):
    grads, params = gradients(w, 20), parameters()
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=20, wire_dtype="bfloat16")
    trained, state = train("vma", w, tx, grads, params)
    rounded = lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32)
    # What goes out is rounded, the mean of that is in float32. More than two workers have a
    # server, which sends it on, rounded once more; two send each other all they have.
    returned, phases, rows = (rounded, 2, w) if w > 2 else (np.asarray, 1, 1)
    means = {k: returned(rounded(g).mean(axis=0))[None] for k, g in grads.items()}
    expected = train_exactly(optax.adam(1e-2), means, params)
    for name in expected:
        for replica in np.asarray(trained[name])[:, -1]:
            np.testing.assert_allclose(replica, expected[name], rtol=1e-5, atol=1e-6)
    bytes_each = phases * (w - 1) * sum(-(-p.size // rows) for p in params.values()) * 2
    assert onebit_jax.bytes_sent(jax.tree.map(lambda x: x[:, -1], state)) == 20 * bytes_each
    with pytest.raises(ValueError, match="wire_dtype must be None .*found 'int8'"):
        onebit_jax.onebit_adam(1e-2, AXIS, wire_dtype="int8")


def test_before_the_first_1bit_round_it_is_adamw():
    grads, params = gradients(4, 100), parameters()
    mask = {"w": True, "b": False, "s": True, "empty": True}
    schedule = optax.linear_schedule(1e-2, 1e-3, 100)
    tx = onebit_jax.onebit_adamw(schedule, AXIS, weight_decay=0.1, mask=mask, variance=100)
    trained, _ = train("vma", 4, tx, grads, params)
    expected = train_exactly(optax.adamw(schedule, weight_decay=0.1, mask=mask), grads, params)
    for name in expected:
        got = np.asarray(trained[name])[0, -1]
        np.testing.assert_allclose(got, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("w", COUNTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precondition": False, "bias_correction": False},
        {"variance_floor": 0.5, "quantizer": onebit_jax.SignQuantizer(64, "mean_abs", 1.5)},
    ],
)
def test_directions_equal_the_numpy_oracle(w, options):
    """Exact, 1-bit and refreshed rounds in one run, one leaf."""
    n, steps = 300, 24
    grads = np.random.default_rng(1).normal(size=(w, steps, n)).astype(np.float32)
    grads *= np.geomspace(0.1, 10, n, dtype=np.float32)
    policy = onebit_jax.refresh(every=2, exact_steps=5)
    tx = onebit_jax.scale_by_onebit_adam(AXIS, variance=policy, **options)

    def worker(grads):
        def step(state, g):
            updates, state = tx.update(g, state)
            return state, (updates, state)

        return jax.lax.scan(step, tx.init(grads[0]), grads)[1]

    updates, state = run("vma", w, worker, grads)
    q = options.get("quantizer", onebit_jax.SignQuantizer())
    reference = oracle.OnebitAdam(
        n, w, floor=options.get("variance_floor", 1e-2),
        precondition=options.get("precondition", True),
        bias_correction=options.get("bias_correction", True),
        block_size=q.block_size, scale=q.scale, gain=q.gain,
    )
    exact = np.diff(np.asarray(state.rounds.exact)[0], prepend=0) > 0
    last, expected_exact = -1, []
    for t in range(steps):
        wanted = t < 5 or t - last >= max(last // 2, 1)
        expected_exact.append(wanted)
        direction = reference.step(grads[:, t].astype(np.float64), wanted, t - last)
        last = t if wanted else last
        size = np.abs(direction).max()
        for replica in np.asarray(updates)[:, t]:
            np.testing.assert_allclose(replica, direction, rtol=1e-4, atol=1e-4 * size)
    assert exact.tolist() == expected_exact
    assert 0 < sum(exact) < steps


@pytest.mark.parametrize("mode", ["vma", "no_vma", "pmap"])
@pytest.mark.parametrize("w", [1, 2, 3, 5, 8])
def test_workers_stay_bit_identical(mode, w):
    grads, params = gradients(w, 50), parameters()
    tx = onebit_jax.onebit_adamw(1e-2, AXIS, weight_decay=0.1, variance=5)
    trained, state = train(mode, w, tx, grads, params)
    for leaf in jax.tree.leaves((trained, state[0].mu, state[0].nu)):
        for replica in np.asarray(leaf):
            np.testing.assert_array_equal(replica, np.asarray(leaf)[0])
    assert np.isfinite(np.asarray(trained["w"])).all()


def test_an_int_is_exactly_that_many_exact_rounds():
    for n in (1, 2, 7):
        _, state = train("vma", 2, onebit_jax.onebit_adam(1e-2, AXIS, variance=n),
                         gradients(2, 12), parameters())
        rounds = state[0].rounds
        assert np.asarray(rounds.exact)[0].tolist() == [min(t + 1, n) for t in range(12)]
        assert np.asarray(rounds.onebit)[0, -1] == 12 - n
        nu = np.asarray(state[0].nu["w"])[0]
        assert (nu[n:] == nu[n - 1]).all(), "frozen"
        assert n == 1 or (nu[n - 2] != nu[n - 1]).any(), "moving before"


def test_rarely_seen_coordinates_stay_bounded_and_learn():
    """Frozen after one round; one coordinate never, one only later gets gradient."""
    steps, late = 200, 50
    grads = np.random.default_rng(0).normal(1, 0.3, size=(2, steps, 40)).astype(np.float32)
    grads[:, :, 0] = 0
    grads[:, :late, 1], grads[:, late:, 1] = 0, 1
    dead = np.zeros((2, steps, 3), np.float32)  # a leaf with no gradient at first
    dead[:, late:] = 1
    tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=1)
    params = {"x": np.zeros(40, np.float32), "dead": np.zeros(3, np.float32)}
    trained, state = train("vma", 2, tx, {"x": grads, "dead": dead}, params)
    for name in params:
        path = np.asarray(trained[name])[0]
        updates = np.diff(path, axis=0, prepend=0) / 1e-3
        assert np.isfinite(path).all()
        assert np.sqrt((updates**2).mean(axis=1)).max() < 10
    assert np.asarray(trained["x"])[0, -1, 1] < np.asarray(trained["x"])[0, late - 1, 1] - 0.01
    assert np.asarray(trained["dead"])[0, -1].max() < -0.01


@pytest.mark.parametrize("ratio", [100, 1000])
def test_gradients_of_unlike_scale_share_no_noise(ratio):
    """Two blocks of 512, one with gradients ``ratio`` times smaller; both must converge."""
    n, w, steps = 512, 4, 3000
    rng = np.random.default_rng(0)
    target = rng.normal(size=2 * n).astype(np.float32)
    curvature = np.repeat(np.asarray([1, 1 / ratio], np.float32), n)
    tx = onebit_jax.onebit_adam(2e-3, AXIS, variance=300)

    def worker(noise_key):
        def step(carry, key):
            x, state = carry
            noise = 0.1 * jax.random.normal(key, x.shape)
            updates, state = tx.update(curvature * (x - target + noise), state, x)
            return (optax.apply_updates(x, updates), state), jnp.abs(updates).max()

        x = jnp.zeros(2 * n)
        (x, _), largest = jax.lax.scan(step, (x, tx.init(x)), jax.random.split(noise_key, steps))
        return x, largest.max()

    x, largest = run("no_vma", w, worker, jax.random.split(jax.random.key(0), w))
    error = np.asarray(x)[0] - target
    assert np.sqrt((error[n:] ** 2).mean()) < 0.04
    assert np.asarray(largest).max() < 5 * 2e-3


@pytest.mark.parametrize("variance", [1, 3, onebit_jax.refresh(exact_steps=2)])
def test_zero_learning_rate_moves_moments_but_not_parameters(variance):
    rates = jnp.asarray([0.0] * 5 + [1e-2] * 10 + [0.0] * 5)
    tx = onebit_jax.onebit_adam(lambda count: rates[count], AXIS, variance=variance)
    trained, state = train("vma", 2, tx, gradients(2, 20), parameters())
    path, mu = np.asarray(trained["w"])[0], np.asarray(state[0].mu["w"])[0]
    assert np.isfinite(path).all()
    assert (path[:5] == path[0]).all()
    assert (path[14:] == path[14]).all()
    assert (path[5:14] != path[4]).any()
    assert all((mu[t] != mu[t - 1]).any() for t in range(1, 20))


def test_leaf_dtypes_side_by_side():
    rng = np.random.default_rng(0)
    dtypes = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
    grads = {k: jnp.asarray(rng.choice([-6e4, 6e4], size=(2, 10, 40)), d)
             for k, d in dtypes.items()}
    params = {k: jnp.zeros(40, d) for k, d in dtypes.items()}
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=3)
    trained, state = train("vma", 2, tx, grads, params)
    mean = onebit_jax.compressed_mean(AXIS)
    first = jax.tree.map(lambda g: g[:, 0], grads)
    for direct in (tx, mean):
        updates = run("vma", 2, lambda g, tx=direct: tx.update(g, tx.init(g))[0], first)
        for name, dtype in dtypes.items():
            assert updates[name].dtype == dtype
            assert np.isfinite(np.asarray(updates[name], np.float32)).all()
    for name, dtype in dtypes.items():
        assert trained[name].dtype == dtype
        assert np.isfinite(np.asarray(trained[name], np.float32)).all()
        for tree in (state[0].mu, state[0].nu, state[0].errors.worker_error):
            assert tree[name].dtype == jnp.float32


def test_errors_may_be_kept_in_bfloat16():
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=3, error_dtype="bfloat16")
    _, state = train("vma", 3, tx, gradients(3, 10), parameters())
    for error in jax.tree.leaves(state[0].errors):
        assert error.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="error_dtype must be float32 or bfloat16, found float16"):
        onebit_jax.compressed_mean(None, error_dtype="float16").init(jnp.zeros(3))


def test_mu_dtype_is_how_the_first_moment_is_kept():
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=3, mu_dtype="bfloat16")
    trained, state = train("vma", 2, tx, gradients(2, 10), parameters())
    assert state[0].mu["w"].dtype == jnp.bfloat16
    assert trained["w"].dtype == jnp.float32


@pytest.mark.parametrize("mode", ["vma", "pmap"])
@pytest.mark.parametrize("variance", [20, 2])
def test_a_bad_gradient_on_one_worker_skips_the_step_on_all(mode, variance):
    grads = gradients(4, 12)
    for t, bad in ((5, np.nan), (9, np.inf)):
        grads["w"][2, t, 3, 7] = bad
    schedule = optax.linear_schedule(1e-2, 1e-3, 20)
    tx = onebit_jax.onebit_adamw(schedule, AXIS, weight_decay=0.1, variance=variance)
    trained, state = train(mode, 4, tx, grads, parameters())
    adam = state[0]
    assert np.asarray(adam.rounds.skipped)[:, -1].tolist() == [2] * 4
    assert np.asarray(adam.count)[:, -1].tolist() == [10] * 4
    same = (trained, adam._replace(rounds=adam.rounds.exact), state[1:])
    for t in (5, 9):
        for leaf in jax.tree.leaves(same):
            np.testing.assert_array_equal(np.asarray(leaf)[:, t], np.asarray(leaf)[:, t - 1])
    for leaf in jax.tree.leaves(trained):
        assert np.isfinite(np.asarray(leaf)).all()
    assert (np.asarray(trained["w"])[:, 10] != np.asarray(trained["w"])[:, 9]).any()


def test_the_paper_preset_equals_its_oracle():
    n, w, steps = 100, 2, 10
    grads = np.random.default_rng(2).normal(size=(w, steps, n)).astype(np.float32)
    params = np.zeros(n, np.float32)
    tx = onebit_jax.paper_1bit_adam(1.0, AXIS, warmup_steps=4)
    trained, _ = train("vma", w, tx, {"x": grads}, {"x": params})
    reference = oracle.OnebitAdam(n, w, floor=0.0, precondition=False, block_size=None)
    x = np.zeros(n)
    for t in range(steps):
        x = x - reference.step(grads[:, t].astype(np.float64), exact=t < 4)
        np.testing.assert_allclose(np.asarray(trained["x"])[0, t], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["vma", "pmap"])
def test_gradients_that_grow_suddenly_bring_exact_rounds_back(mode):
    """A stale second moment, 10,000 times too small: no update above the limit."""
    grads = np.random.default_rng(0).normal(1, 0.3, size=(2, 400, 600)).astype(np.float32)
    grads[:, :200] *= 1e-2
    tx = onebit_jax.onebit_adam(1.0, AXIS, variance=onebit_jax.refresh(exact_steps=20))
    trained, state = train(mode, 2, tx, {"x": grads}, {"x": np.zeros(600, np.float32)})
    updates = np.abs(np.diff(np.asarray(trained["x"])[0], axis=0))
    assert updates.max() < 8.001, "the limit"
    exact = np.diff(np.asarray(state[0].rounds.exact)[0], prepend=0)
    assert exact[:200].sum() < 70
    assert exact[201:233].all(), "as at the start of a run"
    assert exact[300:].sum() < 40
    # Adam's own updates there are of size 1.
    assert updates[-20:].mean() < 2


@pytest.mark.parametrize("variance", [20, 2])
def test_a_gradient_whose_square_overflows_is_skipped(variance):
    """It is finite, but a second moment of it would not be."""
    grads = np.random.default_rng(0).normal(size=(2, 6, 700)).astype(np.float32)
    grads[1, 1, 3], grads[0, 4, 3] = 1e20, -3e38
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=variance)
    trained, (adam, *_) = train("vma", 2, tx, {"x": grads}, {"x": np.zeros(700, np.float32)})
    for leaf in jax.tree.leaves((trained, adam)):
        assert np.isfinite(np.asarray(leaf)).all()
    assert np.asarray(adam.rounds.skipped)[1].tolist() == [0, 1, 1, 1, 2, 2]


def test_no_product_of_scale_and_divisor_overflows():
    """Second moments of other sizes in one block, and a gradient that jumps."""
    grads = np.full((3, 4, 40), 1e10, np.float32)
    grads[:, 0, 0], grads[:, 2, 0] = 1e-4, 1e32
    quantizer = onebit_jax.SignQuantizer(scale="mean_abs")
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=1, variance_floor=0, quantizer=quantizer)
    _, (adam, *_) = train("vma", 3, tx, {"x": grads}, {"x": np.zeros(40, np.float32)})
    for leaf in jax.tree.leaves(adam):
        assert np.isfinite(np.asarray(leaf)).all()
    assert np.asarray(adam.rounds.skipped)[1].tolist() == [0, 0, 1, 1]


def test_a_momentum_of_fewer_bits_never_becomes_infinite():
    grads = np.full((2, 5, 40), 1e8, np.float32)
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=2, mu_dtype="float16")
    _, (adam, *_) = train("vma", 2, tx, {"x": grads}, {"x": np.zeros(40, np.float32)})
    assert (np.asarray(adam.mu["x"]) == np.finfo(np.float16).max).all()
    assert not np.asarray(adam.rounds.skipped).any()


def test_a_few_cut_blocks_do_not():
    """One row of an embedding that appears once in a while."""
    grads = np.random.default_rng(0).normal(size=(2, 300, 64, 64)).astype(np.float32)
    grads[:, :, 5] = 0
    grads[:, 100::50, 5] = 30
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=onebit_jax.refresh(exact_steps=50))
    _, state = train("vma", 2, tx, {"x": grads}, {"x": np.zeros((64, 64), np.float32)})
    assert not np.asarray(state[0].cut).any()
    assert np.asarray(state[0].rounds.exact)[0, -1] < 110


@pytest.mark.parametrize("w", [1, 2, 3])
def test_the_limit_holds_from_the_second_step_on(w):
    """Where the bias correction of the first moment is still large."""
    grads = np.full((w, 10, 40), 1e-6, np.float32)
    grads[:, 1:] = 1e3
    tx = onebit_jax.onebit_adam(1.0, AXIS, variance=1)
    trained, _ = train("vma", w, tx, {"x": grads}, {"x": np.zeros(40, np.float32)})
    updates = np.abs(np.diff(np.asarray(trained["x"])[0], axis=0))
    np.testing.assert_allclose(updates, 8, rtol=1e-4)


def test_none_leaves_on_a_mesh():
    tx = onebit_jax.onebit_adam(1e-2, AXIS, variance=1)
    grads = {"x": np.ones((2, 3, 5), np.float32), "frozen": None}
    trained, _ = train("vma", 2, tx, grads, {"x": np.zeros(5, np.float32), "frozen": None})
    assert trained["frozen"] is None
    assert np.asarray(trained["x"]).any()


def test_the_quantizer_must_be_one():
    tx = onebit_jax.onebit_adam(1e-2, None, variance=1, quantizer=512)
    state = tx.init(jnp.ones(3))
    with pytest.raises(TypeError, match="quantizer must be a SignQuantizer, found 512"):
        tx.update(jnp.ones(3), state)
