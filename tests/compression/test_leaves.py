"""The stages of a round by themselves: workers in a list, and exchanges done by NumPy."""

import numpy as np
import oracle
import pytest

import onebit_jax
from onebit_jax.compression import leaves
from onebit_jax.compression.chunks import Chunks
from onebit_jax.compression.quantize import Encoded

QUANTIZER = onebit_jax.SignQuantizer()


def leaf(rank, w, value, error, server_error, divisor, limit=None):
    """What ``leaves.prepare`` makes, of a worker that is on no device."""
    cut = Chunks(value, w)
    return leaves.Leaf(
        cut, rank, QUANTIZER, limit, cut.lazy(value, 0), cut.lazy(divisor, 1),
        cut.tiles(error, 0), server_error, None,
    )


def rows(encoded, i):
    return Encoded(np.asarray(encoded.words)[i], np.asarray(encoded.scales)[i])


def together(parts):
    return Encoded(*(np.stack(x) for x in zip(*parts, strict=True)))


def one_round(values, errors, server_errors, divisor, limit=None):
    """(means, worker errors, server errors) of all workers, each from its own stages."""
    w = len(values)
    servers = [None] * w if server_errors is None else server_errors
    mine = [leaf(i, w, values[i], errors[i], servers[i], divisor, limit) for i in range(w)]
    sent = [leaves.encode(x) for x in mine]
    if mine[0].cut.direct:
        answers = [None] * w
        got = together([rows(s.encoded, 0) for s in sent])
    else:
        answers = [
            leaves.serve(x, together([rows(s.encoded, i) for s in sent]))
            for i, x in enumerate(mine)
        ]
        got = together([rows(a.encoded, 0) for a in answers])
    return zip(
        *(leaves.finish(x, s, a, got, True) for x, s, a in zip(mine, sent, answers, strict=True)),
        strict=True,
    )


@pytest.mark.parametrize("w", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [33, 1500])
def test_three_rounds_equal_the_oracle(w, n):
    rng = np.random.default_rng(n + w)
    divisor = rng.uniform(0.1, 10, n).astype(np.float32)
    reference = oracle.CompressedMean(n, w)
    errors = np.zeros((w, n), np.float32)
    servers = None if w <= 2 else np.zeros((w, 1, Chunks(divisor, w).length), np.float32)
    for _ in range(3):
        values = rng.normal(size=(w, n)).astype(np.float32)
        means, new_errors, new_servers = one_round(values, errors, servers, divisor)
        new_errors = np.asarray(new_errors)[:, 0]
        expected = reference.step(
            values.astype(np.float64), divisor.astype(np.float64),
            values + errors - new_errors, np.asarray(means[0]),
        )
        for mean in means:
            np.testing.assert_array_equal(mean, means[0])
        np.testing.assert_allclose(means[0], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(new_errors, reference.worker_error, rtol=1e-4, atol=1e-4)
        errors = new_errors
        if servers is not None:
            servers = np.asarray(new_servers)
            whole = servers.reshape(-1)[:n]
            np.testing.assert_allclose(whole, reference.server_error, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("w", [2, 4])
def test_a_stage_changes_nothing_that_another_reads(w):
    """Done twice, out of order, or not at all, a stage gives the same."""
    rng = np.random.default_rng(0)
    n = 100
    values, divisor = rng.normal(size=(w, n)).astype(np.float32), np.ones(n, np.float32)
    server = None if w == 2 else np.zeros((1, Chunks(divisor, w).length), np.float32)
    mine = leaf(0, w, values[0], np.zeros(n, np.float32), server, divisor)
    first = leaves.encode(mine)
    got = Encoded(*(np.repeat(np.asarray(x)[:1], w, axis=0) for x in first.encoded))
    if server is not None:
        leaves.serve(mine, got)
    again = leaves.encode(mine)
    for a, b in zip(first.encoded, again.encoded, strict=True):
        np.testing.assert_array_equal(a, b)
