"""Means over a mesh axis: compressed, with error feedback, and exact.

Both take and return lists or pytrees of local arrays and know nothing of
optimizers. All collectives that carry gradients are in this file; elsewhere are
only those of scalars, metrics and batch statistics.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import workers
from onebit_jax.quantize import Encoded, SignQuantizer

PyTree = Any

#: Up to so many workers the server's sum is unrolled: faster, but more to compile.
UNROLLED_WORKERS = 32


class ErrorFeedback(NamedTuple):
    """What compression has left over and adds to the next round.

    Attributes:
      worker_error: float32 ``(1 or w, *leaf.shape)`` for each leaf, what this
        worker's own quantization lost.
      server_error: float32 ``(1 or w, L)`` for each leaf, what was lost when
        this worker quantized the mean of the chunk of ``L`` entries it serves.
    """

    worker_error: PyTree
    server_error: PyTree


def init_errors(params: PyTree, axis_name: str | None) -> ErrorFeedback:
    """Zero errors for a tree, see :class:`ErrorFeedback` for their shapes."""
    w = workers.axis_size(axis_name)

    def worker(p: Any) -> jax.Array:
        return workers.worker_zeros_like(p, axis_name)

    def server(p: Any) -> jax.Array:
        length = workers.chunk_length(math.prod(jnp.shape(p)), w)
        return workers.worker_zeros(p, (length,), jnp.float32, axis_name)

    return ErrorFeedback(jax.tree.map(worker, params), jax.tree.map(server, params))


def compressed_allreduce(
    values: PyTree,
    errors: ErrorFeedback,
    axis_name: str | None,
    quantizer: SignQuantizer,
    divisors: PyTree | None = None,
    limit: Any = None,
) -> tuple[PyTree, ErrorFeedback, jax.Array, jax.Array]:
    """The 1-bit mean of each worker's values, with two-sided error feedback.

    Two payload collectives for the whole tree: an all_to_all that brings every
    worker's bits of a chunk to the worker that serves it, and an all_gather of
    the re-quantized means (Tang et al. 2021, arXiv 2102.02888, compressed allreduce).
    Both carry one uint32 buffer of sign words and bitcast scales.

    Args:
      values: pytree of local float arrays.
      errors: the state from :func:`init_errors` or the last call.
      axis_name: bound mesh axis, or None for one worker.
      quantizer: how to quantize.
      divisors: positive arrays like ``values``, the same on every worker, by
        which values are divided for quantization. Default: none.
      limit: largest magnitude of a mean, in units of its divisor. What is above
        it is dropped, not put into the error, where it would pile up. Default:
        none.

    Returns:
      The means in float32, bit-identical on all workers; the new errors; and
      two values that are the same on all workers: whether all was finite (if
      not, the errors are the old ones and the means are not to be used), and
      the share of blocks, of those that are not all zero, that were cut to the
      limit, float32 ``()``.
    """
    if not isinstance(quantizer, SignQuantizer):
        raise TypeError(f"quantizer must be a SignQuantizer, found {quantizer!r}")
    treedef: Any
    leaves, treedef = jax.tree.flatten(values)
    worker_errors = treedef.flatten_up_to(errors.worker_error)
    server_errors = treedef.flatten_up_to(errors.server_error)
    divs = [None] * len(leaves) if divisors is None else treedef.flatten_up_to(divisors)
    finite, cut = jnp.bool_(True), jnp.float32(0)
    # Leaves that share a buffer get one type, so those sharded over other axes
    # need a buffer of their own; without such axes there is one group.
    groups: dict[frozenset, list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(workers.varying_axes(x), []).append(i)
    for group in groups.values():
        pick = lambda items, group=group: [items[i] for i in group]
        means, new_worker, new_server, group_finite, group_cut = _one_buffer_mean(
            pick(leaves), pick(worker_errors), pick(server_errors), pick(divs),
            axis_name, quantizer, limit,
        )
        finite, cut = finite & group_finite, jnp.maximum(cut, group_cut)
        for i, *result in zip(group, means, new_worker, new_server, strict=True):
            leaves[i], worker_errors[i], server_errors[i] = result
    # A bad number in another group skips this one too.
    hold = lambda new, old: jnp.where(finite, new, old)
    new_errors = ErrorFeedback(
        jax.tree.map(hold, treedef.unflatten(worker_errors), errors.worker_error),
        jax.tree.map(hold, treedef.unflatten(server_errors), errors.server_error),
    )
    return treedef.unflatten(leaves), new_errors, finite, cut


def _one_buffer_mean(
    leaves: list[jax.Array],
    worker_errors: list[jax.Array],
    server_errors: list[jax.Array],
    divs: list[jax.Array | None],
    axis_name: str | None,
    quantizer: SignQuantizer,
    limit: Any,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], jax.Array, jax.Array]:
    """:func:`compressed_allreduce` of lists; its errors may not be finite."""
    w = workers.bound_axis_size(axis_name)
    rank = 0 if axis_name is None else lax.axis_index(axis_name)
    lengths = [workers.chunk_length(x.size, w) for x in leaves]
    counts = [
        jnp.asarray([min(max(x.size - r * length, 0), length) for r in range(w)], jnp.int32)
        for x, length in zip(leaves, lengths, strict=True)
    ]
    for length, error in zip(lengths, server_errors, strict=True):
        if error.shape != (1, length):
            raise workers.wrong_worker_count(
                "compressed mean",
                f"a server error has local shape {error.shape}, {w} workers need {(1, length)}",
            )

    # Worker: quantize value + error, chunk r is for worker r.
    compensated = [x.astype(jnp.float32) + e[0] for x, e in zip(leaves, worker_errors, strict=True)]
    chunk_divs = [
        None if d is None else _to_chunks(d, w, length, fill=1)
        for d, length in zip(divs, lengths, strict=True)
    ]
    sent = [
        quantizer.encode(_to_chunks(c, w, length), divisor=d, count=count)
        for c, d, count, length in zip(compensated, chunk_divs, counts, lengths, strict=True)
    ]
    received = _exchange_chunks(sent, axis_name)

    # Server: the mean of my chunk plus what I lost last time, quantized again.
    answers, served, my_counts, my_divs = [], [], [], []
    for got, error, d, count, length in zip(
        received, server_errors, chunk_divs, counts, lengths, strict=True
    ):
        my_div = None if d is None else lax.dynamic_index_in_dim(d, rank, keepdims=False)
        my_count = count[rank]
        mean = _sum_decoded(got, quantizer, length) / w
        mean = mean + (error[0] if my_div is None else error[0] / my_div)
        mean = jnp.where(jnp.arange(length) < my_count, mean, 0.0)
        served.append(mean)
        my_counts.append(my_count)
        my_divs.append(my_div)
        answers.append(_limited(quantizer.encode(mean, count=my_count), limit))
    gathered = _gather_answers(answers, axis_name)

    # A NaN or Inf anywhere in a block makes its scale one, and everybody has all
    # scales: no further collective is needed to agree.
    scales = [answer.scales for answer in gathered]
    finite = workers.all_agree([jnp.all(jnp.isfinite(s)) for s in scales])
    cut = jnp.float32(0) if limit is None else _share_of_blocks(scales, limit)

    means, new_worker, new_server = [], [], []
    for i, x in enumerate(leaves):
        d, length = chunk_divs[i], lengths[i]
        mean = quantizer.decode(*gathered[i], length, divisor=d)
        means.append(_from_chunks(mean, x))
        own = quantizer.quantized(_to_chunks(compensated[i], w, length), sent[i].scales, d)
        own = _from_chunks(own, x)
        new_worker.append((compensated[i] - own)[None])
        lost = served[i] - quantizer.quantized(served[i], answers[i].scales, None)
        if limit is not None:
            lost = jnp.clip(lost, -limit, limit)
        my_div = my_divs[i]
        lost = lost if my_div is None else lost * my_div
        new_server.append(jnp.where(jnp.arange(length) < my_counts[i], lost, 0.0)[None])
    return means, new_worker, new_server, finite, cut


def _sum_decoded(got: Encoded, quantizer: SignQuantizer, length: int) -> jax.Array:
    """Sum over the leading worker axis: unrolled, which XLA fuses, unless long."""
    rows = len(got.words)
    decode = lambda words, scales: quantizer.decode(words, scales, length)
    total = decode(got.words[0], got.scales[0])
    if rows <= UNROLLED_WORKERS:
        for i in range(1, rows):
            total = total + decode(got.words[i], got.scales[i])
        return total
    rest = (got.words[1:], got.scales[1:])
    return lax.scan(lambda sum_, row: (sum_ + decode(*row), None), total, rest)[0]


def _share_of_blocks(scales: list[jax.Array], limit: Any) -> jax.Array:
    """Share of the blocks in use whose scale is at the limit, the largest of all shards."""
    together = jnp.concatenate([s.reshape(-1) for s in scales]) if scales else jnp.zeros(0)
    share = jnp.sum(together >= limit, dtype=jnp.int32) / jnp.maximum(
        jnp.sum(together > 0, dtype=jnp.int32), 1
    )
    axes = tuple(sorted(workers.varying_axes(share)))
    return lax.pmax(share, axes) if axes else share


def _limited(encoded: Encoded, limit: Any) -> Encoded:
    if limit is None:
        return encoded
    scales = encoded.scales
    # An infinite scale must stay one: it tells everybody to skip the round.
    return Encoded(encoded.words, jnp.where(jnp.isinf(scales), scales, jnp.minimum(scales, limit)))


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
    words = 0
    for p in jax.tree.leaves(params):
        length = workers.chunk_length(math.prod(jnp.shape(p)), w)
        words += length // 32 + quantizer.blocks_for(length)
    return 2 * (w - 1) * words * 4


def exact_round_bytes(params: PyTree, w: int, wire_dtype: Any = None) -> int:
    """Bytes each of ``w`` workers sends in one exact round of the tree.

    A ring all-reduce sends ``2 (w - 1) / w`` of the array from each worker.
    """
    sizes = [math.prod(jnp.shape(p)) for p in jax.tree.leaves(params)]
    if wire_dtype is None:
        return 2 * (w - 1) * sum(sizes) * 4 // w
    return 2 * (w - 1) * sum(-(-n // w) for n in sizes) * jnp.dtype(wire_dtype).itemsize


def _to_chunks(x: jax.Array, w: int, length: int, fill: float = 0) -> jax.Array:
    """``(*shape)`` to ``(w, length)``, padded at the end."""
    flat = workers.unshard(x).reshape(-1)
    if flat.size != w * length:
        flat = jnp.pad(flat, (0, w * length - flat.size), constant_values=fill)
    return flat.reshape(w, length)


def _from_chunks(chunks: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of :func:`_to_chunks`, with the sharding of ``like``."""
    x = chunks.reshape(-1)[: like.size].reshape(like.shape)
    return workers.reshard_like(x, like)


def _exchange_chunks(sent: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Row r of every leaf to worker r; returns row i from worker i."""
    if axis_name is None:
        return sent
    payload = jnp.concatenate([_to_payload(e) for e in sent], axis=1) if sent else None
    if payload is None or payload.size == 0:
        return sent
    payload = lax.all_to_all(payload, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return _from_payload(payload, sent)


def _gather_answers(answers: list[Encoded], axis_name: str | None) -> list[Encoded]:
    """Every worker's chunk to everybody: adds a leading worker axis."""
    rows = [Encoded(e.words[None], e.scales[None]) for e in answers]
    if axis_name is None or not rows:
        return rows
    payload = jnp.concatenate([_to_payload(e) for e in rows], axis=1)
    if payload.size == 0:
        w = lax.axis_size(axis_name)
        return [Encoded(*(jnp.broadcast_to(a, (w, 0)) for a in e)) for e in rows]
    return _from_payload(_all_gather(payload[0], axis_name), rows)


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
        [_to_chunks(x.astype(wire), w, n) for x, n in zip(leaves, lengths, strict=True)], axis=1
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
        result.append(_from_chunks(means[:, start : start + n], x))
        start += n
    return result
