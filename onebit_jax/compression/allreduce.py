"""Means over a mesh axis: compressed, with error feedback, and exact.

Both take and return lists or pytrees of local arrays and know nothing of
optimizers. All collectives that carry gradients are in this file; elsewhere are
only those of scalars, metrics and batch statistics.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import leaves as stages
from onebit_jax.compression.chunks import chunk_length, is_direct, to_rows
from onebit_jax.compression.feedback import ErrorFeedback
from onebit_jax.compression.leaves import Answer, Leaf, Sent
from onebit_jax.compression.quantize import Encoded, SignQuantizer

PyTree = Any

#: Bytes that a process on a CPU sends at a time. Smaller pieces use a slow link
#: better, but each costs milliseconds where the link is faster than the core.
PIECE_BYTES = 170_000

#: Entries below which a leaf shares its all-reduce with others between processes on
#: CPUs, where a small one takes milliseconds.
SMALL_LEAF = 65_536

#: Entries from which on further leaves go into another exchange in half precision: what
#: is sent and received of one needs memory of its own.
GROUP = 2**19


def compressed_allreduce(
    values: PyTree,
    errors: ErrorFeedback,
    axis_name: str | None,
    quantizer: SignQuantizer,
    divisors: PyTree | None = None,
    limit: Any = None,
    held: PyTree | None = None,
) -> tuple[PyTree, ErrorFeedback, jax.Array, jax.Array, list[jax.Array]]:
    """The 1-bit mean of each worker's values, with error feedback.

    Two payload collectives for the whole tree: an all_to_all that brings every
    worker's bits of a chunk to the worker that serves it, and an all_gather of
    the re-quantized means (Tang et al. 2021, arXiv 2102.02888, compressed allreduce).
    One or two workers send all their bits to each other in a single all_gather: as
    many bytes, no second quantization. Each carries one uint32 buffer of sign
    words and bitcast scales.

    Args:
      values: pytree of local float arrays or :class:`Lazy`.
      errors: the state from ``feedback.init_errors`` or the last call.
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
      what is the same on all workers: whether all was finite (if not, the errors
      are the old ones and the means are ``held``, or not to be used); the share of
      blocks, of those that are not all zero, that were cut to the limit, float32
      ``()``; and a list of the squared norms of the means, in units of the divisors,
      one for each leaf (without servers of what a worker sent, on average).
    """
    if not isinstance(quantizer, SignQuantizer):
        raise TypeError(f"quantizer must be a SignQuantizer, found {quantizer!r}")
    treedef: Any = jax.tree.structure(errors.worker_error)
    trees = (values, errors.worker_error, errors.server_error, divisors, held)
    columns = [
        [None] * treedef.num_leaves if tree is None else treedef.flatten_up_to(tree)
        for tree in trees
    ]
    rows: list[Any] = list(zip(*columns, strict=True))
    leaves = [
        stages.prepare(value, worker, server, divisor, old, axis_name, quantizer, limit)
        for value, worker, server, divisor, old in rows
        if worker.size
    ]
    # Leaves that share a buffer get one type, so those sharded over other axes
    # need a buffer of their own; without such axes there is one group.
    groups: dict[frozenset, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.varies, []).append(i)
    exchanged: dict[int, Exchanged] = {}
    finite, cut = jnp.bool_(True), jnp.float32(0)
    for group in groups.values():
        of_group, group_finite, group_cut = _exchange([leaves[i] for i in group], axis_name)
        finite, cut = finite & group_finite, jnp.maximum(cut, group_cut)
        exchanged.update(zip(group, of_group, strict=True))
    squares = [leaves[i].square(of.got) for i, of in exchanged.items()]
    finished = (stages.finish(leaf, *exchanged[i], finite) for i, leaf in enumerate(leaves))
    # An empty leaf has an empty mean and stays as it is.
    results = [
        next(finished) if worker.size else (
            worker[0].astype(jnp.float32) if held is None else held, worker, server
        )
        for _, worker, server, _, held in rows
    ]
    means, worker, server = (
        treedef.unflatten([result[i] for result in results]) for i in range(3)
    )
    return means, ErrorFeedback(worker, server), finite, cut, squares


class Exchanged(NamedTuple):
    """What both phases have brought of one leaf.

    Attributes:
      sent: what this worker has sent.
      answer: what it has answered as a server, or None without servers.
      got: what everybody has in the end, a row of each worker.
    """

    sent: Sent
    answer: Answer | None
    got: Encoded


def _exchange(
    group: list[Leaf], axis_name: str | None
) -> tuple[list[Exchanged], jax.Array, jax.Array]:
    """Both phases for leaves that share a buffer; whether all was finite, and what was cut."""
    sent = [stages.encode(leaf) for leaf in group]
    answers: list[Any] = [None] * len(group)
    encoded = [of.encoded for of in sent]
    if not group[0].cut.direct:
        received = _exchange_rows(encoded, axis_name)
        answers = [stages.serve(*pair) for pair in zip(group, received, strict=True)]
        encoded = [answer.encoded for answer in answers]
    gathered = _gather_rows(encoded, axis_name)
    # A NaN or Inf anywhere in a block makes its scale one, and everybody has all
    # scales: no further collective is needed to agree.
    finite = workers.all_agree([jnp.all(jnp.isfinite(got.scales)) for got in gathered])
    limit, cut = group[0].limit, jnp.float32(0)
    if limit is not None:
        reached = [leaf.reach(got) for leaf, got in zip(group, gathered, strict=True)]
        cut = _share_of_blocks(reached, limit)
    return list(map(Exchanged, sent, answers, gathered)), finite, cut


def _share_of_blocks(scales: list[jax.Array], limit: Any) -> jax.Array:
    """Share of the blocks in use whose scale is at the limit, the largest of all shards."""
    together = jnp.concatenate([s.reshape(-1) for s in scales]) if scales else jnp.zeros(0)
    share = jnp.sum(together >= limit, dtype=jnp.int32) / jnp.maximum(
        jnp.sum(together > 0, dtype=jnp.int32), 1
    )
    axes = tuple(sorted(workers.varying_axes(share)))
    return lax.pmax(share, axes) if axes else share


def exact_allreduce(
    values: PyTree, axis_name: str | None, wire_dtype: Any = None, largest: float = math.inf
) -> tuple[PyTree, jax.Array]:
    """The full-precision mean over the axis.

    Args:
      values: pytree of local float arrays.
      axis_name: bound mesh axis, or None for one worker.
      wire_dtype: None for a float32 all-reduce, or ``bfloat16`` / ``float16``
        for two bytes per entry on the wire: what is sent is rounded, the sum
        is in float32, and among more than two workers its mean is rounded once more.
      largest: magnitude above which a mean counts as not finite.

    Returns:
      The means in float32, the same on all workers, and whether all are
      finite.
    """
    w = workers.bound_axis_size(axis_name)
    treedef: Any
    leaves, treedef = jax.tree.flatten(values)
    leaves = [x.astype(jnp.float32) for x in leaves]
    if axis_name is None or not leaves:
        return treedef.unflatten(leaves), workers.all_finite(leaves, largest)
    if wire_dtype is None:
        totals = _sums(leaves, axis_name)
        # Of the totals, as the means would have to be stored for it.
        finite = workers.all_finite(totals, largest * w)
        return treedef.unflatten([total / w for total in totals]), finite
    means = [
        mean
        for group in _consecutive(leaves, GROUP)
        for mean in _half_precision_mean(group, axis_name, w, jnp.dtype(wire_dtype))
    ]
    return treedef.unflatten(means), workers.all_finite(means, largest)


def check_wire_dtype(wire_dtype: Any) -> None:
    """Raises ValueError unless it is a ``wire_dtype`` of :func:`exact_allreduce`."""
    if wire_dtype is not None and jnp.dtype(wire_dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"wire_dtype must be None (float32), bfloat16 or float16, found {wire_dtype!r}"
        )


def onebit_round_bytes(params: PyTree, w: int, quantizer: SignQuantizer) -> int:
    """Bytes each of ``w`` workers sends in one compressed round of the tree."""
    direct = is_direct(w)
    words = 0
    for p in jax.tree.leaves(params):
        length = chunk_length(math.prod(jnp.shape(p)), 1 if direct else w)
        words += length // 32 + quantizer.blocks_for(length)
    return (1 if direct else 2) * (w - 1) * words * 4


def exact_round_bytes(params: PyTree, w: int, wire_dtype: Any = None) -> int:
    """Bytes each of ``w`` workers sends in one exact round of the tree.

    A ring all-reduce sends ``2 (w - 1) / w`` of the array from each worker.
    """
    sizes = [math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)]
    if wire_dtype is None:
        return 2 * (w - 1) * sum(sizes) * 4 // w
    phases, rows = (1, 1) if is_direct(w) else (2, w)
    entries = phases * (w - 1) * sum(-(-n // rows) for n in sizes)
    return entries * jnp.dtype(wire_dtype).itemsize


def _exchange_rows(sent: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Row r of every leaf to worker r; returns row i from worker i."""
    if axis_name is None:
        return sent
    payload = jnp.concatenate([_to_payload(e) for e in sent], axis=1)
    return _from_payload(swap_payload(payload, axis_name), sent)


def _gather_rows(rows: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Every worker's one row of each leaf to everybody: ``(1, K)`` to ``(w, K)``."""
    if axis_name is None:
        return rows
    payload = jnp.concatenate([_to_payload(e) for e in rows], axis=1)
    return _from_payload(gather_payload(payload, axis_name), rows)


def swap_payload(payload: jax.Array, axis_name: str, then: Callable = lambda x: x) -> jax.Array:
    """Row r of ``(w, C)`` to worker r; row i of the result is from worker i.

    ``then`` is applied to each piece of the result, so that the whole needs no memory.
    """
    swap = lambda rows: lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)
    peers = max(lax.axis_size(axis_name) - 1, 1)
    return _in_pieces(lambda rows: then(swap(rows)), payload, PIECE_BYTES // peers)


def gather_payload(payload: jax.Array, axis_name: str, then: Callable = lambda x: x) -> jax.Array:
    """Every worker's ``(1, C)`` to everybody: ``(w, C)``; ``then`` as above."""
    gather = lambda row: all_gather(row[0], axis_name)
    return _in_pieces(lambda row: then(gather(row)), payload, PIECE_BYTES)


def _between_cpus() -> bool:
    """Whether this process exchanges with others from a CPU."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _sums(leaves: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """Sums over the workers; small leaves of one type in one all-reduce, see SMALL_LEAF."""
    totals: list[Any] = [None] * len(leaves)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        small = _between_cpus() and x.size < SMALL_LEAF and workers.unshard(x) is x
        groups.setdefault(workers.varying_axes(x) if small else i, []).append(i)
    for group in groups.values():
        if len(group) == 1:
            totals[group[0]] = lax.psum(leaves[group[0]], axis_name)
            continue
        flat = lax.psum(jnp.concatenate([leaves[i].reshape(-1) for i in group]), axis_name)
        ends = itertools.accumulate(leaves[i].size for i in group)
        for i, end in zip(group, ends, strict=True):
            totals[i] = flat[end - leaves[i].size : end].reshape(leaves[i].shape)
    return totals


def _consecutive(leaves: list[jax.Array], entries: int) -> list[list[jax.Array]]:
    """The leaves in order, in lists of about so many entries."""
    ends = itertools.accumulate(x.size for x in leaves)
    groups = itertools.groupby(
        zip(leaves, ends, strict=True), lambda pair: (pair[1] - pair[0].size) // entries
    )
    return [[x for x, _ in group] for _, group in groups]


def _in_pieces(
    collective: Callable[[jax.Array], jax.Array], payload: jax.Array, n_bytes: int
) -> jax.Array:
    """Sends a payload ``(rows, C)`` in turns of about so many bytes of each row.

    Only between processes on CPUs: gloo sends a large message one way at a time.
    """
    entries = max(n_bytes // payload.dtype.itemsize, 1)
    pieces = -(-payload.shape[1] // entries)
    if pieces < 2 or not _between_cpus():
        return collective(payload)
    size = -(-payload.shape[1] // pieces)
    rest = pieces * size - payload.shape[1]
    cut = jnp.pad(payload, ((0, 0), (0, rest))).reshape(-1, pieces, size)
    _, received = lax.scan(lambda _, piece: (None, collective(piece)), None, cut.swapaxes(0, 1))
    together = received.swapaxes(0, 1).reshape(received.shape[1], pieces * size)
    return together[:, : payload.shape[1]]


def all_gather(x: jax.Array, axis_name: str) -> jax.Array:
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

    One or two workers send each other everything: as many bytes in one phase. Bitcast
    to integers, because XLA widens a bfloat16 collective to float32 on the CPU, and an
    all-reduce in it would also add in bfloat16.
    """
    direct = is_direct(w)
    rows = 1 if direct else w
    lengths = [-(-x.size // rows) for x in leaves]
    chunks = jnp.concatenate(
        [to_rows(x.astype(wire), rows, n) for x, n in zip(leaves, lengths, strict=True)], axis=1
    )
    if chunks.size == 0:
        return leaves
    to_bits = lambda x: lax.bitcast_convert_type(x.astype(wire), jnp.uint16)
    from_bits = lambda bits: lax.bitcast_convert_type(bits, wire).astype(jnp.float32)

    def mean(bits: jax.Array) -> jax.Array:
        parts = from_bits(bits)
        return sum((parts[i] for i in range(1, w)), start=parts[0])[None] / w

    if direct:
        means = gather_payload(to_bits(chunks), axis_name, mean)
    else:
        served = swap_payload(to_bits(chunks), axis_name, lambda bits: to_bits(mean(bits)))
        means = gather_payload(served, axis_name, from_bits)
    result, start = [], 0
    for x, n in zip(leaves, lengths, strict=True):
        flat = means[:, start : start + n].reshape(-1)[: x.size]
        result.append(workers.reshard_like(flat.reshape(x.shape), x))
        start += n
    return result
