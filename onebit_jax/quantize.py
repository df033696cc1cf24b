"""The blockwise sign quantizer ``Q(x) = scale_b * sign(x)``; no devices here."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from onebit_jax import packing


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

    def encode(
        self,
        x: jax.Array,
        divisor: jax.Array | None = None,
        count: jax.Array | None = None,
    ) -> Encoded:
        """Quantizes ``x``, or ``x / divisor`` where a divisor is given.

        Args:
          x: real array ``(..., n)``. Leading axes are chunks of one leaf: with
            ``block_size=None`` they share one scale, repeated for each chunk.
          divisor: positive array of the shape of ``x``, the preconditioner.
          count: int array ``x.shape[:-1]``, how many leading entries of each
            chunk are real; the others must be 0. Default: all.

        Returns:
          The words and float32 scales, of ``x / divisor``.
        """
        y = x.astype(jnp.float32)
        if divisor is not None:
            y = y / divisor.astype(jnp.float32)
        planes = packing.to_planes(y)
        words = packing.pack_planes(planes)
        size = jnp.abs(planes) if self.scale == "mean_abs" else jnp.square(planes)
        if count is None:
            count = jnp.full(x.shape[:-1], x.shape[-1], jnp.int32)
        total = self._block_sums(jnp.sum(size, axis=-2))
        entries = self._block_sums(_entries_per_word(count, words.shape[-1]))
        mean = total / jnp.maximum(entries, 1).astype(jnp.float32)
        scales = jnp.sqrt(mean) if self.scale == "rms" else mean
        return Encoded(words, scales * jnp.float32(self.gain))

    def decode(
        self,
        words: jax.Array,
        scales: jax.Array,
        n: int,
        divisor: jax.Array | None = None,
    ) -> jax.Array:
        """Inverse of :meth:`encode`.

        Args:
          words: uint32 ``(..., ceil(n / 32))``.
          scales: float32 ``(..., blocks)``.
          n: entries per row.
          divisor: the one given to :meth:`encode`, ``(..., n)``.

        Returns:
          float32 array ``(..., n)``.
        """
        planes = self._signed(packing.unpack_planes(words), scales)
        y = packing.from_planes(planes, n)
        return y if divisor is None else y * divisor.astype(jnp.float32)

    def quantized(self, x: jax.Array, scales: jax.Array, divisor: jax.Array | None) -> jax.Array:
        """What :meth:`decode` gives for an encoded ``x``, without its bits."""
        planes = packing.to_planes(x)
        y = packing.from_planes(self._signed(planes >= 0, scales), x.shape[-1])
        return y if divisor is None else y * divisor.astype(jnp.float32)

    def _signed(self, positive: jax.Array, scales: jax.Array) -> jax.Array:
        """Scales with signs: booleans ``(..., 32, K)`` to float32."""
        magnitude = self._per_word(scales, positive.shape[-1])[..., None, :]
        return jnp.where(positive, magnitude, -magnitude)

    def _block_sums(self, per_word: jax.Array) -> jax.Array:
        """Sums of ``(..., K)`` over the words of each block."""
        words = per_word.shape[-1]
        if self.block_size is None:
            total = jnp.sum(per_word)
            return jnp.broadcast_to(total, (*per_word.shape[:-1], min(words, 1)))
        blocks = -(-words // self._block_words)
        pad = [(0, 0)] * (per_word.ndim - 1) + [(0, blocks * self._block_words - words)]
        per_word = jnp.pad(per_word, pad)
        return jnp.sum(per_word.reshape(*per_word.shape[:-1], blocks, self._block_words), axis=-1)

    def _per_word(self, scales: jax.Array, words: int) -> jax.Array:
        """Each word's scale: ``(..., blocks)`` to ``(..., K)``."""
        if self.block_size is None:
            return jnp.broadcast_to(scales, (*scales.shape[:-1], words))
        return jnp.repeat(scales, self._block_words, axis=-1)[..., :words]


def _entries_per_word(count: jax.Array, words: int) -> jax.Array:
    """How many of the first ``count`` entries of a row each word holds."""
    if words == 0:
        return jnp.zeros((*count.shape, 0), jnp.int32)
    column = jnp.arange(words, dtype=jnp.int32).reshape((1,) * count.ndim + (words,))
    # Entry j * words + column is real while it is below count.
    entries = (count[..., None] - column + words - 1) // words
    return jnp.clip(entries, 0, packing.WORD_BITS)
