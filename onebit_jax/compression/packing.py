"""Signs of an array as bits of uint32 words, and back.

A row of entries is read in tiles. A tile of ``T`` words holds ``32 * T``
entries in a row, and bit ``j`` of its word ``k`` is its entry ``j * T + k``:
packing is then 32 shifts of whole planes of ``T``, with no shuffle inside a
word. ``T`` is 32 where the row is cut into tiles of 1024 entries without a rest;
any other row is a single tile. Tiles keep what belongs together close in
memory, so that a loop over them finds it in the cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

WORD_BITS = 32

#: Entries of a tile of 32 words. Half as many make XLA's CPU code 2.5 times slower.
TILE = 1024

#: Entries of half a tile, a whole number of its planes: what a value by span is for.
SPAN = 512


def words_for(n: int) -> int:
    """Number of uint32 words that hold ``n`` sign bits."""
    return -(-n // WORD_BITS)


def tile_words(n: int) -> int:
    """Words of each tile of a row of ``n`` entries."""
    return TILE // WORD_BITS if n and n % TILE == 0 else words_for(n)


def to_planes(x: jax.Array, fill: float = 0) -> jax.Array:
    """Pads the last axis, ``(..., n)``, and views it as ``(..., tiles, 32, T)``."""
    n = x.shape[-1]
    k, t = words_for(n), tile_words(n)
    if n != k * WORD_BITS:
        pad = [(0, 0)] * (x.ndim - 1) + [(0, k * WORD_BITS - n)]
        x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:-1], k // t if t else 0, WORD_BITS, t)


def from_planes(planes: jax.Array, n: int) -> jax.Array:
    """Inverse of :func:`to_planes`: ``(..., tiles, 32, T)`` to ``(..., n)``."""
    tiles, bits, t = planes.shape[-3:]
    flat = planes.reshape(*planes.shape[:-3], tiles * bits * t)
    return flat if flat.shape[-1] == n else flat[..., :n]


def pack_planes(planes: jax.Array) -> jax.Array:
    """Sign bits of ``(..., 32, T)`` as uint32 words ``(..., T)``."""
    bits = planes if planes.dtype == jnp.bool_ else planes >= 0
    lane = jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]
    shifted = bits.astype(jnp.uint32) << lane.reshape((1,) * (bits.ndim - 2) + lane.shape)
    return jnp.sum(shifted, axis=-2, dtype=jnp.uint32)


def unpack_planes(words: jax.Array) -> jax.Array:
    """Words ``(..., T)`` as booleans ``(..., 32, T)``, True for a set bit."""
    return _shifted(words) & jnp.uint32(1) != 0


def signed_planes(words: jax.Array, magnitudes: jax.Array) -> jax.Array:
    """Magnitudes of words, ``(..., T)``, with the signs of their bits: ``(..., 32, T)``.

    A set bit clears the sign bit of the float, which is cheaper than a choice.
    """
    negative = ~_shifted(words) << jnp.uint32(WORD_BITS - 1)
    bits = jax.lax.bitcast_convert_type(magnitudes.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits[..., None, :] | negative, jnp.float32)


def _shifted(words: jax.Array) -> jax.Array:
    """Words ``(..., T)`` with bit j in the lowest place of plane j, ``(..., 32, T)``."""
    lane = jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]
    return words[..., None, :] >> lane.reshape((1,) * (words.ndim - 1) + lane.shape)


def sum_planes(planes: jax.Array, term: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sum of ``term`` over planes, a power of two: ``(..., planes, T)`` to ``(..., T)``.

    Of many entries it is written out, because XLA on the CPU vectorises no sum
    of floats over an axis: eight terms in one expression, then halves.
    """
    if planes.size < 16 * TILE or jax.default_backend() != "cpu":
        return jnp.sum(term(planes), axis=-2)
    count = planes.shape[-2]
    at_once = max(count // 8, 1)
    parts = [planes[..., i : i + at_once, :] for i in range(0, count, at_once)]
    total = term(parts[0])
    for part in parts[1:]:
        total = total + term(part)
    while total.shape[-2] > 1:
        half = total.shape[-2] // 2
        total = total[..., :half, :] + total[..., half:, :]
    return total[..., 0, :]


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
    x = jnp.asarray(x)
    planes = to_planes(x)
    return pack_planes(planes).reshape(*x.shape[:-1], words_for(x.shape[-1]))


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
    t = tile_words(n)
    tiles = words.reshape(*words.shape[:-1], words_for(n) // t if t else 0, t)
    return from_planes(unpack_planes(tiles), n)
