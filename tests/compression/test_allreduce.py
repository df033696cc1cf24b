import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from meshes import AXIS, MODES, run

import onebit_jax
from onebit_jax.compression import allreduce, feedback, leaves

SIZES = (0, 1, 7, 8, 31, 32, 33, 1000, 70_000)


def rounds_on_workers(mode, w, values, quantizer, divisors=None, error_dtype=None):
    """All rounds in one program; every worker returns its own view of each."""

    def worker(rows, divisors):
        errors = feedback.init_errors(jax.tree.map(lambda x: x[0], rows), AXIS, error_dtype)

        def one(errors, local):
            means, errors, finite, *_ = allreduce.compressed_allreduce(
                local, errors, AXIS, quantizer, divisors
            )
            return errors, (means, errors, finite)

        return jax.lax.scan(one, errors, rows)[1]

    stacked = None if divisors is None else jax.tree.map(
        lambda d: jnp.broadcast_to(d, (w, *d.shape)), divisors
    )
    return run(mode, w, worker, values, stacked)


def assert_close(got, expected, values, divisor):
    """To 1e-5 of what it was computed from, in the units in which it is quantized."""
    d = 1.0 if divisor is None else divisor
    largest = max(np.abs(x / d).max(initial=0) for x in (expected, values))
    np.testing.assert_allclose(got / d, expected / d, rtol=1e-5, atol=1e-5 * largest)


def server_errors(stacked, t):
    """All workers' chunks of a leaf after round t, in a row."""
    return np.zeros(0) if stacked is None else np.asarray(stacked[:, t, 0]).reshape(-1)


@pytest.mark.parametrize(
    ("w", "preconditioned"), [(1, True), (2, False), (3, True), (4, False), (8, True)]
)
def test_twenty_rounds_equal_the_oracle(w, preconditioned):
    rng = np.random.default_rng(w)
    values = {f"n{n}": rng.normal(size=(w, 20, n)).astype(np.float32) for n in SIZES}
    divisors = None
    if preconditioned:
        divisors = {k: rng.uniform(0.01, 10, v.shape[-1]).astype(np.float32)
                    for k, v in values.items()}
    means, errors, finite = rounds_on_workers(
        "vma", w, values, onebit_jax.SignQuantizer(), divisors
    )
    assert np.all(finite)
    for name, local in values.items():
        n = local.shape[-1]
        reference = oracle.CompressedMean(n, w)
        d = None if divisors is None else divisors[name].astype(np.float64)
        for t in range(20):
            got = np.asarray(means[name][:, t])
            worker = np.asarray(errors.worker_error[name][:, t, 0])
            server = server_errors(errors.server_error[name], t)
            before = np.asarray(errors.worker_error[name][:, t - 1, 0]) if t else 0.0
            expected = reference.step(
                local[:, t].astype(np.float64), d, local[:, t] + before - worker, got[0]
            )
            assert_close(got, np.tile(expected, (w, 1)), local[:, t], d)
            assert_close(worker, reference.worker_error, local[:, t], d)
            assert w > 2 or errors.server_error[name] is None, "two workers need no server"
            assert_close(np.append(server, [0] * n)[:n], reference.server_error, local[:, t], d)
            assert not server[n:].any(), "padding has no error"


@pytest.mark.parametrize("w", [1, 2, 3])
@pytest.mark.parametrize("ragged", [0, 5000])
def test_leaves_that_are_worked_on_in_tiles(w, ragged):
    n = 65536 * w + ragged
    rng = np.random.default_rng(w)
    values = rng.normal(size=(w, 3, n)).astype(np.float32)
    divisor = rng.uniform(0.01, 10, n).astype(np.float32)
    quantizer = onebit_jax.SignQuantizer()
    means, errors, _ = rounds_on_workers("vma", w, values, quantizer, divisor)
    reference = oracle.CompressedMean(n, w)
    d = divisor.astype(np.float64)
    for t in range(3):
        worker = np.asarray(errors.worker_error[:, t, 0])
        before = np.asarray(errors.worker_error[:, t - 1, 0]) if t else 0.0
        got = np.asarray(means[:, t])
        expected = reference.step(
            values[:, t].astype(np.float64), d, values[:, t] + before - worker, got[0]
        )
        assert_close(got, np.tile(expected, (w, 1)), values[:, t], d)
        assert_close(worker, reference.worker_error, values[:, t], d)
        if w > 2:
            server = server_errors(errors.server_error, t)
            assert_close(server[:n], reference.server_error, values[:, t], d)
            assert not server[n:].any(), "padding has no error"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w", [1, 3, 4])
@pytest.mark.parametrize(("block_size", "scale"), [(None, "rms"), (64, "mean_abs")])
def test_all_ways_to_bind_the_axis_agree_with_the_oracle(mode, w, block_size, scale):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(w, 5, 7, 30)).astype(np.float32)
    quantizer = onebit_jax.SignQuantizer(block_size, scale)
    means, errors, _ = rounds_on_workers(mode, w, values, quantizer)
    reference = oracle.CompressedMean(210, w, block_size, scale)
    for t in range(5):
        expected = reference.step(values[:, t].reshape(w, 210).astype(np.float64))
        got = np.asarray(means[:, t]).reshape(w, 210)
        np.testing.assert_allclose(got, np.tile(expected, (w, 1)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            np.asarray(errors.worker_error[:, t, 0]).reshape(w, 210), reference.worker_error,
            rtol=1e-5, atol=1e-5,
        )


def test_without_a_mesh_it_is_one_worker():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    errors = feedback.init_errors(x, None)
    reference = oracle.CompressedMean(1000, 1)
    for _ in range(3):
        mean, errors, *_ = allreduce.compressed_allreduce(
            jnp.asarray(x), errors, None, onebit_jax.SignQuantizer()
        )
        np.testing.assert_allclose(mean, reference.step(x[None].astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("w", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_replicas_are_identical_and_nothing_is_lost(w, preconditioned):
    """Sum of outputs + mean worker error + server error = sum of mean inputs."""
    rng = np.random.default_rng(w)
    values = rng.normal(size=(w, 50, 1111)).astype(np.float32)
    divisor = rng.uniform(0.5, 2, size=1111).astype(np.float32) if preconditioned else None
    means, errors, _ = rounds_on_workers("vma", w, values, onebit_jax.SignQuantizer(), divisor)
    means = np.asarray(means)
    for replica in means[1:]:
        np.testing.assert_array_equal(replica, means[0])
    for t in (0, 9, 49):
        worker = np.asarray(errors.worker_error[:, t, 0]).mean(axis=0)
        total = means[0, : t + 1].sum(axis=0, dtype=np.float64) + worker
        if w > 2:
            total += server_errors(errors.server_error, t)[:1111]
        expected = values[:, : t + 1].mean(axis=0, dtype=np.float64).sum(axis=0)
        np.testing.assert_allclose(total, expected, atol=1e-4)


@pytest.mark.parametrize("w", [2, 3])
def test_errors_in_bfloat16_lose_only_their_rounding(w):
    """One round equals the oracle; 50 lose at most half a bit of each error per round."""
    values = np.random.default_rng(w).normal(size=(w, 50, 3000)).astype(np.float32)
    quantizer = onebit_jax.SignQuantizer()
    means, errors, _ = rounds_on_workers("vma", w, values, quantizer, error_dtype="bfloat16")
    assert {e.dtype for e in jax.tree.leaves(errors)} == {jnp.bfloat16.dtype}
    reference = oracle.CompressedMean(3000, w)
    expected = reference.step(values[:, 0].astype(np.float64), mean_hint=np.asarray(means)[0, 0])
    np.testing.assert_allclose(means[0, 0], expected, rtol=1e-5, atol=1e-6)
    first = np.asarray(errors.worker_error[:, 0, 0], np.float64)
    np.testing.assert_allclose(first, reference.worker_error, rtol=2**-8, atol=1e-6)

    worker = np.asarray(errors.worker_error[:, :, 0], np.float64)
    total = np.asarray(means)[0].sum(axis=0, dtype=np.float64) + worker[:, -1].mean(axis=0)
    lost = np.abs(worker).sum(axis=1).mean(axis=0)
    if w > 2:
        server = np.asarray(errors.server_error[:, :, 0], np.float64)
        server = server.swapaxes(0, 1).reshape(50, -1)[:, :3000]
        total += server[-1]
        lost += np.abs(server).sum(axis=0)
    off = np.abs(total - values.mean(axis=0, dtype=np.float64).sum(axis=0))
    assert (off <= 2**-8 * lost + 1e-4).all()
    assert off.max() > 1e-3, "it does round"


def test_more_workers_than_are_unrolled():
    w, n = leaves.UNROLLED_WORKERS + 8, 3000
    values = np.random.default_rng(0).normal(size=(w, 3, n)).astype(np.float32)
    means, _, _ = rounds_on_workers("vmap", w, values, onebit_jax.SignQuantizer())
    reference = oracle.CompressedMean(n, w)
    for t in range(3):
        hint = np.asarray(means)[0, t]
        expected = reference.step(values[:, t].astype(np.float64), mean_hint=hint)
        np.testing.assert_allclose(np.asarray(means)[5, t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 10])
def test_decoded_values_do_not_depend_on_padding(n):
    values = np.full((8, 50, n), 0.7, np.float32)
    means, _, _ = rounds_on_workers("vma", 8, values, onebit_jax.SignQuantizer())
    np.testing.assert_allclose(np.asarray(means)[:, 0], 0.7, rtol=0.01)
    np.testing.assert_allclose(np.asarray(means), 0.7, rtol=0.01)


@pytest.mark.parametrize(("mode", "w"), [*((mode, 3) for mode in MODES), ("vma", 1), ("vma", 2)])
def test_what_is_above_the_limit_is_cut_and_told_to_all(mode, w):
    n, limit = 900, 2.0
    values = np.random.default_rng(0).normal(size=(w, 3, n)).astype(np.float32)
    values[:, 1] *= 50  # only the second round is too large
    divisor = np.full(n, 0.7, np.float32)

    def worker(rows):
        def one(errors, local):
            means, errors, _, cut, _ = allreduce.compressed_allreduce(
                local, errors, AXIS, onebit_jax.SignQuantizer(), divisor, limit
            )
            return errors, (means, errors.server_error, cut)

        return jax.lax.scan(one, feedback.init_errors(rows[0], AXIS), rows)[1]

    means, server, cut = run(mode, w, worker, values)
    reference = oracle.CompressedMean(n, w)
    for t in range(3):
        hint = np.asarray(means)[0, t]
        expected = reference.step(values[:, t].astype(np.float64), divisor.astype(np.float64),
                                  mean_hint=hint, limit=limit)
        np.testing.assert_allclose(np.asarray(means)[-1, t], expected, rtol=1e-4)
        assert np.any(reference.server_error) == (w > 2)
        held = np.append(server_errors(server, t), np.zeros(n))[:n]
        np.testing.assert_allclose(held, reference.server_error, rtol=1e-4, atol=1e-4)
        assert (np.asarray(cut)[:, t] > 0).tolist() == [bool(reference.cut)] * w
    assert np.asarray(cut)[0, 1] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_is_seen_by_all_and_leaves_the_errors(mode, bad):
    values = np.random.default_rng(0).normal(size=(4, 2, 3000)).astype(np.float32)
    values[2, 1, 1234] = bad
    _, errors, finite = rounds_on_workers(mode, 4, values, onebit_jax.SignQuantizer())
    np.testing.assert_array_equal(finite, [[True, False]] * 4)
    for error in jax.tree.leaves(errors):
        np.testing.assert_array_equal(error[:, 1], error[:, 0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w", [1, 2, 3, 8])
def test_exact_mean_in_full_and_half_precision(mode, w, monkeypatch):
    monkeypatch.setattr(allreduce, "GROUP", 16)  # so that there are two, one of two leaves
    values = {
        "a": np.random.default_rng(0).normal(size=(w, 5, 7)).astype(np.float32),
        "empty": np.zeros((w, 0), np.float32),
        "scalar": np.arange(w, dtype=np.float32),
    }
    for wire, rtol in ((None, 1e-6), ("bfloat16", 2**-7), ("float16", 2**-9)):
        means, finite = run(
            mode, w, lambda row, wire=wire: allreduce.exact_allreduce(row, AXIS, wire), values
        )
        assert np.all(finite)
        for name, local in values.items():
            exact = np.broadcast_to(local.mean(axis=0), local.shape)
            # Each term is rounded relative to itself, not to the mean.
            size = np.abs(local).max(initial=0)
            np.testing.assert_allclose(means[name], exact, rtol=rtol, atol=rtol * size)
            for replica in np.asarray(means[name]):
                np.testing.assert_array_equal(replica, np.asarray(means[name])[0])
