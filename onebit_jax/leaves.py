"""One leaf on its way through a 1-bit round: what happens between the collectives."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import packing, tiles, workers
from onebit_jax.quantize import Encoded, SignQuantizer, valid_bits

#: Up to so many workers the server's sum is unrolled: faster, but more to compile.
UNROLLED_WORKERS = 32


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


class Leaf:
    """One leaf on its way through a round: chunks in rows, rows in tiles."""

    def __init__(
        self, value: Any, worker_error: jax.Array, server_error: Any, divisor: Any,
        held: jax.Array | None, axis_name: str | None, quantizer: SignQuantizer, limit: Any,
    ) -> None:
        self.w = w = workers.bound_axis_size(axis_name)
        self.rank = 0 if axis_name is None else lax.axis_index(axis_name)
        self.quantizer, self.limit = quantizer, limit
        self.like = worker_error[0]
        n = self.like.size
        found = None if server_error is None else server_error.shape
        expected = None if workers.is_direct(w) else (1, workers.chunk_length(n, w))
        if found != expected:
            raise workers.wrong_worker_count(
                "compressed mean",
                f"a server error has local shape {found}, {w} workers need {expected}",
            )
        self.rows = 1 if workers.is_direct(w) else w
        self.length = workers.chunk_length(n, self.rows)
        self.entries = np.clip(n - np.arange(self.rows) * self.length, 0, self.length)
        self.server_error = server_error
        self.value = self._in_tiles(value, 0)
        # At padding: a divisor of 1, or one that is computed from a 1.
        self.divisor = None if divisor is None else self._in_tiles(divisor, 1)
        self.error = self._tiles(worker_error[0], 0)
        self.held = None if held is None else self._tiles(held, 0)
        self.varies = frozenset().union(
            *(workers.varying_axes(x) for x in jax.tree.leaves((self.value.args, self.error)))
        )

    def encode(self) -> Encoded:
        """Signs and scales of value + error, one row for each worker that serves."""

        # XLA computes what both outputs need only once if it holds a division, and
        # must not know that it divides by one.
        one = lax.optimization_barrier(jnp.float32(1))

        def fn(args: Any) -> tuple[jax.Array, jax.Array]:
            y = self._compensated(*args[:2])
            y = y / (one if self.divisor is None else self.divisor.fn(*args[2]))
            return packing.pack_planes(y), self.quantizer.sizes(y)

        self.words, sizes = tiles.compute(fn, self._own_args())
        encoded = self._encoded(self.words, sizes, self.rows, self._counts())
        self.magnitudes = self._per_tile(self._magnitudes(encoded))
        return encoded

    def serve(self, got: Encoded) -> Encoded:
        """The mean of my chunk and what I lost there last time, quantized again."""
        divisor: tuple = ()
        if self.divisor is not None:
            divisor = tuple(tiles.chunk(x, self.rank, self.rows) for x in self.divisor.args)
        valid: tuple = ()
        if (self.entries < self.length).any():
            # All real entries are within the first entries of a row.
            bits = packing.pack_planes(jnp.asarray(valid_bits(self.entries, self.length)))
            valid = (bits[self.rank],)
        error = packing.to_planes(self.server_error[0])
        sources = self._sources(got)
        if self.w > UNROLLED_WORKERS:
            sources = [_sum_in_turn(sources)]
        self.serving = (sources, divisor, valid)
        words, sizes = tiles.compute(
            lambda args: (
                packing.pack_planes(y := self._served(*args)), self.quantizer.sizes(y)
            ),
            (error, self.serving),
        )
        counts = self._counts()
        if counts.ndim:
            rows = np.broadcast_to(counts, (self.rows, counts.shape[-1]))
            count = lax.dynamic_index_in_dim(jnp.asarray(rows), self.rank)
        else:  # one scale for all that this worker serves
            count = jnp.asarray(self.entries, jnp.float32)[self.rank]
        answer = self._encoded(words, sizes, 1, count)
        if self.limit is not None:
            # An infinite scale must stay one: it tells everybody to skip the round.
            scales = jnp.where(
                jnp.isinf(answer.scales), answer.scales, jnp.minimum(answer.scales, self.limit)
            )
            answer = Encoded(answer.words, scales)
        self.answer = (words, self._per_tile(self._magnitudes(answer)))
        return answer

    def receive(self, got: Encoded) -> jax.Array:
        """Takes the mean; returns the largest magnitudes that it can have, by block."""
        if workers.is_direct(self.w):
            self.sources = self._sources(got)
            return jnp.sum(got.scales, axis=0) / self.w
        self.sources = [(self._per_tile(got.words), self._per_tile(self._magnitudes(got)))]
        return got.scales

    def square(self, got: Encoded) -> jax.Array:
        """Squared norm of the mean; without servers, of what a worker sent, on average."""
        counts = self._counts() if self.quantizer.block_size else self.entries[:, None]
        total = jnp.sum(jnp.square(got.scales) * jnp.asarray(counts, jnp.float32))
        return total / self.w if workers.is_direct(self.w) else total

    def finish(self, finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The mean and the new errors, or what was before if not all was finite."""

        def new_error(into: jax.Array, args: Any) -> jax.Array:
            words, magnitudes, value, divisor = args
            own = packing.signed_planes(words, magnitudes)
            own = own if self.divisor is None else own * self.divisor.fn(*divisor)
            return (self._compensated(into, value) - own).astype(into.dtype)

        _, *rest = self._own_args()
        error, finite = tiles.update(
            new_error, self.error, (self.words, self.magnitudes, *rest), finite
        )

        def mean(args: Any) -> jax.Array:
            sources, divisor = args
            total = self._total(sources)
            if workers.is_direct(self.w):  # a server has done so
                total = total / self.w
                if self.limit is not None:
                    total = jnp.clip(total, -self.limit, self.limit)
            return total if self.divisor is None else total * self.divisor.fn(*divisor)

        args = (self.sources, () if self.divisor is None else self.divisor.args)
        if self.held is None:
            means = mean(tiles.whole(args))
        else:
            means, _ = tiles.update(lambda _, part: mean(part), self.held, args, finite)
        return self._leaf(means), self._leaf(error)[None], self._new_server_error(finite)

    def _new_server_error(self, finite: jax.Array) -> jax.Array | None:
        if self.server_error is None:
            return None

        def lost(into: jax.Array, args: Any) -> jax.Array:
            (words, magnitudes), serving = args
            _, divisor, valid = serving
            rest = self._served(into, serving) - packing.signed_planes(words, magnitudes)
            if self.limit is not None:
                rest = jnp.clip(rest, -self.limit, self.limit)
            rest = rest if self.divisor is None else rest * self.divisor.fn(*divisor)
            rest = jnp.where(packing.unpack_planes(valid[0]), rest, 0.0) if valid else rest
            return rest.astype(into.dtype)

        planes = packing.to_planes(self.server_error[0])
        planes, _ = tiles.update(lost, planes, (self.answer, self.serving), finite)
        return packing.from_planes(planes, self.length)[None]

    def _compensated(self, error: jax.Array, value: Any) -> jax.Array:
        return self.value.fn(*value).astype(jnp.float32) + error.astype(jnp.float32)

    def _own_args(self) -> tuple[Any, ...]:
        return self.error, self.value.args, () if self.divisor is None else self.divisor.args

    def _served(self, error: jax.Array, serving: Any) -> jax.Array:
        sources, divisor, valid = serving
        error = error.astype(jnp.float32)
        error = error if self.divisor is None else error / self.divisor.fn(*divisor)
        y = self._total(sources) / self.w + error
        return jnp.where(packing.unpack_planes(valid[0]), y, 0.0) if valid else y

    def _total(self, sources: list[Any]) -> jax.Array:
        """Sum over the sources; unrolled, which XLA fuses."""
        planes = [s if isinstance(s, jax.Array) else packing.signed_planes(*s) for s in sources]
        return sum(planes[1:], start=planes[0])

    def _sources(self, got: Encoded) -> list[Any]:
        """Words and magnitudes of each row, in tiles."""
        magnitudes = self._magnitudes(got)
        return [
            (self._per_tile(got.words[i]), self._per_tile(magnitudes[i])) for i in range(self.w)
        ]

    def _counts(self) -> np.ndarray:
        return self.quantizer.block_counts(self.entries, self.length)

    def _encoded(
        self, words: jax.Array, sizes: jax.Array, rows: int, counts: jax.typing.ArrayLike
    ) -> Encoded:
        in_rows = lambda x: x.reshape(rows, self.length // packing.WORD_BITS)
        return Encoded(in_rows(words), self.quantizer.scales(in_rows(sizes), counts))

    def _magnitudes(self, encoded: Encoded) -> jax.Array:
        return self.quantizer.magnitudes(encoded.scales, encoded.words.shape[-1])

    def _per_tile(self, per_word: jax.Array) -> jax.Array:
        """``(..., K)``, any number of rows, to ``(tiles, T)``."""
        t = packing.tile_words(self.length)
        return per_word.reshape(-1, t)

    def _in_tiles(self, x: Any, fill: float) -> Lazy:
        if isinstance(x, Lazy):
            fn = lambda *args: x.fn(*map(_over_planes, args))
            return Lazy(fn, tuple(self._tiles(arg, fill) for arg in x.args))
        return Lazy(lambda tile: tile, (self._tiles(x, fill),))

    def _tiles(self, x: Any, fill: float) -> Any:
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

    def _leaf(self, planes: Any) -> jax.Array:
        """Inverse of ``_tiles``, with the sharding of the leaf."""
        x = planes.flat if isinstance(planes, tiles.Ragged) else planes.reshape(-1)
        x = x if x.size == self.like.size else x[: self.like.size]
        return workers.reshard_like(x.reshape(self.like.shape), self.like)


def _over_planes(tile: jax.Array) -> jax.Array:
    """Values by span, ``(tiles, spans, 1)``, for each of 32 planes; others as they are."""
    return jnp.repeat(tile, packing.WORD_BITS // tile.shape[-2], axis=-2)


def _sum_in_turn(sources: list[Any]) -> jax.Array:
    """Sum of many workers' signs, one after the other: less to compile."""
    words, magnitudes = (jnp.stack(parts) for parts in zip(*sources, strict=True))
    add = lambda total, row: (total + packing.signed_planes(*row), None)
    first = packing.signed_planes(words[0], magnitudes[0])
    return lax.scan(add, first, (words[1:], magnitudes[1:]))[0]


def to_rows(x: jax.Array, rows: int, length: int, fill: float = 0) -> jax.Array:
    """``(*shape)`` to ``(rows, length)``, padded at the end."""
    flat = workers.unshard(x).reshape(-1)
    if flat.size != rows * length:
        flat = jnp.pad(flat, (0, rows * length - flat.size), constant_values=fill)
    return flat.reshape(rows, length)
