"""Error feedback as state: what it holds, how it is sharded, other numbers of workers."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from onebit_jax import workers
from onebit_jax.compression import marks
from onebit_jax.compression.chunks import chunk_length, is_direct

PyTree = Any

@marks.state_class(own=("worker_error", "server_error"))
class ErrorFeedback(NamedTuple):
    """What compression has left over and adds to the next round.

    Attributes:
      worker_error: ``(1 or w, *leaf.shape)`` for each leaf, what this worker's own
        quantization lost; float32 or bfloat16.
      server_error: ``(1 or w, L)`` for each leaf, what was lost when this worker
        quantized the mean of the chunk of ``L`` entries it serves; of the same
        dtype. None for one or two workers, which need no server.
    """

    worker_error: PyTree
    server_error: PyTree


def init_errors(params: PyTree, axis_name: str | None, dtype: Any = None) -> ErrorFeedback:
    """Zero errors for a tree, see :class:`ErrorFeedback` for their shapes.

    Raises:
      ValueError: for a ``dtype`` other than None (float32), float32 and bfloat16.
    """
    dtype = jnp.dtype(dtype or jnp.float32)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"error_dtype must be float32 or bfloat16, found {dtype}")
    w = workers.axis_size(axis_name)

    def worker(p: Any) -> jax.Array:
        return workers.worker_zeros_like(p, dtype, axis_name)

    def server(p: Any) -> jax.Array | None:
        if is_direct(w):
            return None
        length = chunk_length(math.prod(jnp.shape(p)), w)
        return workers.worker_zeros(p, (length,), dtype, axis_name)

    return ErrorFeedback(jax.tree.map(worker, params), jax.tree.map(server, params))


def is_per_worker(path: tuple) -> bool:
    """Whether the leaf of a state at this path has a leading worker axis."""
    return marks.marked(path, marks.OWN) is not None


def per_worker_leaves(state: PyTree) -> list[Any]:
    """The leaves of a state that have a leading worker axis."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in leaves if is_per_worker(path)]


def shared_leaves(state: PyTree) -> list[tuple[tuple, Any]]:
    """The other leaves of a state, with their paths: the same on all workers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(path, leaf) for path, leaf in leaves if not is_per_worker(path)]


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
        field = marks.marked(path, marks.OWN)
        if treedef is None or jax.tree.structure(node) != treedef:
            return PartitionSpec(axis_name) if field else PartitionSpec()
        spans = marks.marked(path, marks.SPANS) is not None
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
      A state as for ``new_size`` workers; only the per-worker leaves differ, and
      are NumPy arrays of the same dtypes.

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

    is_errors = lambda x: isinstance(x, ErrorFeedback) or marks.class_of(x) is ErrorFeedback

    # In NumPy: the old and the new sharding do not mix.
    def resize(path: tuple, node: Any) -> Any:
        if isinstance(node, ErrorFeedback):
            return _resize_errors(node, new_size)
        if is_errors(node):
            return marks.as_mapping(_resize_errors(marks.as_tuple(node), new_size), node)
        field = marks.marked(path, marks.OWN)
        if field is None:
            return node
        held = np.asarray(node)
        return np.repeat(held[:1] if field == "sent" else _mean(held), new_size, axis=0)

    return jax.tree_util.tree_map_with_path(resize, state, is_leaf=is_errors)


def _resize_errors(errors: ErrorFeedback, new_size: int) -> ErrorFeedback:
    treedef: Any
    worker_errors, treedef = jax.tree.flatten(errors.worker_error)
    server_errors = treedef.flatten_up_to(errors.server_error)

    def resize(worker: Any, server: Any) -> tuple[np.ndarray, np.ndarray | None]:
        mean = _mean(np.asarray(worker))
        n = mean.size
        lost = np.zeros(n, mean.dtype) if server is None else np.asarray(server).reshape(-1)[:n]
        if is_direct(new_size):
            # Without servers the workers carry what these had lost.
            return np.repeat(mean + lost.reshape(mean.shape), new_size, axis=0), None
        length = chunk_length(n, new_size)
        chunks = np.pad(lost, (0, new_size * length - n)).reshape(new_size, length)
        return np.repeat(mean, new_size, axis=0), chunks

    pairs = [resize(*pair) for pair in zip(worker_errors, server_errors, strict=True)]
    return ErrorFeedback(
        *(treedef.unflatten([pair[i] for pair in pairs]) for i in range(2))
    )


def _mean(held: np.ndarray) -> np.ndarray:
    """Mean over the workers, ``(1, ...)``, of the same dtype."""
    return held.mean(axis=0, keepdims=True, dtype=np.float32).astype(held.dtype)
