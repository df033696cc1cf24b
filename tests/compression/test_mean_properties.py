"""What holds for the 1-bit mean of every tree, whatever finite numbers are in it.

Compared with NumPy: what is sent and kept adds up, errors stay bounded, all workers
get the same, and a round in which anything is not finite changes nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import trees
from hypothesis import strategies as st
from meshes import AXIS, COUNTS
from trees import LARGEST, ROUNDS, TINY, Case, U, bits, case, leaf

import onebit_jax
from onebit_jax.compression import allreduce, feedback


@dataclasses.dataclass(frozen=True)
class MeanCase(Case):
    """With or without divisors; without, it is the public transformation."""

    divided: bool = False


Q = onebit_jax.SignQuantizer
MEANS = (
    case(MeanCase, {"a": leaf((25, 28)), "b": [leaf(), None, leaf((0,))]}, 4),
    case(MeanCase, [leaf((3,), "bfloat16"), {"x": leaf((33,), "float16")}], 8, Q(32)),
    case(MeanCase, leaf((1025,)), 3, Q(64, "mean_abs"), divided=True),
    case(MeanCase, (leaf((1500,)), (leaf((31,)),)), 2, Q(None), divided=True),
    case(MeanCase, {"m": leaf((2,)), "e": leaf((0, 4))}, 2, Q(96, "mean_abs")),
    case(MeanCase, [leaf((3, 1024))], 1, Q(512, gain=0.5)),
    case(MeanCase, (leaf((40,), "bfloat16"), leaf((7, 30))), 8, Q(None, "mean_abs")),
    case(MeanCase, leaf(()), 3, Q(1024), divided=True),
)


def mean_cases(counts):
    return st.builds(
        functools.partial(case, MeanCase), trees.trees(), counts, trees.quantizers(),
        st.booleans(),
    )


def divisors(spec, seed):
    """As different within a leaf as roots of second moments are."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (10 ** rng.uniform(-3, 3, x.shape)).astype(np.float32), spec.tree
    )


@functools.lru_cache(maxsize=32)
def mean_program(spec):
    """Every round's mean, errors, and whether it counted, on every worker."""
    tx = onebit_jax.compressed_mean(AXIS, spec.quantizer)

    def worker(values, divisor):
        def public(state, local):
            means, new = tx.update(local, state)
            return new, (means, new.errors, new.rounds.skipped == state.rounds.skipped)

        def divided(errors, local):
            means, errors, finite, *_ = allreduce.compressed_allreduce(
                local, errors, AXIS, spec.quantizer, divisor
            )
            return errors, (means, errors, finite)

        first = jax.tree.map(lambda x: x[0], values)
        if spec.divided:
            return jax.lax.scan(divided, feedback.init_errors(first, AXIS), values)[1]
        return jax.lax.scan(public, tx.init(first), values)[1]

    mapped = jax.vmap(worker, in_axes=(0, None), axis_name=AXIS)
    return jax.jit(mapped, compiler_options=trees.QUICKLY)


def check_mean(spec, given_inputs):
    """Nothing is lost, errors do not grow, workers agree, all is finite."""
    w, (values, good) = spec.w, given_inputs.arrays(spec.tree, spec.w, ROUNDS)
    divisor = divisors(spec, given_inputs.seed) if spec.divided else None
    means, errors, counted = jax.tree.map(np.asarray, mean_program(spec)(values, divisor))
    trees.assert_replicated((means, counted))
    counted = counted[0]
    trees.assert_finite((errors, jax.tree.map(lambda m: m[:, counted], means)))
    assert not (counted & ~good).any()
    if given_inputs.moderate:
        np.testing.assert_array_equal(counted, good)
    largest = np.zeros(ROUNDS)
    for i, like in enumerate(spec.leaves):
        n = int(np.prod(like.shape))
        if not n:
            continue
        take = lambda tree, i=i: jax.tree.leaves(tree)[i].astype(np.float64)
        v = take(values).reshape(w, ROUNDS, n)
        v = np.where(good[:, None], v, 0)  # no part of any sum, and +Inf and -Inf have none
        d = take(divisor).reshape(n) if spec.divided else np.ones(n)
        m = take(means).reshape(w, ROUNDS, n)[0]
        e = take(errors.worker_error).reshape(w, ROUNDS, n)
        server = np.zeros((ROUNDS, n))  # two workers need no server
        if w > 2:
            server = take(errors.server_error)[:, :, 0].swapaxes(0, 1).reshape(ROUNDS, -1)
            assert not server[:, n:].any(), "padding has no error"
            server = server[:, :n]
        first = lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]])
        e_before, server_before = first(e.swapaxes(0, 1)).swapaxes(0, 1), first(server)
        for t in np.flatnonzero(~counted):
            np.testing.assert_array_equal(bits(e[:, t]), bits(e_before[:, t]))
            np.testing.assert_array_equal(bits(server[t]), bits(server_before[t]))
            assert spec.divided or not m[t].any()
        rounding = Rounding(spec, like, v, d, m, e, e_before, server, server_before)
        rounding.check_sums(counted)
        rounding.check_errors(counted)
        used = (np.abs(v) + np.abs(e_before) + np.abs(server_before)) / d
        largest = np.maximum(largest, used.max(axis=(0, 2)) * np.sqrt(n))
        if given_inputs.moderate and counted[-1]:
            check_with_oracle(spec, like.dtype, v, d, m, e, e_before, server, server_before)
    # Nothing is skipped but what has a square, or a sum of n of them, that overflows. A
    # server adds its error to the largest scale of a worker.
    assert (2 * largest[good & ~counted] > np.sqrt(LARGEST) / 2).all()


@dataclasses.dataclass
class Rounding:
    """One leaf of ``n``, all in float64: values and worker errors ``(w, rounds, n)``,
    the divisor ``(n,)``, means and server errors ``(rounds, n)``."""

    spec: MeanCase
    like: Any
    v: Any
    d: Any
    m: Any
    e: Any
    e_before: Any
    server: Any
    server_before: Any

    def check_sums(self, counted):
        """Means + mean worker error + server error = mean values, in sum.

        A round computes about w + 16 float32 results for each entry: c = v + e, its
        multiple of the scale, what is left; the sum of the workers' multiples, divided
        by w; the server's error divided, added, what is left, and the products with
        the divisor. Each is rounded once, relative to itself, and none is larger than
        the magnitudes added up here; results below the normal numbers become zero.
        """
        w, mag = self.spec.w, np.abs
        sent = mag(self.v) + mag(self.e_before) + mag(self.e)
        size = sent.max(axis=0) + mag(self.m) + mag(self.server) + mag(self.server_before)
        lost = (w + 16) * (U * 2 * size + TINY * np.maximum(self.d, 1))
        if not self.spec.divided:  # the mean gets the dtype of the leaf
            info = jnp.finfo(self.like.dtype)
            lost += float(info.eps) * mag(self.m) + float(info.tiny)
        add = lambda x: np.where(counted[:, None], x, 0).cumsum(axis=0)
        total = add(self.m) + self.e.mean(axis=0) + self.server
        wanted = add(self.v.mean(axis=0))
        # A mean of more than a smaller dtype holds is cut.
        cut = mag(self.m) >= float(jnp.finfo(self.like.dtype).max)
        cut = np.maximum.accumulate(cut & (self.like.dtype != jnp.float32), axis=0)
        assert (cut | (mag(total - wanted) <= add(lost))).all()

    def check_errors(self, counted):
        """One quantization shrinks the largest entry, by a bound that Q alone gives.

        With a block's largest magnitude A and n entries, a scale s is between A / n
        (or A / sqrt(n) for rms) and what n - 1 entries of A give, unless all are A. An
        error is at most A - gain * s or gain * s, so the largest of it is at most
        rho * A, with rho < 1 for gain <= 1: errors cannot grow without bound.
        """
        q, n = self.spec.quantizer, self.v.shape[-1]
        of = n if q.block_size is None else min(n, q.block_size)
        least, most = 1 / of, 1 - 1 / of
        if q.scale == "rms":
            least, most = np.sqrt([least, most])
        # Where all have the same magnitude, what the gain leaves: within 1 - least.
        rho = max(1 - q.gain * least, q.gain * most)
        rho += 2 * of * U  # a sum of that many terms, and the rest of the operations
        flushed = np.sqrt(2 * TINY) if q.scale == "rms" else 2 * TINY
        c = (self.v + self.e_before) / self.d
        for t in np.flatnonzero(counted):
            compensated = np.abs(c[:, t]).max(axis=1)
            left = np.abs(self.e[:, t] / self.d).max(axis=1)
            assert (left <= (rho + 8 * U) * compensated + flushed).all()
            served = np.abs(self.server_before[t] / self.d).max() + compensated.max()
            assert np.abs(self.server[t] / self.d).max() <= (rho + 8 * U) * served + flushed
        zero = (self.v == 0) & (self.e_before == 0) & counted[:, None]
        assert (self.e[zero] <= 0).all(), "the sign of zero is +"


def check_with_oracle(spec, dtype, v, d, m, e, e_before, server, server_before):
    """The last round, from the errors before it."""
    q, n = spec.quantizer, v.shape[-1]
    reference = oracle.CompressedMean(n, spec.w, q.block_size, q.scale, q.gain)
    reference.worker_error, reference.server_error = e_before[:, -1], server_before[-1]
    sent = v[:, -1] + e_before[:, -1] - e[:, -1]
    expected = reference.step(v[:, -1], d, sent, m[-1])
    size = max(np.abs(x / d).max() for x in (v[:, -1], e_before[:, -1], server_before[-1]))
    for got, wanted, coarse in (
        (m[-1], expected, 0 if spec.divided else float(jnp.finfo(dtype).eps)),
        (e[:, -1], reference.worker_error, 0),
        (server[-1], reference.server_error, 0),
    ):
        np.testing.assert_allclose(got / d, wanted / d, rtol=1e-5 + coarse, atol=1e-5 * size)


@trees.quick(60, trees.with_inputs(st.sampled_from(MEANS)))
def test_means_of_known_trees(example):
    check_mean(*example)


@trees.quick(4, trees.with_inputs(mean_cases(st.sampled_from(COUNTS))))
def test_means_of_other_trees(example):
    check_mean(*example)


@pytest.mark.parametrize("w", COUNTS)
@trees.slow(200, st.data())
def test_means_of_many_trees(w, data):
    check_mean(*data.draw(trees.with_inputs(mean_cases(st.just(w)))))


@st.composite
def vectors(draw):
    """A length, a quantizer, and a kind and seed of numbers."""
    n = draw(st.sampled_from((0, 1, 31, 32, 33, 700, 1024, 1025)))
    kinds = trees.MODERATE + trees.EXTREME
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**32 - 1))
    return n, draw(trees.quantizers()), kind, seed


@functools.lru_cache(maxsize=64)
def coded(n, quantizer):
    def both(x):
        words, scales = quantizer.encode(x)
        return words, quantizer.decode(words, scales, n)

    return jax.jit(both, compiler_options=trees.QUICKLY)


def check_quantizer(n, quantizer, kind, seed):
    """The sign of every entry, and a size between what rounding and flushing allow."""
    x = trees.cast(trees.fill(kind, (1, 1, n), np.random.default_rng(seed)), np.float32)[0, 0]
    words, decoded = map(np.asarray, coded(n, quantizer)(x))
    normal = (np.abs(x) >= TINY) | (x == 0)  # the sign of others may be flushed
    np.testing.assert_array_equal(np.signbit(decoded)[normal], (x < 0)[normal])
    signs = np.asarray(onebit_jax.unpack_signs(words, n))
    np.testing.assert_array_equal(signs[normal], (x >= 0)[normal])
    length, sizes = 32 * -(-n // 32), np.abs(decoded.astype(np.float64))
    for index in oracle.blocks(length, quantizer.block_size):
        index = index[index < n]
        if not index.size:
            continue
        wanted = oracle.magnitude(x[index].astype(np.float64), quantizer.scale, quantizer.gain)
        got = sizes[index]
        assert (got == got[0]).all()
        flushed = 2 * TINY if quantizer.scale == "mean_abs" else np.sqrt(2 * TINY)
        if np.isfinite(got[0]):
            assert abs(got[0] - wanted) <= (len(index) + 8) * U * wanted + flushed
        else:
            assert max(wanted, np.abs(x[index]).max() * np.sqrt(index.size)) > 2.0**62


@trees.quick(60, vectors())
def test_signs_and_scales_of_vectors(example):
    check_quantizer(*example)


@trees.slow(500, vectors())
def test_signs_and_scales_of_many_vectors(example):
    check_quantizer(*example)
