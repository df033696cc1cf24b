"""The pieces of an update one by one, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import onebit_jax
from onebit_jax.compression import feedback
from onebit_jax.optimizers import moments

N = 1200
RULE = moments.Rule(
    axis_name=None, b1=0.9, b2=0.99, eps=1e-8, quantizer=onebit_jax.SignQuantizer(),
    precondition=True, variance_floor=1e-2, bias_correction=True, wire_dtype=None,
)


def some(seed, nu_count=5):
    """Moments in the middle of a run, one leaf of N; a tenth of nu is 0."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(size=N).astype(np.float32)
    nu = rng.uniform(0, 2, N).astype(np.float32) * (rng.uniform(size=N) > 0.1)
    return moments.before_round(
        jnp.asarray(mu), jnp.asarray(nu, jnp.float32), moments.span_means(jnp.asarray(nu)),
        jnp.int32(nu_count), feedback.init_errors(jnp.zeros(N), None),
    )


def span_means(v):
    return np.asarray([v[i : i + 512].mean() for i in range(0, len(v), 512)])


@pytest.mark.parametrize("gap", [1, 7])
def test_an_exact_round(gap):
    before = some(0)
    g = np.random.default_rng(1).normal(size=N).astype(np.float32)
    after = moments.exact_round(RULE, before, jnp.asarray(g), jnp.int32(gap))
    keep = 0.99**gap
    np.testing.assert_allclose(after.mu, 0.9 * before.mu + 0.1 * g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.nu, keep * before.nu + (1 - keep) * g**2, rtol=1e-5)
    np.testing.assert_allclose(after.nu_spans, span_means(np.asarray(after.nu)), rtol=1e-5)
    assert after.nu_count == 5 + gap
    assert after.finite
    assert after.cut == 0
    assert after.errors is before.errors


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20])
def test_an_exact_round_of_what_is_not_finite_moves_nothing(bad):
    before = some(0)
    after = moments.exact_round(RULE, before, jnp.full(N, bad, jnp.float32), jnp.int32(1))
    assert not after.finite
    for name in ("mu", "nu", "nu_spans", "nu_count"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize("precondition", [True, False])
def test_a_onebit_round_equals_the_oracle(precondition):
    rule = dataclasses.replace(RULE, precondition=precondition)
    before = some(2)
    g = np.random.default_rng(3).normal(size=N).astype(np.float32)
    after = moments.onebit_round(rule, before, jnp.asarray(g), jnp.int32(9))
    d = None
    if precondition:
        floor = 1e-2 * np.repeat(span_means(np.asarray(before.nu)), 512)[:N]
        d = np.sqrt(np.maximum(before.nu, floor) / (1 - 0.99**5)) + 1e-8
    limit = 8 * (1 - 0.9**10) if precondition else np.inf
    reference = oracle.CompressedMean(N, 1)
    value = 0.9 * np.asarray(before.mu, np.float64) + 0.1 * g
    sent = value - np.asarray(after.errors.worker_error[0])
    expected = reference.step(value[None], d, sent[None], limit=limit)
    np.testing.assert_allclose(after.mu, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        after.errors.worker_error[0], reference.worker_error[0], rtol=1e-4, atol=1e-4
    )
    assert after.nu is before.nu
    assert after.nu_count is before.nu_count


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("floored", [True, False])
def test_directions(bias_correction, floored):
    rule = dataclasses.replace(RULE, bias_correction=bias_correction)
    m = some(4)
    found = moments.directions(rule, m, jnp.int32(3), jnp.bool_(floored))
    mu, nu = np.asarray(m.mu, np.float64), np.asarray(m.nu, np.float64)
    if floored:
        nu = np.maximum(nu, 1e-2 * np.repeat(span_means(nu), 512)[:N])
    if bias_correction:
        mu, nu = mu / (1 - 0.9**3), nu / (1 - 0.99**5)
    np.testing.assert_allclose(found, mu / (np.sqrt(nu) + 1e-8), rtol=1e-4)


def test_until_the_first_onebit_round_they_are_those_of_optax():
    tx = optax.scale_by_adam(0.9, 0.99)
    state = tx.init(jnp.zeros(N))
    own = moments.before_round(
        state.mu, state.nu, moments.init_spans(state.nu), state.count,
        feedback.init_errors(jnp.zeros(N), None),
    )
    rng = np.random.default_rng(5)
    for t in range(1, 6):
        g = jnp.asarray(rng.normal(size=N), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):
            expected, state = tx.update(g, state)
        own = moments.exact_round(RULE, own, g, jnp.int32(1))
        found = moments.directions(RULE, own, jnp.int32(t), jnp.bool_(False))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_the_round_that_is_due_is_the_one_that_is_made(exact, static):
    before = some(6)
    after = moments.one_of(
        exact if static else jnp.bool_(exact),
        lambda m: m._replace(nu_count=m.nu_count + 10),
        lambda m: m._replace(nu_count=m.nu_count + 100),
        before,
    )
    assert after.nu_count == 5 + (10 if exact else 100)


def test_corrections_of_no_step_divide_by_nothing():
    assert RULE.nu_correction(jnp.int32(0)) > 0
    directions = moments.directions(RULE, some(7, nu_count=0), jnp.int32(0), jnp.bool_(True))
    assert np.isfinite(directions).all()


def test_bytes_of_both_rounds():
    # One worker sends nothing; what several send is compared with the program in audit.
    assert moments.round_bytes(RULE, jnp.zeros(N)) == (0, 0)
