"""Loops over tiles give what the function gives on all tiles at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.compression import packing, tiles

#: Around the sizes at which a loop begins, has a rest, and is cut evenly.
COUNTS = (1, 63, 64, 67, 127, 128, 129, 200, 257, 384)


def arrays(count):
    rng = np.random.default_rng(count)
    return [rng.normal(size=(count, 4, 8)).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("go", [True, False])
def test_update_overwrites_all_tiles_or_none(count, go):
    x, y = arrays(count)
    fn = lambda into, arg: 2 * into + arg
    new, done = jax.jit(lambda x, y, go: tiles.update(fn, x, y, go))(x, y, jnp.bool_(go))
    np.testing.assert_allclose(new, 2 * x + y if go else x, rtol=1e-6)
    assert bool(done) == go


@pytest.mark.parametrize("count", COUNTS)
def test_compute_makes_arrays_of_any_shape_by_tile(count):
    x, y = arrays(count)
    total, larger = jax.jit(
        lambda x, y: tiles.compute(lambda a: (a[0].sum(axis=1), a[0] > a[1]), (x, y))
    )(x, y)
    np.testing.assert_allclose(total, x.sum(axis=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(larger, x > y)


@pytest.mark.parametrize("n", [5, 1024, 1025, 64 * 1024 - 1, 65 * 1024 + 1, 131_000, 200_000])
@pytest.mark.parametrize("missing", [0, 3])
def test_ragged_arrays_equal_those_filled_up(n, missing):
    """The last tile in part, and whole tiles that are not there."""
    x, y = (np.random.default_rng(i).normal(size=n).astype(np.float32) for i in range(2))
    count = -(-n // 1024) + missing
    filled = np.full(count * 1024, 7, np.float32)
    filled[:n] = y
    planes = filled.reshape(count, 32, 32)
    words = np.arange(count * 32, dtype=np.float32).reshape(count, 32)

    def both(x, y, words):
        x, y = (tiles.Ragged(v, count, 7) for v in (x, y))
        new, _ = tiles.update(lambda a, args: 2 * a + args[0] + args[1][:, None], x, (y, words))
        return new.flat, tiles.compute(lambda y: y.sum(axis=1), y), tiles.whole(y)

    new, sums, whole = jax.jit(both)(x, y, words)
    per_entry = np.repeat(words[:, None], 32, axis=1).reshape(-1)[:n]
    np.testing.assert_allclose(new, 2 * x + y + per_entry, rtol=1e-6)
    np.testing.assert_allclose(sums, planes.sum(axis=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole, planes)
    for chunks in (1, 2, 3):
        if count % chunks == 0 and n >= 1024 * count // chunks:
            for i in range(chunks):
                part = jax.jit(lambda y, i, c=chunks: tiles.chunk(tiles.Ragged(y, count, 7), i, c))
                np.testing.assert_array_equal(part(y, i), np.split(planes, chunks)[i])


@pytest.mark.parametrize("count", [128, 257])
def test_a_loop_told_to_follow_changes_in_place_what_the_first_has_read(count):
    def both(x, y):
        x, done = tiles.update(lambda into, y: into + y, x, y, jnp.all(x < 99))
        y, _ = tiles.update(lambda into, _: -into, y, (), done)
        return x, y

    x, y = arrays(count)
    jitted = jax.jit(both, donate_argnums=(0, 1))
    compiled = jitted.lower(x, y).compile()
    copies = re.findall(rf"= f32\[{count},4,8\]\S* copy\(", compiled.as_text())
    assert not copies
    new_x, new_y = jitted(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(new_x, x + y, rtol=1e-6)
    np.testing.assert_array_equal(new_y, -y)


@pytest.mark.parametrize("planes", [8, 16, 32])
@pytest.mark.parametrize("count", [3, 64])
def test_sum_over_planes(planes, count):
    x = np.random.default_rng(0).normal(size=(count, planes, 32)).astype(np.float32)
    summed = jax.jit(lambda x: packing.sum_planes(x, jnp.square))(x)
    np.testing.assert_allclose(summed, (x.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)


def test_magnitudes_take_the_signs_of_bits():
    x = np.random.default_rng(0).normal(size=(2, 32, 32)).astype(np.float32)
    magnitudes = np.abs(np.random.default_rng(1).normal(size=(2, 32))).astype(np.float32)
    signed = packing.signed_planes(packing.pack_planes(jnp.asarray(x)), jnp.asarray(magnitudes))
    np.testing.assert_array_equal(signed, np.where(x >= 0, 1, -1) * magnitudes[:, None])
