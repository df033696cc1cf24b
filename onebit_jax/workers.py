"""What touches the mesh: axis sizes, per-worker values, agreement, checks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

PyTree = Any


def known_axes() -> str:
    """The axis names in reach, as words for an error message."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return ", ".join(repr(name) for name in names) if names else "none"


def _bound_size(axis_name: str | None) -> int | None:
    """Size of a bound axis, or None where it is not bound."""
    if axis_name is None:
        return None
    try:
        return lax.axis_size(axis_name)
    except NameError:
        return None


def bound_axis_size(axis_name: str | None) -> int:
    """Number of workers on an axis bound by ``shard_map``, ``pmap`` or ``vmap``.

    Raises:
      ValueError: if the axis is not bound here.
    """
    if axis_name is None:
        return 1
    size = _bound_size(axis_name)
    if size is None:
        raise _unbound(f"axis_name={axis_name!r}")
    return size


def _unbound(what: str) -> ValueError:
    return ValueError(
        f"{what} is not bound here (mesh axes in reach: {known_axes()}). Call update inside "
        "jax.shard_map or jax.pmap over that axis, or build the train step with "
        "onebit_jax.make_train_step; axis_name=None is the optimizer of a single worker."
    )


def axis_size(axis_name: str | None) -> int:
    """Number of workers: that of the bound axis, else of the ambient mesh.

    Raises:
      ValueError: if neither knows the axis.
    """
    if axis_name is None:
        return 1
    size = _bound_size(axis_name)
    if size is not None:
        return size
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name in mesh.axis_names:
        return mesh.shape[axis_name]
    raise ValueError(
        f"no size is known for axis_name={axis_name!r} (mesh axes in reach: {known_axes()}). "
        "Call init inside jax.shard_map or jax.pmap over that axis, or outside "
        "under `with jax.set_mesh(mesh):`; axis_name=None is the optimizer of a "
        "single worker."
    )


def varying_axes(x: Any) -> frozenset:
    """Mesh axes over which the type of ``x`` says that it varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def tracks_axis(axis_name: str | None) -> bool:
    """Whether types say what varies over the axis (``check_vma=True``)."""
    return axis_name is not None and axis_name in varying_axes(lax.axis_index(axis_name))


def vary(x: jax.Array, axes: frozenset) -> jax.Array:
    """``x``, typed as varying over ``axes`` as well; free at run time."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def per_worker(tree: PyTree, axis_name: str) -> PyTree:
    """Marks values as each worker's own, so that their gradient stays local.

    Inside ``jax.shard_map`` with ``check_vma=True``, the gradient with respect
    to a replicated parameter is summed over the axis in full precision by
    JAX itself. Take the gradient of ``per_worker(params, axis_name)`` to get
    the local one. Costs nothing at run time; does nothing where types do not
    track the axis.

    Args:
      tree: a pytree of arrays, any shapes and dtypes.
      axis_name: the data-parallel axis.

    Returns:
      The same values, varying over ``axis_name``.

    Raises:
      ValueError: if the axis is not bound.

    Example: see ``examples/shard_map_by_hand.py``.
    """
    bound_axis_size(axis_name)
    if not tracks_axis(axis_name):
        return tree
    return jax.tree.map(lambda x: vary(jnp.asarray(x), frozenset({axis_name})), tree)


def worker_zeros(like: Any, shape: tuple[int, ...], dtype: Any, axis_name: str | None) -> jax.Array:
    """Zeros for a per-worker state leaf: ``(1 or w, *shape)``.

    Their type varies over the axis and over whatever ``like`` varies over, as
    ``lax.cond`` and ``lax.scan`` ask of values that are updated later.
    """
    if _bound_size(axis_name) is None:
        return jnp.zeros((axis_size(axis_name), *shape), dtype)
    zeros = jnp.zeros((1, *shape), dtype)
    if not tracks_axis(axis_name):
        return zeros
    return vary(zeros, varying_axes(like) | {axis_name})


def worker_zeros_like(p: Any, dtype: Any, axis_name: str | None) -> jax.Array:
    """Zeros ``(1 or w, *p.shape)`` that keep an explicit sharding of ``p``."""
    zeros = worker_zeros(p, jnp.shape(p), dtype, axis_name)
    if _bound_size(axis_name) is not None or not _is_sharded(p):
        return zeros
    spec = jax.typeof(p).sharding.spec
    return jax.sharding.reshard(zeros, PartitionSpec(None, *spec))


def all_agree(flags: list[jax.Array]) -> jax.Array:
    """True where all flags are, along every mesh axis they vary over too.

    The shards of a model-parallel leaf must not decide differently; nothing
    is exchanged where types show no such axis.
    """
    if not flags:
        return jnp.bool_(True)
    # Without the barrier XLA makes a chain of n conjunctions of this and copies
    # it into the loop of every leaf: quadratic compile time.
    together = jnp.all(lax.optimization_barrier(jnp.stack(flags)))
    axes = tuple(sorted(varying_axes(together)))
    return lax.pmin(together.astype(jnp.int32), axes) > 0 if axes else together


def all_finite(arrays: list[jax.Array], largest: float = math.inf) -> jax.Array:
    """Whether no array holds a NaN or Inf; agreed on as by :func:`all_agree`.

    Nor anything of a magnitude above ``largest``.
    """

    def within(x: jax.Array) -> jax.Array:
        bound = min(largest, float(jnp.finfo(x.dtype).max))
        return jnp.max(jnp.abs(x), initial=0) <= bound  # of a NaN it is False

    return all_agree([within(x) for x in arrays])


def sum_over_shards(parts: list[jax.Array], axis_name: str | None) -> jax.Array:
    """Sum of the leaves' scalars, added up over the axes that shard a leaf.

    The data-parallel axis ``axis_name`` is left alone.
    """
    total = jnp.float32(0)
    for part in parts:
        axes = tuple(sorted(varying_axes(part) - {axis_name}))
        total = total + (lax.psum(part, axes) if axes else part)
    return total


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an int, and no bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_sharded(x: jax.Array) -> bool:
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def unshard(x: jax.Array) -> jax.Array:
    """Replicates an explicitly sharded array, which JAX refuses to flatten."""
    return jax.sharding.reshard(x, PartitionSpec()) if _is_sharded(x) else x


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes :func:`unshard`."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding) if _is_sharded(like) else x


def is_global(leaf: Any) -> bool:
    """Whether it is an array of which other processes hold parts."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def put(leaf: Any, sharding: Any) -> jax.Array:
    """An array on a mesh, from one there or one that every process has as a whole."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() == 1 or is_global(leaf):
        return jax.device_put(leaf, sharding)
    # Every process keeps its part.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def check_updates(updates: PyTree, axis_name: str | None) -> None:
    """Refuses gradients that the compressed mean cannot take.

    Raises:
      ValueError: for an unbound axis, or gradients already reduced over it.
      TypeError: for integer, boolean or complex gradients.
    """
    bound_axis_size(axis_name)
    tracked = tracks_axis(axis_name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path) or "the gradient"
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {dtype}: gradients must be real floating-point arrays. "
                "Split complex parameters into real and imaginary parts, and keep "
                "integers out of the differentiated tree."
            )
        if tracked and axis_name not in varying_axes(leaf):
            raise ValueError(
                f"the gradient {name} is already reduced over axis {axis_name!r}: its type "
                f"({jax.typeof(leaf)}) does not vary over it. In shard_map with "
                "check_vma=True, jax.grad of a replicated parameter sums over the axis in "
                "full precision. Take the gradient of "
                f"onebit_jax.per_worker(params, {axis_name!r}) instead, and do not call "
                "lax.pmean on it."
            )


def check_tree(updates: PyTree, worker_tree: PyTree, what: str) -> None:
    """Refuses updates that differ from the tree that ``init`` saw.

    ``worker_tree`` holds per-worker arrays, ``(1, *shape)`` for each leaf.

    Raises:
      ValueError: if structure, shapes or the number of workers differ.
    """
    found: Any = jax.tree.structure(updates)
    expected: Any = jax.tree.structure(worker_tree)
    if found != expected:
        raise ValueError(
            f"{what}: the tree of the updates differs from the parameters given to init.\n"
            f"found:    {found}\nexpected: {expected}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, leaf), held in zip(leaves, jax.tree.leaves(worker_tree), strict=True):
        name = jax.tree_util.keystr(path) or "the leaf"
        if held.shape[1:] != jnp.shape(leaf):
            raise ValueError(
                f"{what}: {name} has shape {jnp.shape(leaf)}, but init saw {held.shape[1:]}"
            )
        check_worker_axis(held, what)


def check_worker_axis(held: jax.Array, what: str) -> None:
    """Refuses a per-worker array of other than this one worker.

    Raises:
      ValueError: naming ``resize_workers``.
    """
    if held.shape[0] != 1:
        if not jax.sharding.get_abstract_mesh().manual_axes:
            raise _unbound(f"{what}: the axis of the workers")
        raise wrong_worker_count(what, f"it holds {held.shape[0]} workers' share on this worker")


def wrong_worker_count(what: str, found: str) -> ValueError:
    """The error for a state of another number of workers."""
    return ValueError(
        f"{what}: the state belongs to another number of workers ({found}). Inside "
        "shard_map, per-worker state must be sharded over the data axis "
        "(onebit_jax.state_specs); to go on with more or fewer workers, convert the "
        "state with onebit_jax.resize_workers."
    )
