import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax.compression import packing

SIZES = (0, 1, 7, 8, 31, 32, 33, 1000, 70_000)


def numpy_words(signs):
    """Bit j of word k of a tile of T words is its entry j * T + k."""
    k = -(-len(signs) // 32)
    t = 32 if len(signs) % 1024 == 0 else k
    words = [0] * k
    for i, positive in enumerate(signs):
        tile, i = divmod(i, 32 * t)
        words[tile * t + i % t] |= int(positive) << (i // t)
    return words


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_round_trip_for_any_length_and_leading_axes(n, lead):
    x = np.random.default_rng(n).normal(size=(*lead, n)).astype(np.float32)
    words = onebit_jax.pack_signs(jnp.asarray(x))
    assert words.dtype == jnp.uint32
    assert words.shape == (*lead, -(-n // 32))
    np.testing.assert_array_equal(onebit_jax.unpack_signs(words, n), x >= 0)


@pytest.mark.parametrize("n", [1, 31, 33, 100, 1024, 4096, 4128])
def test_bits_are_where_the_layout_says(n):
    signs = np.random.default_rng(0).random(n) < 0.5
    words = np.asarray(onebit_jax.pack_signs(jnp.asarray(signs)))
    assert words.tolist() == numpy_words(signs)


def test_booleans_round_trip_and_zeros_are_positive():
    bits = jnp.asarray([True, False, True])
    np.testing.assert_array_equal(
        onebit_jax.unpack_signs(onebit_jax.pack_signs(bits), 3), bits
    )
    x = jnp.asarray([0.0, -0.0, jnp.nan, -jnp.inf, 1e-45])
    unpacked = onebit_jax.unpack_signs(onebit_jax.pack_signs(x), 5)
    assert unpacked.tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8])
def test_real_dtypes(dtype):
    x = jnp.asarray([1, -1, 0, -3], dtype)
    assert onebit_jax.unpack_signs(onebit_jax.pack_signs(x), 4).tolist() == [
        True, False, True, False,
    ]


def test_wrong_number_of_words_is_refused():
    with pytest.raises(ValueError, match="33 signs take 2 words of 32 bits.* has 1"):
        onebit_jax.unpack_signs(jnp.zeros(1, jnp.uint32), 33)


def test_compiled_packing_has_no_gather_or_transpose():
    text = jax.jit(packing.pack_signs).lower(jnp.zeros((4, 4096))).compile().as_text()
    assert not any(f" {op}(" in text for op in ("gather", "transpose", "scatter"))
