"""Loops over tiles: what takes several passes over a leaf stays in the cache.

XLA's CPU compiler either computes the input of a reduction anew for each term
or writes it out to memory. In a loop over pieces that fit the cache, what it
writes out costs little. Each array is read and written in place, once a loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import workers

#: Tiles of 1024 entries at a time: 512 KiB of float32 for each array.
TILES_AT_ONCE = 128


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
      into: pytree of arrays ``(tiles, ...)``, changed in place where XLA can.
      args: pytree of arrays ``(tiles, ...)`` that are read only.
      go: whether to do it at all, bool ``()``, the same on every worker.

    Returns:
      The new arrays, or the old ones; and ``go`` as the outcome of the loop:
      a loop that is told to go by it comes after this one, and so may change
      in place what this one has read.
    """
    leaves = jax.tree.leaves(into)
    tiles = leaves[0].shape[0]
    size = _tiles_at_once(tiles)

    def hold(new: Any, old: Any) -> Any:
        return new if go is True else jax.tree.map(lambda n, o: jnp.where(go, n, o), new, old)

    if size == tiles:
        return hold(fn(into, args), into), go
    turns, rest = divmod(tiles, size)
    take = lambda tree, start, n: jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, start, n), tree
    )

    def turn(into: Any, start: Any, n: int, keep: Callable[[Any, Any], Any]) -> Any:
        old = take(into, start, n)
        new = keep(fn(old, take(args, start, n)), old)
        put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0)
        return jax.tree.map(put, into, new)

    if rest:  # first, so that the end of the loop is the end of it all
        into = turn(into, turns * size, rest, hold)

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return carry[0] + 1, turn(carry[1], carry[0] * size, size, lambda new, _: new)

    last = jnp.where(go, jnp.int32(turns), jnp.int32(0))
    done, into = lax.while_loop(lambda carry: carry[0] < last, body, (jnp.int32(0), into))
    return into, done > 0


def compute(fn: Callable[[Any], Any], args: Any) -> Any:
    """``fn(args)``, tile by tile; results have a leading axis of tiles too."""
    shapes = jax.eval_shape(fn, args)
    axes = frozenset().union(*(workers.varying_axes(x) for x in jax.tree.leaves(args)))
    empty = jax.tree.map(lambda s: workers.vary(jnp.zeros(s.shape, s.dtype), axes), shapes)
    return update(lambda _, part: fn(part), empty, args)[0]
