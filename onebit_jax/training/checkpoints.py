"""Checkpoints of a training state by Orbax: nothing lost, nothing mistaken for another.

Needs the extra ``checkpoints`` (orbax-checkpoint). The state is saved as any other by
Orbax; beside it goes a list of its leaves, with checksums, and the version of the format.
"""

import math
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from onebit_jax import workers
from onebit_jax.compression import feedback, marks
from onebit_jax.compression.chunks import is_direct
from onebit_jax.compression.feedback import ErrorFeedback
from onebit_jax.training import replicas

PyTree = Any

#: Version of the format; one more with each change that older code cannot read.
FORMAT = 1

#: Names of the two items in a checkpoint.
STATE, CONTENTS = "state", "contents"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names its folder."""


def items(state: PyTree) -> dict[str, ocp.args.CheckpointArgs]:
    """What to save of a training state, as items of an Orbax checkpoint.

    With an asynchronous ``CheckpointManager`` (the default) training may go on, and
    donate the state, as soon as ``save`` returns. With several processes all of them
    call this and ``save``, and write to a folder that all of them can see.

    Args:
      state: a pytree of arrays, such as a train step takes: parameters and optimizer
        state, with errors and all.

    Returns:
      Arguments for ``orbax.checkpoint.args.Composite``, to which you may add your own.

    Example: see :func:`restore`.
    """
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    sums = np.asarray(replicas.checksums([leaf for _, leaf in leaves])).tolist()
    contents = {
        "format": FORMAT,
        "workers": _worker_count(state),
        "leaves": {
            jax.tree_util.keystr(path): [list(np.shape(leaf)), str(leaf.dtype), total]
            for (path, leaf), total in zip(leaves, sums, strict=True)
        },
    }
    # Orbax does not take arrays without entries.
    kept = treedef.unflatten([leaf if np.size(leaf) else None for _, leaf in leaves])
    return {
        STATE: ocp.args.StandardSave(marks.plain(kept)),
        CONTENTS: ocp.args.JsonSave(contents),
    }


def restore(
    manager: ocp.CheckpointManager, like: PyTree, step: int | None = None, *, resize: bool = False
) -> PyTree:
    """Restores a training state that was saved by way of :func:`items`.

    With as many workers as it was saved with, training goes on as if it had never
    stopped, to the last bit.

    Args:
      manager: of the folder of the checkpoints.
      like: a state of the same structure, whose values do not matter: arrays where the
        restored ones are to be, as ``TrainStep.place`` puts them.
      step: which checkpoint; default: the latest complete one.
      resize: convert a state of another number of workers by ``resize_workers``. Then
        each process reads all of it.

    Returns:
      The state, its arrays sharded as those of ``like``.

    Raises:
      FileNotFoundError: if there is no complete checkpoint, or not that one.
      CheckpointError: if it cannot be read, is damaged, has a later format, is not of
        such a state, or (without ``resize``) of another number of workers.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, onebit_jax
      >>> import orbax.checkpoint as ocp
      >>> from onebit_jax import checkpoints
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> tx = onebit_jax.onebit_adam(0.1, "data")
      >>> train_step = onebit_jax.make_train_step(lambda p, x: jnp.mean(x @ p), tx, mesh)
      >>> with jax.set_mesh(mesh):
      ...     state = train_step.place((jnp.zeros(1), tx.init(jnp.zeros(1))))
      >>> state, _ = train_step(state, jnp.ones((4, 1)))
      >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
      ...     _ = manager.save(1, args=ocp.args.Composite(**checkpoints.items(state)))
      ...     manager.wait_until_finished()
      ...     restored = checkpoints.restore(manager, like=state)
      >>> bool((restored[0] == state[0]).all())
      True
    """
    if step is None:
        step = manager.latest_step()
    if step is None or step not in manager.all_steps():
        which = "" if step is None else f" of step {step}"
        raise FileNotFoundError(
            f"no complete checkpoint{which} in {manager.directory}, found those of steps "
            f"{list(manager.all_steps())}"
        )
    folder = f"{manager.directory}/{step}"
    contents = _read_contents(manager, step, folder)
    saved, wanted = contents["workers"], _worker_count(like)
    same_size = saved == wanted or None in (saved, wanted)
    if not same_size and not resize:
        raise CheckpointError(
            f"{folder}: the checkpoint is of {saved} workers, the state to restore of {wanted}. "
            "Convert it with onebit_jax.resize_workers; restore(..., resize=True) does it"
        )
    then = like if same_size else _as_of(like, saved)
    targets, treedef = _targets(then, contents["leaves"], folder, same_size)
    state = _read_state(manager, step, targets, treedef, contents["leaves"], folder)
    if same_size or wanted is None:
        return state
    place = lambda value, there: (
        workers.put(value, there.sharding) if getattr(there, "sharding", None) else value
    )
    return jax.tree.map(place, feedback.resize_workers(state, wanted), like)


def _worker_count(state: PyTree) -> int | None:
    """Workers that a state is for; None if nothing in it tells."""
    counts = {np.shape(leaf)[0] for leaf in feedback.per_worker_leaves(state)}
    if len(counts) > 1:
        raise workers.wrong_worker_count("the state", f"its leaves are for {sorted(counts)}")
    return counts.pop() if counts else None


def _read_contents(manager: ocp.CheckpointManager, step: int, folder: str) -> dict[str, Any]:
    path = f"{folder}/{CONTENTS}"
    contents = _read(manager, step, CONTENTS, ocp.args.JsonRestore(), path)
    found: Any = contents.get("format") if isinstance(contents, dict) else None
    if not workers.is_count(found):
        raise CheckpointError(f"{path}: says no version of its format, found {found!r}")
    if found > FORMAT:
        raise CheckpointError(
            f"{path}: has format {found}, this version of onebit_jax reads up to {FORMAT}. Update "
            "onebit_jax"
        )
    count, leaves = contents.get("workers"), contents.get("leaves")
    well_formed = (count is None or workers.is_count(count)) and isinstance(leaves, dict)
    if not well_formed or not all(map(_is_entry, leaves.values())):
        raise CheckpointError(f"{path}: is damaged, it does not list the leaves of a state")
    return contents


def _is_entry(entry: Any) -> bool:
    match entry:
        case [list(shape), str(), int()]:
            return all(workers.is_count(n, 0) for n in shape)
    return False


def _read(manager: ocp.CheckpointManager, step: int, item: str, args: Any, path: str) -> Any:
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except Exception as error:  # of many libraries; whichever it is, say where
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise CheckpointError(
            f"{path}: cannot be read. It is damaged, or was not saved with "
            f"onebit_jax.checkpoints.items: {reason}"
        ) from error


def _as_of(like: PyTree, size: int) -> PyTree:
    """``like`` in the structure of a state of so many workers, which may have no server."""

    def errors(node: Any) -> Any:
        if not isinstance(node, ErrorFeedback):
            return node
        none = is_direct(size)
        server = jax.tree.map(lambda leaf: None if none else leaf, node.worker_error)
        return node._replace(server_error=server)

    return jax.tree.map(errors, like, is_leaf=lambda x: isinstance(x, ErrorFeedback))


def _targets(
    like: PyTree, listed: dict[str, list], folder: str, same_size: bool
) -> tuple[list[Any], Any]:
    """What to restore each leaf to; leaves of another size become NumPy arrays."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    if set(names) != set(listed):
        missing, unknown = sorted(set(names) - set(listed)), sorted(set(listed) - set(names))
        raise CheckpointError(
            f"{folder}: is not of such a state. It lacks {missing or 'nothing'} and has besides "
            f"{unknown or 'nothing'}. Restore it with the same model and optimizer"
        )

    def target(name: str, path: tuple, leaf: Any) -> Any:
        shape, dtype, _ = listed[name]
        resized = not same_size and feedback.is_per_worker(path)
        if str(leaf.dtype) != dtype or not (resized or list(np.shape(leaf)) == shape):
            raise CheckpointError(
                f"{folder}: {name} is {dtype}{shape} there, and {leaf.dtype}{list(leaf.shape)} in "
                "the state to restore. Restore it with the same model and optimizer"
            )
        if not math.prod(shape) and not resized:
            return leaf
        if resized or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return np.broadcast_to(np.zeros((), leaf.dtype), shape)  # takes no memory
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    pairs = zip(names, leaves, strict=True)
    return [target(name, path, leaf) for name, (path, leaf) in pairs], treedef


def _read_state(
    manager: ocp.CheckpointManager, step: int, targets: list[Any], treedef: Any,
    listed: dict[str, list], folder: str,
) -> PyTree:
    path = f"{folder}/{STATE}"
    kept = treedef.unflatten([t if math.prod(t.shape) else None for t in targets])
    args = ocp.args.StandardRestore(marks.plain(kept))
    restored = _read(manager, step, STATE, args, path)
    as_saved: Any = jax.tree.structure(marks.plain(treedef.unflatten(targets)))
    values = [
        target if value is None else value
        for value, target in zip(as_saved.flatten_up_to(restored), targets, strict=True)
    ]
    state = treedef.unflatten(values)
    sums = np.asarray(replicas.checksums(values)).tolist()
    named = jax.tree_util.tree_leaves_with_path(state)
    for (where, _), found in zip(named, sums, strict=True):
        name = jax.tree_util.keystr(where)
        if found != listed[name][2]:
            raise CheckpointError(
                f"{path}: is damaged: {name} has checksum {found}, {listed[name][2]} was saved. "
                "Restore an earlier step"
            )
    return state
