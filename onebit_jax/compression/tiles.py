"""Loops over tiles: what takes several passes over a leaf stays in the cache.

XLA's CPU compiler either computes the input of a reduction anew for each term
or writes it out to memory. In a loop over pieces that fit the cache, what it
writes out costs little. Each array is read and written in place, once a loop.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import packing

#: Tiles of 1024 entries at a time: 512 KiB of float32 for each array.
TILES_AT_ONCE = 128


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["flat"], meta_fields=["tiles", "fill"]
)
@dataclasses.dataclass(frozen=True)
class Ragged:
    """A flat array whose last tiles are not full, so as not to copy it to fill them.

    Attributes:
      flat: ``(n,)``, entries of tiles ``(32, 32)``.
      tiles: how many there would be.
      fill: what their missing entries are.
    """

    flat: jax.Array
    tiles: int
    fill: float


def _is_ragged(x: Any) -> bool:
    return isinstance(x, Ragged)


def _map(fn: Callable, *trees: Any) -> Any:
    return jax.tree.map(fn, *trees, is_leaf=_is_ragged)


def _full(tree: Any) -> int:
    """Tiles up to which no array has an entry missing."""
    arrays = jax.tree.leaves(tree, is_leaf=_is_ragged)
    counts = [x.flat.size // packing.TILE if _is_ragged(x) else x.shape[0] for x in arrays]
    return min(counts)


def _take(x: Any, start: Any, n: int) -> jax.Array:
    """Tiles ``start`` to ``start + n``."""
    if not _is_ragged(x):
        return x if n == x.shape[0] else lax.dynamic_slice_in_dim(x, start, n)
    size = n * packing.TILE
    if isinstance(start, int) and (start + n) * packing.TILE > x.flat.size:
        part = x.flat[start * packing.TILE :]
        part = jnp.pad(part, (0, size - part.size), constant_values=x.fill)
    else:
        part = lax.dynamic_slice_in_dim(x.flat, start * packing.TILE, size)
    return packing.to_planes(part)


def _put(x: Any, part: jax.Array, start: Any) -> Any:
    """Inverse of :func:`_take`."""
    if not _is_ragged(x):
        everything = part.shape[0] == x.shape[0]
        return part if everything else lax.dynamic_update_slice_in_dim(x, part, start, 0)
    flat = part.reshape(-1)
    if isinstance(start, int):
        flat = flat[: x.flat.size - start * packing.TILE]
    flat = lax.dynamic_update_slice_in_dim(x.flat, flat, start * packing.TILE, 0)
    return dataclasses.replace(x, flat=flat)


def whole(tree: Any) -> Any:
    """Arrays ``(tiles, ...)``, ragged ones filled up."""
    return _map(lambda x: _take(x, 0, x.tiles) if _is_ragged(x) else x, tree)


def chunk(x: Any, index: Any, chunks: int) -> jax.Array:
    """One of ``chunks`` equal parts of the tiles."""
    if not _is_ragged(x):
        return lax.dynamic_index_in_dim(
            x.reshape(chunks, -1, *x.shape[1:]), index, keepdims=False
        )
    n, size = x.flat.size, x.tiles // chunks * packing.TILE
    start = index * size
    part = lax.dynamic_slice_in_dim(x.flat, start, size)  # of the last, starts too early
    part = jnp.roll(part, -jnp.maximum(start - (n - size), 0))
    there = lax.broadcasted_iota(jnp.int32, (size,), 0) < n - start
    return packing.to_planes(jnp.where(there, part, jnp.asarray(x.fill, part.dtype)))


def _tiles_at_once(tiles: int) -> int:
    """Tiles for each turn, if possible a divisor; all of them where a loop does not pay."""
    if tiles < TILES_AT_ONCE // 2 or jax.default_backend() != "cpu":
        return tiles
    # A loop of one turn would be unrolled, and its body merged with its surroundings.
    most = -(-tiles // max(2, -(-tiles // TILES_AT_ONCE)))
    divisors = (size for size in range(most, most // 2, -1) if tiles % size == 0)
    return next(divisors, most)


def update(
    fn: Callable[[Any, Any], Any], into: Any, args: Any, go: Any = True
) -> tuple[Any, Any]:
    """Overwrites arrays by a function of themselves and of others, tile by tile.

    Args:
      fn: ``fn(into, args) -> into`` for any number of tiles.
      into: pytree of arrays ``(tiles, ...)``, changed in place where XLA can, or of
        :class:`Ragged`.
      args: the same, read only.
      go: whether to do it at all, bool ``()``, the same on every worker.

    Returns:
      The new arrays, or the old ones; and ``go`` as the outcome of the loop:
      a loop that is told to go by it comes after this one, and so may change
      in place what this one has read.
    """
    first = jax.tree.leaves(into, is_leaf=_is_ragged)[0]
    tiles = first.tiles if _is_ragged(first) else first.shape[0]
    full = _full((into, args))
    size = _tiles_at_once(full)

    def hold(new: Any, old: Any) -> Any:
        return new if go is True else jax.tree.map(lambda n, o: jnp.where(go, n, o), new, old)

    def turn(into: Any, start: Any, n: int, keep: Callable[[Any, Any], Any]) -> Any:
        take = lambda tree: _map(lambda x: _take(x, start, n), tree)
        old = take(into)
        new = keep(fn(old, take(args)), old)
        return _map(lambda x, part: _put(x, part, start), into, new)

    if size == full:
        return turn(into, 0, tiles, hold), go
    turns = full // size
    if turns * size < tiles:  # first, so that the end of the loop is the end of it all
        into = turn(into, turns * size, tiles - turns * size, hold)

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return carry[0] + 1, turn(carry[1], carry[0] * size, size, lambda new, _: new)

    last = jnp.where(go, jnp.int32(turns), jnp.int32(0))
    done, into = lax.while_loop(lambda carry: carry[0] < last, body, (jnp.int32(0), into))
    return into, done > 0


def compute(fn: Callable[[Any], Any], args: Any) -> Any:
    """``fn(args)``, tile by tile; results have a leading axis of tiles too."""
    shapes = jax.eval_shape(lambda args: fn(whole(args)), args)
    axes = frozenset().union(*(workers.varying_axes(x) for x in jax.tree.leaves(args)))
    empty = jax.tree.map(lambda s: workers.vary(jnp.zeros(s.shape, s.dtype), axes), shapes)
    return update(lambda _, part: fn(part), empty, args)[0]
