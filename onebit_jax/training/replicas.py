"""Whether all workers still hold the same bits: checksums of parameters and state."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onebit_jax import workers
from onebit_jax.compression import allreduce, feedback

PyTree = Any


def checksum(x: jax.Array) -> jax.Array:
    """A checksum of every bit and its place: uint32 ``()``; one flipped bit changes it.

    Each word is multiplied by an odd number, which no single power of two cancels
    modulo 2^32. Takes any shape, sharding and dtype.
    """
    words = _words(x)
    place = jnp.zeros((), jnp.uint32)
    for axis, length in enumerate(words.shape):
        iota = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * jnp.uint32(length) + iota
    # Knuth's multiplicative hash, so that neighbours get unlike factors.
    factors = (place * jnp.uint32(2654435769)) | jnp.uint32(1)
    return jnp.sum(words * factors, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of each entry as uint32, in one word or two on a last axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jax.dtypes.itemsize_bits(x.dtype) < 8:
        x = x.astype(jnp.float32)  # exact; less than a byte cannot be reinterpreted
    bits = 8 * x.dtype.itemsize
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def replica_fingerprint(tree: PyTree, axis_name: str | None) -> jax.Array:
    """Checksums of what every worker holds, to compare: one small collective.

    Runs inside ``shard_map`` or ``pmap``, for use every k steps. It is exact: a
    worker in which a single bit of a leaf is flipped has another checksum for it.
    See :func:`assert_replicas_equal` for use outside.

    Args:
      tree: a pytree of arrays that should be the same on all workers, such as
        parameters and optimizer state, of any shapes and dtypes. What is each
        worker's own in a state (errors, bytes sent) is left out.
      axis_name: the data-parallel axis, or None for one worker.

    Returns:
      uint32 ``(w, leaves)``, the same on all workers: row i is that of worker i,
      column j that of leaf j of those compared.

    Raises:
      ValueError: if the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> fingerprint = lambda x: onebit_jax.replica_fingerprint(x, "data")
      >>> rows = jax.shard_map(
      ...     fingerprint, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
      ... )(jnp.ones(5))
      >>> bool((rows[0] == rows[1]).all())
      True
    """
    workers.bound_axis_size(axis_name)
    sums = _stack([leaf for _, leaf in feedback.shared_leaves(tree)])
    if axis_name is None:
        return sums[None]
    if workers.tracks_axis(axis_name):
        sums = workers.vary(sums, frozenset({axis_name}))
    return allreduce.all_gather(sums, axis_name)


def checksums(leaves: list[jax.Array]) -> jax.Array:
    """Those of global arrays, sharded ones as if they were whole: uint32 ``(leaves,)``."""
    on_mesh = (s for s in map(_sharding, leaves) if isinstance(s, NamedSharding))
    first = next(on_mesh, None)
    return _stack_on(None if first is None else first.mesh)(leaves)


def _stack(leaves: list[jax.Array]) -> jax.Array:
    sums = [checksum(x) for x in leaves]
    return jnp.stack(sums) if sums else jnp.zeros(0, jnp.uint32)


@functools.cache
def _stack_on(mesh: Mesh | None) -> Callable:
    # Every process shall have all of them.
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(_stack, out_shardings=everywhere)


def _sharding(x: Any) -> Any:
    return getattr(x, "sharding", None)


def assert_replicas_equal(tree: PyTree, axis_name: str = "data") -> None:
    """Fails if workers hold different bits of what should be the same on all.

    For use outside ``shard_map``, on what a train step returned; with several
    processes all of them must call it. Reads all of ``tree`` once, and exchanges 4
    bytes per leaf.

    Args:
      tree: a pytree of arrays on a mesh. Leaves that are each worker's own, or
        sharded over ``axis_name``, are left out.
      axis_name: the data-parallel axis.

    Raises:
      AssertionError: naming the leaves and the workers that differ from most.
      ValueError: if a leaf is not on a mesh with that axis.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> replicated = jax.NamedSharding(mesh, jax.P())
      >>> onebit_jax.assert_replicas_equal(jax.device_put(jnp.ones(5), replicated))
    """
    shared, mesh = [], None
    for path, leaf in feedback.shared_leaves(tree):
        name = jax.tree_util.keystr(path) or "the array"
        sharding = _sharding(leaf)
        if not isinstance(sharding, NamedSharding) or axis_name not in sharding.mesh.axis_names:
            raise ValueError(
                f"assert_replicas_equal: {name} is not on a mesh with axis {axis_name!r}: its "
                f"sharding is {sharding}. Give it what a train step returned, or place it first."
            )
        if axis_name not in jax.tree.leaves(tuple(sharding.spec)):
            mesh = sharding.mesh
            shared.append((name, leaf, sharding.spec))
    if not shared:
        return
    compare = _comparison(mesh, axis_name, tuple(spec for *_, spec in shared))
    found = np.asarray(compare([leaf for _, leaf, _ in shared]))
    if wrong := _odd_ones(found):
        workers_in_all = found.shape[1]
        differ = "; ".join(
            f"{shared[leaf][0]} on worker {', '.join(map(str, odd))}" for leaf, odd in wrong.items()
        )
        raise AssertionError(
            f"the {workers_in_all} workers on axis {axis_name!r} hold different bits of what "
            f"should be the same. Different from most: {differ}. Go back to a checkpoint from "
            "before; look for faulty memory, and for updates that each worker computes from its "
            "own gradients."
        )


@functools.cache
def _comparison(mesh: Mesh, axis_name: str, specs: tuple[PartitionSpec, ...]) -> Callable:
    """Fingerprints ``(model shards, w, leaves)`` of arrays with these specs."""
    others = tuple(name for name in mesh.axis_names if name != axis_name)

    def compare(leaves: list[jax.Array]) -> jax.Array:
        rows = replica_fingerprint(leaves, axis_name)[None]
        for name in others:
            rows = allreduce.all_gather(rows, name).reshape(-1, *rows.shape[1:])
        return rows

    return jax.jit(
        jax.shard_map(
            compare, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def _odd_ones(found: np.ndarray) -> dict[int, list[int]]:
    """For each leaf that differs, the workers whose checksum is not the commonest."""
    wrong: dict[int, list[int]] = {}
    for leaf in np.flatnonzero((found != found[:, :1]).any(axis=(0, 1))):
        odd: set[int] = set()
        for shard in found[:, :, leaf]:
            most, _ = collections.Counter(shard.tolist()).most_common(1)[0]
            odd |= set(np.flatnonzero(shard != most).tolist())
        wrong[int(leaf)] = sorted(odd)
    return wrong
