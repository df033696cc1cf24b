"""The blockwise sign quantizer ``Q(x) = scale_b * sign(x)``; no devices here."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax.compression import packing

#: A scale above this counts as infinite, so that its product with a divisor, of at
#: most the root of the largest float32, is not.
LARGEST_SCALE = 2.0**63


class Encoded(NamedTuple):
    """Signs and scales of one array.

    Attributes:
      words: uint32 ``(..., ceil(n / 32))``, the sign bits.
      scales: float32 ``(..., blocks)``, one magnitude per block.
    """

    words: jax.Array
    scales: jax.Array


@dataclasses.dataclass(frozen=True)
class SignQuantizer:
    """One bit per entry and one float32 scale per block.

    ``Q(x) = scale_b * sign(x)`` with ``sign(0) = +1``. A block is
    ``block_size / 32`` neighbouring words of :func:`onebit_jax.pack_signs`,
    that is 32 runs of ``block_size / 32`` entries. Padding never enters a
    scale. ``scale="mean_abs"`` is a contraction for every input (Karimireddy
    et al. 2019, EF-signSGD); ``"rms"`` is that of 1-bit Adam (Tang et al.
    2021) and keeps the norm.

    Attributes:
      block_size: entries per scale, a positive multiple of 32, or None for
        one scale for the whole array, as the 1-bit Adam paper has it.
      scale: ``"rms"`` (root mean square) or ``"mean_abs"`` of the block.
      gain: factor on every scale.

    Raises:
      ValueError: for a block size, scale or gain outside of the above.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> quantizer = onebit_jax.SignQuantizer(block_size=None, scale="mean_abs")
      >>> words, scales = quantizer.encode(jnp.array([1.0, -3.0]))
      >>> quantizer.decode(words, scales, 2).tolist()
      [2.0, -2.0]
    """

    block_size: int | None = 512
    scale: Literal["rms", "mean_abs"] = "rms"
    gain: float = 1.0

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and (type(size) is not int or size <= 0 or size % 32):
            raise ValueError(
                f"block_size must be a positive multiple of 32 or None (one scale "
                f"per leaf), found {size!r}"
            )
        if self.scale not in ("rms", "mean_abs"):
            raise ValueError(f'scale must be "rms" or "mean_abs", found {self.scale!r}')
        if not self.gain > 0:
            raise ValueError(f"gain must be above 0, found {self.gain!r}")

    def blocks_for(self, n: int) -> int:
        """Number of scales of a row of ``n`` entries."""
        words = packing.words_for(n)
        return min(words, 1) if self.block_size is None else -(-words // self._block_words)

    @property
    def _block_words(self) -> int:
        assert self.block_size is not None
        return self.block_size // packing.WORD_BITS

    def encode(self, x: jax.Array) -> Encoded:
        """Quantizes the last axis of ``x``, a real array ``(..., n)``.

        With ``block_size=None`` all rows share one scale, repeated for each.
        """
        x = x.astype(jnp.float32)
        n = x.shape[-1]
        planes = packing.to_planes(x)
        words = packing.pack_planes(planes).reshape(*x.shape[:-1], packing.words_for(n))
        sizes = self.sizes(planes).reshape(words.shape)
        counts = self.block_counts(np.full(x.shape[:-1], n), n)
        return Encoded(words, self.scales(sizes, counts))

    def decode(self, words: jax.Array, scales: jax.Array, n: int) -> jax.Array:
        """Inverse of :meth:`encode`: float32 ``(..., n)``."""
        t = packing.tile_words(n)
        tiles = (*words.shape[:-1], words.shape[-1] // t if t else 0, t)
        magnitudes = self.magnitudes(scales, words.shape[-1])
        planes = packing.signed_planes(words.reshape(tiles), magnitudes.reshape(tiles))
        return packing.from_planes(planes, n)

    def sizes(self, planes: jax.Array) -> jax.Array:
        """What each word adds to the scale of its block: ``(..., 32, T)`` to ``(..., T)``."""
        return packing.sum_planes(planes, jnp.abs if self.scale == "mean_abs" else jnp.square)

    def scales(self, sizes: jax.Array, counts: jax.typing.ArrayLike) -> jax.Array:
        """Scales ``(..., blocks)`` from the sizes of words ``(..., K)`` in layout order.

        ``counts`` are the entries of each block, from :meth:`block_counts`.
        """
        if self.block_size is None:
            total = jnp.broadcast_to(jnp.sum(sizes), (*sizes.shape[:-1], min(sizes.shape[-1], 1)))
        else:
            total = jnp.sum(self._in_blocks(sizes, jnp.pad), axis=-1)
        mean = total / jnp.maximum(counts, 1.0)
        scales = (jnp.sqrt(mean) if self.scale == "rms" else mean) * jnp.float32(self.gain)
        return jnp.where(scales > LARGEST_SCALE, jnp.inf, scales)

    def magnitudes(self, scales: jax.Array, words: int) -> jax.Array:
        """Each word's scale: ``(..., blocks)`` to ``(..., words)``."""
        if self.block_size is None:
            return jnp.broadcast_to(scales, (*scales.shape[:-1], words))
        return jnp.repeat(scales, self._block_words, axis=-1)[..., :words]

    def block_counts(self, rows: np.ndarray, n: int) -> np.ndarray:
        """How many of the first ``rows`` entries of rows of ``n`` are in each block.

        Float32 ``(*rows.shape, blocks)``, or with one column where all blocks
        are full, or ``()`` for ``block_size=None``, which counts all rows.
        """
        if self.block_size is None:
            return np.asarray(rows.sum(), np.float32)
        if n % self.block_size == 0 and (rows == n).all():
            return np.full((1,) * rows.ndim + (1,), self.block_size, np.float32)
        entries = valid_bits(rows, n).sum(axis=-2, dtype=np.float32)
        entries = entries.reshape(*rows.shape, packing.words_for(n))
        return self._in_blocks(entries, np.pad).sum(axis=-1)

    def _in_blocks(self, per_word: Any, pad: Callable) -> Any:
        """``(..., K)`` to ``(..., blocks, words of a block)``, padded with zeros."""
        words, size = per_word.shape[-1], self._block_words
        blocks = -(-words // size)
        rest = [(0, 0)] * (per_word.ndim - 1) + [(0, blocks * size - words)]
        return pad(per_word, rest).reshape(*per_word.shape[:-1], blocks, size)


def valid_bits(rows: np.ndarray, n: int) -> np.ndarray:
    """Which entries of planes ``(*rows.shape, tiles, 32, T)`` are among the first ``rows``."""
    k, t = packing.words_for(n), packing.tile_words(n)
    shape = (k // t if t else 0, packing.WORD_BITS, t)
    return np.arange(k * packing.WORD_BITS).reshape(shape) < rows[..., None, None, None]
