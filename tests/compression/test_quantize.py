import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import onebit_jax

SIZES = (1, 7, 8, 31, 32, 33, 1000, 1024, 70_000, 71_680)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("block_size", [32, 512, None])
@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_equals_the_oracle(n, block_size, scale):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n).astype(np.float32)
    quantizer = onebit_jax.SignQuantizer(block_size, scale, gain=1.5)
    words, scales = quantizer.encode(jnp.asarray(x))
    decoded = quantizer.decode(words, scales, n)
    # A chunk of the oracle is a whole number of words or tiles.
    padded = np.zeros(oracle.chunk(n, 1) if n < 65536 else 32 * -(-n // 32))
    expected = np.zeros(n)
    for index in oracle.blocks(len(padded), block_size):
        index = index[index < n]
        expected[index] = oracle.quantize(x[index].astype(np.float64), scale, 1.5, None)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5)
    assert scales.shape == (quantizer.blocks_for(n),)


@pytest.mark.parametrize("n", [1, 10, 33, 700])
@pytest.mark.parametrize("block_size", [32, 512, None])
def test_padding_never_enters_a_scale(n, block_size):
    quantizer = onebit_jax.SignQuantizer(block_size)
    words, scales = quantizer.encode(jnp.full(n, 3.0))
    np.testing.assert_allclose(quantizer.decode(words, scales, n), 3.0, rtol=1e-6)
    counts = quantizer.block_counts(np.asarray([n, 0]), n + 1000)
    words = -(-(n + 1000) // 32)
    assert counts.sum() == n
    if block_size == 32:
        bits = oracle.blocks(32 * words, 32)
        np.testing.assert_array_equal(counts[0], [(block < n).sum() for block in bits])


def test_one_scale_is_shared_by_all_chunks_of_a_leaf():
    x = jnp.asarray([[1.0, -1.0], [5.0, 7.0]])
    _, scales = onebit_jax.SignQuantizer(block_size=None, scale="mean_abs").encode(x)
    np.testing.assert_allclose(scales, [[3.5], [3.5]], rtol=1e-6)


def test_mean_abs_never_grows_the_error():
    """EF-signSGD's scale is a contraction even where RMS is not (sparse input)."""
    x = np.zeros(512, np.float32)
    x[:5] = 1.0
    for scale, grows in (("mean_abs", False), ("rms", True)):
        quantizer = onebit_jax.SignQuantizer(scale=scale)
        error = x - np.asarray(quantizer.decode(*quantizer.encode(jnp.asarray(x)), 512))
        assert (np.linalg.norm(error) > np.linalg.norm(x)) == grows


def test_a_scale_whose_square_may_overflow_counts_as_infinite():
    x = jnp.asarray([[9e18], [-9e18], [1e19], [3e38]])
    _, scales = onebit_jax.SignQuantizer(scale="mean_abs").encode(x)
    np.testing.assert_array_equal(np.isfinite(scales)[:, 0], [True, True, False, False])


@pytest.mark.parametrize("block_size", [0, -32, 100, 1.5, True, "512"])
def test_block_size_must_be_a_positive_multiple_of_32(block_size):
    with pytest.raises(ValueError, match="block_size must be a positive multiple of 32"):
        onebit_jax.SignQuantizer(block_size=block_size)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="scale must be \"rms\" or \"mean_abs\", found 'max'"):
        onebit_jax.SignQuantizer(scale="max")
    with pytest.raises(ValueError, match="gain must be above 0, found 0"):
        onebit_jax.SignQuantizer(gain=0)
