"""What touches the mesh: axis sizes, per-worker values, specs, resizing."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from onebit_jax import packing

PyTree = Any

#: State fields whose arrays differ from worker to worker. Each has a leading
#: worker axis: size 1 inside ``shard_map``, the number of workers outside. They
#: are told by name: parameters kept in a NamedTuple or dataclass (not a dict) must
#: not have fields of these names.
PER_WORKER_FIELDS = frozenset({"worker_error", "server_error", "worker_sum", "sent"})

#: State field whose arrays are flat, a value for some entries of a leaf each.
SPANS_FIELD = "nu_spans"


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


def worker_zeros_like(p: Any, axis_name: str | None) -> jax.Array:
    """Float32 zeros ``(1 or w, *p.shape)`` that keep an explicit sharding of ``p``."""
    zeros = worker_zeros(p, jnp.shape(p), jnp.float32, axis_name)
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


def all_finite(arrays: list[jax.Array]) -> jax.Array:
    """Whether no array holds a NaN or Inf; agreed on as by :func:`all_agree`."""
    # A finite sum proves it five times as fast; only where there is none are
    # the entries looked at, as finite ones may add up to infinity.
    sums = all_agree([jnp.isfinite(jnp.sum(x)) for x in arrays])
    entries = lambda: all_agree([jnp.all(jnp.isfinite(x)) for x in arrays])
    return sums if not arrays else lax.cond(sums, lambda: sums, entries)


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


def is_direct(workers: int) -> bool:
    """Whether workers send all their bits to each other, without servers between.

    For two workers that is as many bytes as with servers, in one phase.
    """
    return workers <= 2


def chunk_length(n: int, workers: int) -> int:
    """Entries of each of ``workers`` equal chunks of a leaf of ``n``.

    Whole tiles where that adds at most 1/64, else whole words.
    """
    unit = packing.TILE if n >= 64 * packing.TILE * workers else packing.WORD_BITS
    return unit * -(-n // (unit * workers))


def served_length(n: int, workers: int) -> int:
    """Entries of a leaf of ``n`` for which each worker keeps a server error."""
    return 0 if is_direct(workers) else chunk_length(n, workers)


def _is_sharded(x: jax.Array) -> bool:
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def unshard(x: jax.Array) -> jax.Array:
    """Replicates an explicitly sharded array, which JAX refuses to flatten."""
    return jax.sharding.reshard(x, PartitionSpec()) if _is_sharded(x) else x


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes :func:`unshard`."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding) if _is_sharded(like) else x


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


def _field(path: tuple) -> str | None:
    """The per-worker field of a state that a path runs through, if any."""
    for key in path:
        # DictKey has no name: a parameter in a dict may be called anything.
        name = getattr(key, "name", None)
        if name in PER_WORKER_FIELDS:
            return name
    return None


def per_worker_leaves(state: PyTree) -> list[Any]:
    """The leaves of a state that have a leading worker axis."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in leaves if _field(path)]


def state_specs(state: PyTree, axis_name: str, param_specs: PyTree | None = None) -> PyTree:
    """PartitionSpecs of a training state, for ``shard_map``, ``jit`` and Orbax.

    Args:
      state: an optimizer state, or any pytree around one (parameters, a Flax
        ``TrainState``); arrays or ``ShapeDtypeStruct``.
      axis_name: the data-parallel axis.
      param_specs: specs of the parameters where they are sharded over other
        axes, a pytree of PartitionSpecs with the structure of the parameters.
        Default: everything but the per-worker leaves is replicated.

    Returns:
      A pytree of the structure of ``state``: ``P(axis_name)`` for per-worker
      leaves, ``P()`` (or the parameter's spec) for the others.

    Raises:
      ValueError: if ``param_specs`` is a single spec and not a container.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.compressed_mean("data")
      >>> with jax.set_mesh(jax.make_mesh((4,), ("data",))):
      ...     state = tx.init(jnp.zeros(10))
      >>> onebit_jax.state_specs(state, "data").errors.worker_error == jax.P("data")
      True
    """
    treedef: Any = None
    if param_specs is not None:
        is_spec = lambda x: isinstance(x, PartitionSpec)
        treedef = jax.tree.structure(param_specs, is_leaf=is_spec)
        if jax.tree_util.treedef_is_leaf(treedef):
            raise ValueError("param_specs must be a container of PartitionSpecs, found one leaf")

    def spec(path: tuple, node: Any) -> Any:
        field = _field(path)
        if treedef is None or jax.tree.structure(node) != treedef:
            return PartitionSpec(axis_name) if field else PartitionSpec()
        spans = any(getattr(key, "name", None) == SPANS_FIELD for key in path)
        if field is None and not spans:
            return param_specs

        def lead(leaf_spec: PartitionSpec) -> PartitionSpec:
            if field not in (None, "server_error"):
                return PartitionSpec(axis_name, *leaf_spec)
            # These are flat: one chunk for each model shard.
            names = [n for n in leaf_spec if n is not None]
            flat = [a for n in names for a in (n if isinstance(n, tuple) else (n,))]
            lead_axes = (axis_name,) if field else ()
            return PartitionSpec(*lead_axes, tuple(flat) or None)

        return jax.tree.map(lead, param_specs, is_leaf=is_spec)

    matches = lambda node: treedef is not None and jax.tree.structure(node) == treedef
    return jax.tree_util.tree_map_with_path(spec, state, is_leaf=matches)


def resize_workers(state: PyTree, new_size: int) -> PyTree:
    """Converts a state to another number of workers without losing error.

    The averaged signal sees only the mean of the worker errors and the
    concatenated server error, so every new worker gets the old mean and the
    server error is cut anew, or added to the worker errors where one or two
    workers need no server. Open sums of ``accumulate`` keep their mean too.

    Args:
      state: optimizer state or a pytree around one, with global arrays (leading
        axis of per-worker leaves = old number of workers), all of them in reach
        of this process, not model-parallel.
      new_size: the new number of workers.

    Returns:
      The same structure; only the per-worker leaves differ, and are NumPy
      arrays of the same dtypes.

    Raises:
      ValueError: if ``new_size`` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, "data")
      >>> with jax.set_mesh(jax.make_mesh((4,), ("data",))):
      ...     state = tx.init(jnp.zeros(10))
      >>> resized = onebit_jax.resize_workers(state, 2)
      >>> resized[0].errors.worker_error.shape
      (2, 10)
    """
    if new_size < 1:
        raise ValueError(f"new_size must be at least 1, found {new_size}")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves_at = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if _field(path)}

    def resize(path: tuple, leaf: Any) -> Any:
        field = _field(path)
        if field is None:
            return leaf
        held = np.asarray(leaf)  # in NumPy: the old and the new sharding do not mix
        if field == "sent":
            return np.repeat(held[:1], new_size, axis=0)
        name = jax.tree_util.keystr(path)
        if field == "server_error":
            n = math.prod(leaves_at[name.replace(".server_error", ".worker_error")].shape[1:])
            length = served_length(n, new_size)
            flat = held.reshape(-1)[: n if length else 0]
            return np.pad(flat, (0, new_size * length - flat.size)).reshape(new_size, length)
        mean = held.mean(axis=0, keepdims=True)
        if field == "worker_error" and is_direct(new_size):
            # Without servers the workers carry what these had lost.
            server = np.asarray(leaves_at[name.replace(".worker_error", ".server_error")])
            if server.size:
                mean = mean + server.reshape(-1)[: mean.size].reshape(mean.shape)
        return np.repeat(mean, new_size, axis=0)

    return jax.tree.unflatten(treedef, [resize(path, leaf) for path, leaf in leaves])
