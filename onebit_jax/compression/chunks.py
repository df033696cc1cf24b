"""How a leaf is cut: in chunks for the workers that serve it, in tiles for the cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax import workers
from onebit_jax.compression import packing, tiles


def is_direct(w: int) -> bool:
    """Whether ``w`` workers send all their bits to each other, without servers between.

    For two workers that is as many bytes as with servers, in one phase.
    """
    return w <= 2


def chunk_length(n: int, rows: int) -> int:
    """Entries of each of ``rows`` equal chunks of a leaf of ``n``.

    Whole tiles where that adds at most 1/64, else whole words.
    """
    unit = packing.TILE if n >= 64 * packing.TILE * rows else packing.WORD_BITS
    return unit * -(-n // (unit * rows))


class Spans(NamedTuple):
    """Values for ``packing.SPAN`` entries of a flat leaf each: ``(spans,)``."""

    values: jax.Array


class Lazy(NamedTuple):
    """A leaf that is computed where it is needed, in tiles, and never stored.

    Attributes:
      fn: elementwise function of ``args``.
      args: arrays of the shape of the leaf, or :class:`Spans` of it.
    """

    fn: Callable[..., jax.Array]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The cut of one leaf: a row for each worker that serves, rows in tiles.

    Attributes:
      like: the leaf, of which only shape and sharding matter.
      w: number of workers.
    """

    like: jax.Array
    w: int

    @property
    def direct(self) -> bool:
        """Whether nobody serves, so that there is one row."""
        return is_direct(self.w)

    @property
    def rows(self) -> int:
        return 1 if self.direct else self.w

    @functools.cached_property
    def length(self) -> int:
        """Entries of a row, padding included."""
        return chunk_length(self.like.size, self.rows)

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """How many entries of each row are no padding, ``(rows,)``."""
        return np.clip(self.like.size - np.arange(self.rows) * self.length, 0, self.length)

    def in_rows(self, per_word: jax.Array) -> jax.Array:
        """Values of words in tiles, of any number of rows, as ``(rows, words)``."""
        return per_word.reshape(-1, self.length // packing.WORD_BITS)

    def per_tile(self, per_word: jax.Array) -> jax.Array:
        """``(..., words)``, any number of rows, to ``(tiles, T)``."""
        return per_word.reshape(-1, packing.tile_words(self.length))

    def lazy(self, x: Any, fill: float) -> Lazy:
        """An array or :class:`Lazy` of the leaf as a :class:`Lazy` of its tiles."""
        if isinstance(x, Lazy):
            fn = lambda *args: x.fn(*map(_over_planes, args))
            return Lazy(fn, tuple(self.tiles(arg, fill) for arg in x.args))
        return Lazy(lambda tile: tile, (self.tiles(x, fill),))

    def tiles(self, x: Any, fill: float) -> Any:
        """``(*shape)`` to ``(tiles, 32, T)``, padded at the end or ragged."""
        if isinstance(x, Spans):
            if self.length % packing.TILE == 0:
                rest = self.rows * self.length // packing.SPAN - x.values.size
                return jnp.pad(x.values, (0, rest)).reshape(-1, packing.TILE // packing.SPAN, 1)
            x = jnp.repeat(x.values, packing.SPAN)[: self.like.size]
        total = self.rows * self.length
        if self.length % packing.TILE == 0 and self.like.size < total:
            return tiles.Ragged(workers.unshard(x).reshape(-1), total // packing.TILE, fill)
        planes = packing.to_planes(to_rows(x, self.rows, self.length, fill))
        return planes.reshape(-1, *planes.shape[2:])

    def leaf(self, planes: Any) -> jax.Array:
        """Inverse of :meth:`tiles`, with the sharding of the leaf."""
        x = planes.flat if isinstance(planes, tiles.Ragged) else planes.reshape(-1)
        x = x if x.size == self.like.size else x[: self.like.size]
        return workers.reshard_like(x.reshape(self.like.shape), self.like)


def _over_planes(tile: jax.Array) -> jax.Array:
    """Values by span, ``(tiles, spans, 1)``, for each of 32 planes; others as they are."""
    return jnp.repeat(tile, packing.WORD_BITS // tile.shape[-2], axis=-2)


def to_rows(x: jax.Array, rows: int, length: int, fill: float = 0) -> jax.Array:
    """``(*shape)`` to ``(rows, length)``, padded at the end."""
    flat = workers.unshard(x).reshape(-1)
    if flat.size != rows * length:
        flat = jnp.pad(flat, (0, rows * length - flat.size), constant_values=fill)
    return flat.reshape(rows, length)
