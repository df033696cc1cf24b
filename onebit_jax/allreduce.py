"""Means over a mesh axis: compressed, with error feedback, and exact.

Both take and return lists or pytrees of local arrays and know nothing of
optimizers. All collectives that carry gradients are in this file; elsewhere are
only those of scalars, metrics and batch statistics.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import packing, tiles, workers
from onebit_jax.quantize import Encoded, SignQuantizer, valid_bits

PyTree = Any

#: Words that a process on a CPU sends at a time, 50 kB: about what a socket takes at once.
PIECE_WORDS = 12_500

#: Up to so many workers the server's sum is unrolled: faster, but more to compile.
UNROLLED_WORKERS = 32


class ErrorFeedback(NamedTuple):
    """What compression has left over and adds to the next round.

    Attributes:
      worker_error: float32 ``(1 or w, *leaf.shape)`` for each leaf, what this
        worker's own quantization lost.
      server_error: float32 ``(1 or w, L)`` for each leaf, what was lost when
        this worker quantized the mean of the chunk of ``L`` entries it serves;
        ``L`` is 0 for one or two workers, which need no server.
    """

    worker_error: PyTree
    server_error: PyTree


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


def init_errors(params: PyTree, axis_name: str | None) -> ErrorFeedback:
    """Zero errors for a tree, see :class:`ErrorFeedback` for their shapes."""
    w = workers.axis_size(axis_name)

    def worker(p: Any) -> jax.Array:
        return workers.worker_zeros_like(p, axis_name)

    def server(p: Any) -> jax.Array:
        length = workers.served_length(math.prod(jnp.shape(p)), w)
        return workers.worker_zeros(p, (length,), jnp.float32, axis_name)

    return ErrorFeedback(jax.tree.map(worker, params), jax.tree.map(server, params))


def compressed_allreduce(
    values: PyTree,
    errors: ErrorFeedback,
    axis_name: str | None,
    quantizer: SignQuantizer,
    divisors: PyTree | None = None,
    limit: Any = None,
    held: PyTree | None = None,
) -> tuple[PyTree, ErrorFeedback, jax.Array, jax.Array]:
    """The 1-bit mean of each worker's values, with error feedback.

    Two payload collectives for the whole tree: an all_to_all that brings every
    worker's bits of a chunk to the worker that serves it, and an all_gather of
    the re-quantized means (Tang et al. 2021, arXiv 2102.02888, compressed allreduce).
    One or two workers send all their bits to each other in a single all_gather: as
    many bytes, no second quantization. Each carries one uint32 buffer of sign
    words and bitcast scales.

    Args:
      values: pytree of local float arrays or :class:`Lazy`.
      errors: the state from :func:`init_errors` or the last call.
      axis_name: bound mesh axis, or None for one worker.
      quantizer: how to quantize.
      divisors: positive arrays or :class:`Lazy` like ``values``, the same on every
        worker, by which values are divided for quantization. Default: none.
      limit: largest magnitude of a mean, in units of its divisor. What is above
        it is dropped, not put into the error, where it would pile up. Default:
        none.
      held: float32 arrays like ``values``, the same on every worker, to return
        instead of the means if not all was finite. Default: none.

    Returns:
      The means in float32, bit-identical on all workers; the new errors; and
      two values that are the same on all workers: whether all was finite (if
      not, the errors are the old ones and the means are ``held``, or not to be
      used), and the share of blocks, of those that are not all zero, that were
      cut to the limit, float32 ``()``.
    """
    if not isinstance(quantizer, SignQuantizer):
        raise TypeError(f"quantizer must be a SignQuantizer, found {quantizer!r}")
    treedef: Any = jax.tree.structure(errors.worker_error)
    trees = (values, errors.worker_error, errors.server_error, divisors, held)
    columns = [
        [None] * treedef.num_leaves if tree is None else treedef.flatten_up_to(tree)
        for tree in trees
    ]
    rows = list(zip(*columns, strict=True))
    leaves = [_Leaf(*row, axis_name, quantizer, limit) for row in rows if row[1].size]
    # Leaves that share a buffer get one type, so those sharded over other axes
    # need a buffer of their own; without such axes there is one group.
    groups: dict[frozenset, list[_Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.varies, []).append(leaf)
    finite, cut = jnp.bool_(True), jnp.float32(0)
    for group in groups.values():
        group_finite, group_cut = _exchange(group, axis_name)
        finite, cut = finite & group_finite, jnp.maximum(cut, group_cut)
    finished = (leaf.finish(finite) for leaf in leaves)
    # An empty leaf has an empty mean and stays as it is.
    results = [next(finished) if row[1].size else (row[1][0], *row[1:3]) for row in rows]
    means, worker, server = (
        treedef.unflatten([result[i] for result in results]) for i in range(3)
    )
    return means, ErrorFeedback(worker, server), finite, cut


def _exchange(group: list["_Leaf"], axis_name: str | None) -> tuple[jax.Array, jax.Array]:
    """Both phases for leaves that share a buffer; whether all was finite, and what was cut."""
    sent = [leaf.encode() for leaf in group]
    if workers.is_direct(workers.bound_axis_size(axis_name)):
        gathered = _gather_rows(sent, axis_name)
    else:
        received = _exchange_rows(sent, axis_name)
        answers = [leaf.serve(got) for leaf, got in zip(group, received, strict=True)]
        gathered = _gather_rows(answers, axis_name)
    reached = [leaf.receive(got) for leaf, got in zip(group, gathered, strict=True)]
    # A NaN or Inf anywhere in a block makes its scale one, and everybody has all
    # scales: no further collective is needed to agree.
    finite = workers.all_agree([jnp.all(jnp.isfinite(got.scales)) for got in gathered])
    limit = group[0].limit
    return finite, jnp.float32(0) if limit is None else _share_of_blocks(reached, limit)


class _Leaf:
    """One leaf on its way through a round: chunks in rows, rows in tiles."""

    def __init__(
        self, value: Any, worker_error: jax.Array, server_error: jax.Array, divisor: Any,
        held: jax.Array | None, axis_name: str | None, quantizer: SignQuantizer, limit: Any,
    ) -> None:
        self.w = w = workers.bound_axis_size(axis_name)
        self.rank = 0 if axis_name is None else lax.axis_index(axis_name)
        self.quantizer, self.limit = quantizer, limit
        self.like = worker_error[0]
        n = self.like.size
        served = workers.served_length(n, w)
        if server_error.shape != (1, served):
            raise workers.wrong_worker_count(
                "compressed mean",
                f"a server error has local shape {server_error.shape}, {w} workers need "
                f"{(1, served)}",
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
            *(workers.varying_axes(x) for x in (*self.value.args, self.error))
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
        mine = lambda x: lax.dynamic_index_in_dim(
            x.reshape(self.rows, -1, *x.shape[1:]), self.rank, keepdims=False
        )
        divisor = () if self.divisor is None else tuple(map(mine, self.divisor.args))
        valid: tuple = ()
        if (self.entries < self.length).any():
            # All real entries are within the first entries of a row.
            bits = packing.pack_planes(jnp.asarray(valid_bits(self.entries, self.length)))
            valid = (bits[self.rank],)
        error = packing.to_planes(self.server_error[0])
        rows = self._sources(got)
        if self.w > UNROLLED_WORKERS:
            rows = [_sum_in_turn(rows)]
        self.serving = (rows, divisor, valid)
        words, sizes = tiles.compute(
            lambda args: (
                packing.pack_planes(y := self._served(*args)), self.quantizer.sizes(y)
            ),
            (error, self.serving),
        )
        counts = self._counts()
        if counts.ndim:
            counts = lax.dynamic_index_in_dim(
                jnp.asarray(np.broadcast_to(counts, (self.rows, counts.shape[-1]))), self.rank
            )
        else:  # one scale for all that this worker serves
            counts = jnp.asarray(self.entries, jnp.float32)[self.rank]
        answer = self._encoded(words, sizes, 1, counts)
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

    def finish(self, finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The mean and the new errors, or what was before if not all was finite."""

        def new_error(into: jax.Array, args: Any) -> jax.Array:
            words, magnitudes, value, divisor = args
            own = packing.signed_planes(words, magnitudes)
            own = own if self.divisor is None else own * self.divisor.fn(*divisor)
            return self._compensated(into, value) - own

        _, *rest = self._own_args()
        error, finite = tiles.update(
            new_error, self.error, (self.words, self.magnitudes, *rest), finite
        )

        def mean(args: Any) -> jax.Array:
            sources, divisor = args
            total = self._total(sources)
            if len(sources) > 1:
                total = total / self.w
                if self.limit is not None:
                    total = jnp.clip(total, -self.limit, self.limit)
            return total if self.divisor is None else total * self.divisor.fn(*divisor)

        args = (self.sources, () if self.divisor is None else self.divisor.args)
        if self.held is None:
            means = mean(args)
        else:
            means, _ = tiles.update(lambda _, part: mean(part), self.held, args, finite)
        return self._leaf(means), self._leaf(error)[None], self._new_server_error(finite)

    def _new_server_error(self, finite: jax.Array) -> jax.Array:
        if workers.is_direct(self.w):
            return self.server_error

        def lost(into: jax.Array, args: Any) -> jax.Array:
            (words, magnitudes), serving = args
            _, divisor, valid = serving
            rest = self._served(into, serving) - packing.signed_planes(words, magnitudes)
            if self.limit is not None:
                rest = jnp.clip(rest, -self.limit, self.limit)
            rest = rest if self.divisor is None else rest * self.divisor.fn(*divisor)
            return jnp.where(packing.unpack_planes(valid[0]), rest, 0.0) if valid else rest

        planes = packing.to_planes(self.server_error[0])
        planes, _ = tiles.update(lost, planes, (self.answer, self.serving), finite)
        return packing.from_planes(planes, self.length)[None]

    def _compensated(self, error: jax.Array, value: Any) -> jax.Array:
        return self.value.fn(*value).astype(jnp.float32) + error

    def _own_args(self) -> tuple[Any, ...]:
        return self.error, self.value.args, () if self.divisor is None else self.divisor.args

    def _served(self, error: jax.Array, serving: Any) -> jax.Array:
        rows, divisor, valid = serving
        error = error if self.divisor is None else error / self.divisor.fn(*divisor)
        y = self._total(rows) / self.w + error
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

    def _tiles(self, x: Any, fill: float) -> jax.Array:
        """``(*shape)`` to ``(tiles, 32, T)``, padded at the end."""
        if isinstance(x, Spans):
            if self.length % packing.TILE == 0:
                rest = self.rows * self.length // packing.SPAN - x.values.size
                return jnp.pad(x.values, (0, rest)).reshape(-1, packing.TILE // packing.SPAN, 1)
            x = jnp.repeat(x.values, packing.SPAN)[: self.like.size]
        planes = packing.to_planes(_to_rows(x, self.rows, self.length, fill))
        return planes.reshape(-1, *planes.shape[2:])

    def _leaf(self, planes: jax.Array) -> jax.Array:
        """Inverse of ``_tiles``, with the sharding of the leaf."""
        x = planes.reshape(-1)
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


def _share_of_blocks(scales: list[jax.Array], limit: Any) -> jax.Array:
    """Share of the blocks in use whose scale is at the limit, the largest of all shards."""
    together = jnp.concatenate([s.reshape(-1) for s in scales]) if scales else jnp.zeros(0)
    share = jnp.sum(together >= limit, dtype=jnp.int32) / jnp.maximum(
        jnp.sum(together > 0, dtype=jnp.int32), 1
    )
    axes = tuple(sorted(workers.varying_axes(share)))
    return lax.pmax(share, axes) if axes else share


def exact_allreduce(
    values: PyTree, axis_name: str | None, wire_dtype: Any = None
) -> tuple[PyTree, jax.Array]:
    """The full-precision mean over the axis.

    Args:
      values: pytree of local float arrays.
      axis_name: bound mesh axis, or None for one worker.
      wire_dtype: None for a float32 all-reduce, or ``bfloat16`` / ``float16``
        for two bytes per entry on the wire: what is sent is rounded, the sum
        is in float32 and its mean is rounded once more.

    Returns:
      The means in float32, the same on all workers, and whether all are
      finite.
    """
    w = workers.bound_axis_size(axis_name)
    treedef: Any
    leaves, treedef = jax.tree.flatten(values)
    leaves = [x.astype(jnp.float32) for x in leaves]
    if axis_name is None or not leaves:
        means = leaves
    elif wire_dtype is None:
        means = [total / w for total in lax.psum(leaves, axis_name)]
    else:
        means = _half_precision_mean(leaves, axis_name, w, jnp.dtype(wire_dtype))
    finite = workers.all_agree([jnp.all(jnp.isfinite(mean)) for mean in means])
    return treedef.unflatten(means), finite


def onebit_round_bytes(params: PyTree, w: int, quantizer: SignQuantizer) -> int:
    """Bytes each of ``w`` workers sends in one compressed round of the tree."""
    direct = workers.is_direct(w)
    words = 0
    for p in jax.tree.leaves(params):
        length = workers.chunk_length(math.prod(jnp.shape(p)), 1 if direct else w)
        words += length // 32 + quantizer.blocks_for(length)
    return (1 if direct else 2) * (w - 1) * words * 4


def exact_round_bytes(params: PyTree, w: int, wire_dtype: Any = None) -> int:
    """Bytes each of ``w`` workers sends in one exact round of the tree.

    A ring all-reduce sends ``2 (w - 1) / w`` of the array from each worker.
    """
    sizes = [math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)]
    if wire_dtype is None:
        return 2 * (w - 1) * sum(sizes) * 4 // w
    return 2 * (w - 1) * sum(-(-n // w) for n in sizes) * jnp.dtype(wire_dtype).itemsize


def _to_rows(x: jax.Array, rows: int, length: int, fill: float = 0) -> jax.Array:
    """``(*shape)`` to ``(rows, length)``, padded at the end."""
    flat = workers.unshard(x).reshape(-1)
    if flat.size != rows * length:
        flat = jnp.pad(flat, (0, rows * length - flat.size), constant_values=fill)
    return flat.reshape(rows, length)


def _exchange_rows(sent: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Row r of every leaf to worker r; returns row i from worker i."""
    if axis_name is None:
        return sent
    payload = jnp.concatenate([_to_payload(e) for e in sent], axis=1)
    swap = lambda rows: lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)
    peers = max(lax.axis_size(axis_name) - 1, 1)
    return _from_payload(_in_pieces(swap, payload, PIECE_WORDS // peers), sent)


def _gather_rows(rows: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Every worker's one row of each leaf to everybody: ``(1, K)`` to ``(w, K)``."""
    if axis_name is None:
        return rows
    payload = jnp.concatenate([_to_payload(e) for e in rows], axis=1)
    gather = lambda row: _all_gather(row[0], axis_name)
    return _from_payload(_in_pieces(gather, payload, PIECE_WORDS), rows)


def _in_pieces(
    collective: Callable[[jax.Array], jax.Array], payload: jax.Array, words: int
) -> jax.Array:
    """Sends a payload ``(rows, C)`` in turns of about so many words of each row.

    Only between processes on CPUs: gloo sends a large message one way at a time.
    """
    pieces = -(-payload.shape[1] // max(words, 1))
    if pieces < 2 or jax.default_backend() != "cpu" or jax.process_count() == 1:
        return collective(payload)
    size = -(-payload.shape[1] // pieces)
    rest = pieces * size - payload.shape[1]
    cut = jnp.pad(payload, ((0, 0), (0, rest))).reshape(-1, pieces, size)
    _, received = lax.scan(lambda _, piece: (None, collective(piece)), None, cut.swapaxes(0, 1))
    together = received.swapaxes(0, 1).reshape(received.shape[1], pieces * size)
    return together[:, : payload.shape[1]]


def _all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """all_gather whose result is known to be the same everywhere."""
    if workers.tracks_axis(axis_name):
        return lax.all_gather(x, axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def _to_payload(encoded: Encoded) -> jax.Array:
    scales = lax.bitcast_convert_type(encoded.scales, jnp.uint32)
    return jnp.concatenate([encoded.words, scales], axis=1)


def _from_payload(payload: jax.Array, like: list[Encoded]) -> list[Encoded]:
    result, start = [], 0
    for e in like:
        words, scales = e.words.shape[-1], e.scales.shape[-1]
        middle, end = start + words, start + words + scales
        bits = payload[:, middle:end]
        result.append(
            Encoded(payload[:, start:middle], lax.bitcast_convert_type(bits, jnp.float32))
        )
        start = end
    return result


def _half_precision_mean(
    leaves: list[jax.Array], axis_name: str, w: int, wire: jnp.dtype
) -> list[jax.Array]:
    """Reduce-scatter and all-gather with two bytes per entry on the wire.

    Bitcast to integers, because XLA widens a bfloat16 collective to float32
    on the CPU, and an all-reduce in it would also add in bfloat16.
    """
    lengths = [-(-x.size // w) for x in leaves]
    chunks = jnp.concatenate(
        [_to_rows(x.astype(wire), w, n) for x, n in zip(leaves, lengths, strict=True)], axis=1
    )
    if chunks.size == 0:
        return leaves
    bits = lax.bitcast_convert_type(chunks, jnp.uint16)
    bits = lax.all_to_all(bits, axis_name, split_axis=0, concat_axis=0, tiled=True)
    parts = lax.bitcast_convert_type(bits, wire).astype(jnp.float32)
    mean = sum((parts[i] for i in range(1, w)), start=parts[0]) / w
    bits = _all_gather(lax.bitcast_convert_type(mean.astype(wire), jnp.uint16), axis_name)
    means = lax.bitcast_convert_type(bits, wire).astype(jnp.float32)
    result, start = [], 0
    for x, n in zip(leaves, lengths, strict=True):
        flat = means[:, start : start + n].reshape(-1)[: x.size]
        result.append(workers.reshard_like(flat.reshape(x.shape), x))
        start += n
    return result
