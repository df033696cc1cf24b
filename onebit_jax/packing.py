"""Signs of an array as bits of uint32 words, and back.

Bit ``j`` of word ``k`` is entry ``j * K + k`` of the last axis, ``K`` words
long: the entries are read as 32 planes of ``K``. Packing is then 32 shifts of
whole planes, which XLA vectorises, with no shuffle inside a word.
"""

import jax
import jax.numpy as jnp

WORD_BITS = 32


def words_for(n: int) -> int:
    """Number of uint32 words that hold ``n`` sign bits."""
    return -(-n // WORD_BITS)


def to_planes(x: jax.Array) -> jax.Array:
    """Zero-pads the last axis, ``(..., n)``, and views it as ``(..., 32, K)``."""
    n = x.shape[-1]
    k = words_for(n)
    if n != k * WORD_BITS:
        pad = [(0, 0)] * (x.ndim - 1) + [(0, k * WORD_BITS - n)]
        x = jnp.pad(x, pad)
    return x.reshape(*x.shape[:-1], WORD_BITS, k)


def from_planes(planes: jax.Array, n: int) -> jax.Array:
    """Inverse of :func:`to_planes`: ``(..., 32, K)`` to ``(..., n)``."""
    flat = planes.reshape(*planes.shape[:-2], planes.shape[-2] * planes.shape[-1])
    return flat[..., :n]


def pack_planes(planes: jax.Array) -> jax.Array:
    """Sign bits of ``(..., 32, K)`` as uint32 words ``(..., K)``."""
    bits = planes if planes.dtype == jnp.bool_ else planes >= 0
    lane = jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]
    shifted = bits.astype(jnp.uint32) << lane.reshape((1,) * (bits.ndim - 2) + lane.shape)
    return jnp.sum(shifted, axis=-2, dtype=jnp.uint32)


def unpack_planes(words: jax.Array) -> jax.Array:
    """Words ``(..., K)`` as booleans ``(..., 32, K)``, True for a set bit."""
    lane = jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]
    lane = lane.reshape((1,) * (words.ndim - 1) + lane.shape)
    return (words[..., None, :] >> lane) & jnp.uint32(1) != 0


def pack_signs(x: jax.Array) -> jax.Array:
    """Packs the signs of the last axis into uint32 words.

    A bit is set where the entry is ``>= 0``, so both zeros count as positive
    and NaN as negative. Booleans are packed as they are.

    Args:
      x: array of shape ``(..., n)``, any real dtype, any ``n`` including 0.

    Returns:
      uint32 array of shape ``(..., ceil(n / 32))``; padding bits are set for
      numbers and clear for booleans, and :func:`unpack_signs` ignores them.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> words = onebit_jax.pack_signs(jnp.array([1.0, -2.0, 0.0]))
      >>> onebit_jax.unpack_signs(words, 3).tolist()
      [True, False, True]
    """
    return pack_planes(to_planes(jnp.asarray(x)))


def unpack_signs(words: jax.Array, n: int) -> jax.Array:
    """Inverse of :func:`pack_signs`.

    Args:
      words: uint32 array of shape ``(..., ceil(n / 32))``.
      n: length of the packed axis.

    Returns:
      Boolean array of shape ``(..., n)``, True where the entry was ``>= 0``.

    Raises:
      ValueError: if the number of words does not belong to ``n``.
    """
    if words.shape[-1] != words_for(n):
        raise ValueError(
            f"unpack_signs: {n} signs take {words_for(n)} words of 32 bits, "
            f"but the last axis of words has {words.shape[-1]}"
        )
    return from_planes(unpack_planes(words), n)
