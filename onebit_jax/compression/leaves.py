"""One leaf's part in a 1-bit round: what happens before, between and after the exchanges.

Each stage is a function of the leaf and of what the stages before it have returned:
``encode``, ``serve`` (where there are servers), ``finish``.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import packing, tiles
from onebit_jax.compression.chunks import Chunks, Lazy
from onebit_jax.compression.quantize import Encoded, SignQuantizer, valid_bits

#: Up to so many workers the server's sum is unrolled: faster, but more to compile.
UNROLLED_WORKERS = 32


class Signs(NamedTuple):
    """Words of signs and the magnitude of each, in tiles: ``(tiles, T)`` both."""

    words: jax.Array
    magnitudes: jax.Array


class Sent(NamedTuple):
    """What a worker sends of a leaf.

    Attributes:
      encoded: a row for each worker that serves.
      signs: the same in tiles.
    """

    encoded: Encoded
    signs: Signs


class Served(NamedTuple):
    """What goes into the mean that a worker serves, in tiles of its chunk.

    Attributes:
      sources: what the workers sent, or one array, their sum.
      divisor: arguments of the divisor.
      valid: words of which entries are no padding; none if all are.
    """

    sources: list[Any]
    divisor: tuple
    valid: tuple


class Answer(NamedTuple):
    """What a worker answers as a server.

    Attributes:
      encoded: one row.
      signs: the same in tiles.
      served: of what.
    """

    encoded: Encoded
    signs: Signs
    served: Served


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one leaf brings into a round, in tiles.

    Attributes:
      cut: how it is cut.
      rank: this worker's index.
      quantizer: of what is sent and answered.
      limit: of the magnitudes of a mean, in units of the divisor, or None.
      value: to be averaged.
      divisor: in units of which it is quantized, or None.
      error: the worker error.
      server_error: ``(1, L)``, or None without servers.
      held: what to return instead of a mean that is not finite, or None.
    """

    cut: Chunks
    rank: Any
    quantizer: SignQuantizer
    limit: Any
    value: Lazy
    divisor: Lazy | None
    error: Any
    server_error: jax.Array | None
    held: Any

    @property
    def varies(self) -> frozenset:
        """Mesh axes over which what is sent varies."""
        arrays = jax.tree.leaves((self.value.args, self.error))
        return frozenset().union(*map(workers.varying_axes, arrays))

    def reach(self, got: Encoded) -> jax.Array:
        """The largest magnitudes that the mean can have, by block."""
        return jnp.sum(got.scales, axis=0) / self.cut.w if self.cut.direct else got.scales

    def square(self, got: Encoded) -> jax.Array:
        """Squared norm of the mean; without servers, of what a worker sent, on average."""
        counts = self.counts if self.quantizer.block_size else self.cut.entries[:, None]
        total = jnp.sum(jnp.square(got.scales) * jnp.asarray(counts, jnp.float32))
        return total / self.cut.w if self.cut.direct else total

    def compensated(self, error: jax.Array, value: Any) -> jax.Array:
        """What this worker has to say: value + error."""
        return self.value.fn(*value).astype(jnp.float32) + error.astype(jnp.float32)

    def mean_of(self, error: jax.Array, served: Served) -> jax.Array:
        """What a server quantizes, in units of the divisor; padding is 0."""
        error = error.astype(jnp.float32)
        error = error if self.divisor is None else error / self.divisor.fn(*served.divisor)
        return _where_valid(served, _total(served.sources) / self.cut.w + error)

    def times_divisor(self, x: jax.Array, args: Any) -> jax.Array:
        """Back from units of the divisor."""
        return x if self.divisor is None else x * self.divisor.fn(*args)

    @property
    def divisor_args(self) -> tuple:
        """Of the divisor, in tiles."""
        return () if self.divisor is None else self.divisor.args

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Entries of each block that are no padding."""
        return self.quantizer.block_counts(self.cut.entries, self.cut.length)

    def encoded(
        self, words: jax.Array, sizes: jax.Array, counts: jax.typing.ArrayLike, limit: Any = None
    ) -> tuple[Encoded, Signs]:
        """Of words and their sizes in tiles, in rows and in tiles."""
        scales = self.quantizer.scales(self.cut.in_rows(sizes), counts)
        if limit is not None:
            # An infinite scale must stay one: it tells everybody to skip the round.
            scales = jnp.where(jnp.isinf(scales), scales, jnp.minimum(scales, limit))
        encoded = Encoded(self.cut.in_rows(words), scales)
        return encoded, Signs(words, self.signs(encoded).magnitudes)

    def signs(self, encoded: Encoded) -> Signs:
        """All rows together, in tiles."""
        magnitudes = self.quantizer.magnitudes(encoded.scales, encoded.words.shape[-1])
        return Signs(*map(self.cut.per_tile, (encoded.words, magnitudes)))

    def rows(self, got: Encoded) -> list[Signs]:
        """Each worker's row by itself."""
        magnitudes = self.quantizer.magnitudes(got.scales, got.words.shape[-1])
        return [
            Signs(self.cut.per_tile(got.words[i]), self.cut.per_tile(magnitudes[i]))
            for i in range(self.cut.w)
        ]


def encode(leaf: Leaf) -> Sent:
    """Signs and scales of value + error."""

    # XLA computes what both outputs need only once if it holds a division, and
    # must not know that it divides by one.
    one = lax.optimization_barrier(jnp.float32(1))

    def fn(args: Any) -> tuple[jax.Array, jax.Array]:
        y = leaf.compensated(*args[:2])
        y = y / (one if leaf.divisor is None else leaf.divisor.fn(*args[2]))
        return packing.pack_planes(y), leaf.quantizer.sizes(y)

    words, sizes = tiles.compute(fn, (leaf.error, leaf.value.args, leaf.divisor_args))
    return Sent(*leaf.encoded(words, sizes, leaf.counts))


def serve(leaf: Leaf, received: Encoded) -> Answer:
    """The mean of my chunk and what I lost there last time, quantized again.

    ``received`` has a row of each worker.
    """
    rows, length, entries = leaf.cut.rows, leaf.cut.length, leaf.cut.entries
    divisor = tuple(tiles.chunk(x, leaf.rank, rows) for x in leaf.divisor_args)
    valid: tuple = ()
    if (entries < length).any():
        # All real entries are within the first entries of a row.
        bits = packing.pack_planes(jnp.asarray(valid_bits(entries, length)))
        valid = (bits[leaf.rank],)
    sources: list[Any] = leaf.rows(received)
    if leaf.cut.w > UNROLLED_WORKERS:
        sources = [_sum_in_turn(sources)]
    served = Served(sources, divisor, valid)
    words, sizes = tiles.compute(
        lambda args: (packing.pack_planes(y := leaf.mean_of(*args)), leaf.quantizer.sizes(y)),
        (_server_planes(leaf), served),
    )
    counts = leaf.counts
    if counts.ndim:
        each = np.broadcast_to(counts, (rows, counts.shape[-1]))
        count = lax.dynamic_index_in_dim(jnp.asarray(each), leaf.rank)
    else:  # one scale for all that this worker serves
        count = jnp.asarray(entries, jnp.float32)[leaf.rank]
    return Answer(*leaf.encoded(words, sizes, count, leaf.limit), served)


def finish(
    leaf: Leaf, sent: Sent, answer: Answer | None, got: Encoded, finite: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The mean and the new errors, or what was before if not all was finite.

    ``answer`` is None without servers; ``got`` has what everybody got, a row of each
    worker.
    """

    def new_error(into: jax.Array, args: Any) -> jax.Array:
        signs, value, divisor = args
        own = leaf.times_divisor(packing.signed_planes(*signs), divisor)
        return (leaf.compensated(into, value) - own).astype(into.dtype)

    error, finite = tiles.update(
        new_error, leaf.error, (sent.signs, leaf.value.args, leaf.divisor_args), finite
    )

    def mean(args: Any) -> jax.Array:
        sources, divisor = args
        total = _total(sources)
        if leaf.cut.direct:  # a server has done so
            total = total / leaf.cut.w
            if leaf.limit is not None:
                total = jnp.clip(total, -leaf.limit, leaf.limit)
        return leaf.times_divisor(total, divisor)

    args = (leaf.rows(got) if leaf.cut.direct else [leaf.signs(got)], leaf.divisor_args)
    if leaf.held is None:
        means = mean(tiles.whole(args))
    else:
        means, _ = tiles.update(lambda _, part: mean(part), leaf.held, args, finite)
    lost = None if answer is None else _new_server_error(leaf, answer, finite)
    return leaf.cut.leaf(means), leaf.cut.leaf(error)[None], lost


def _new_server_error(leaf: Leaf, answer: Answer, finite: jax.Array) -> jax.Array:
    def lost(into: jax.Array, args: Any) -> jax.Array:
        signs, served = args
        rest = leaf.mean_of(into, served) - packing.signed_planes(*signs)
        if leaf.limit is not None:
            rest = jnp.clip(rest, -leaf.limit, leaf.limit)
        rest = leaf.times_divisor(rest, served.divisor)
        return _where_valid(served, rest).astype(into.dtype)

    planes = _server_planes(leaf)
    planes, _ = tiles.update(lost, planes, (answer.signs, answer.served), finite)
    return packing.from_planes(planes, leaf.cut.length)[None]


def prepare(
    value: Any, worker_error: jax.Array, server_error: jax.Array | None, divisor: Any,
    held: jax.Array | None, axis_name: str | None, quantizer: SignQuantizer, limit: Any,
) -> Leaf:
    """Cuts what ``compressed_allreduce`` is given of one leaf.

    Raises:
      ValueError: if the server error is that of another number of workers.
    """
    w = workers.bound_axis_size(axis_name)
    cut = Chunks(worker_error[0], w)
    found = None if server_error is None else server_error.shape
    expected = None if cut.direct else (1, cut.length)
    if found != expected:
        raise workers.wrong_worker_count(
            "compressed mean",
            f"a server error has local shape {found}, {w} workers need {expected}",
        )
    return Leaf(
        cut, 0 if axis_name is None else lax.axis_index(axis_name), quantizer, limit,
        value=cut.lazy(value, 0),
        # At padding: a divisor of 1, or one that is computed from a 1.
        divisor=None if divisor is None else cut.lazy(divisor, 1),
        error=cut.tiles(worker_error[0], 0),
        server_error=server_error,
        held=None if held is None else cut.tiles(held, 0),
    )


def _server_planes(leaf: Leaf) -> jax.Array:
    assert leaf.server_error is not None
    return packing.to_planes(leaf.server_error[0])


def _where_valid(served: Served, x: jax.Array) -> jax.Array:
    """``x`` with zeros at padding."""
    return jnp.where(packing.unpack_planes(served.valid[0]), x, 0.0) if served.valid else x


def _total(sources: list[Any]) -> jax.Array:
    """Sum over the sources; unrolled, which XLA fuses."""
    planes = [s if isinstance(s, jax.Array) else packing.signed_planes(*s) for s in sources]
    return sum(planes[1:], start=planes[0])


def _sum_in_turn(sources: list[Signs]) -> jax.Array:
    """Sum of many workers' signs, one after the other: less to compile."""
    words, magnitudes = (jnp.stack(parts) for parts in zip(*sources, strict=True))
    add = lambda total, row: (total + packing.signed_planes(*row), None)
    first = packing.signed_planes(words[0], magnitudes[0])
    return lax.scan(add, first, (words[1:], magnitudes[1:]))[0]
