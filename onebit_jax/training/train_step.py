"""The short road: a jitted data-parallel train step for a Flax model."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from onebit_jax import workers
from onebit_jax.compression import feedback
from onebit_jax.optimizers import means
from onebit_jax.optimizers.rounds import Rounds, rounds_in, skipped_rounds
from onebit_jax.optimizers.scaling import ScaleByOnebitAdamState
from onebit_jax.optimizers.wrappers import AccumulateState
from onebit_jax.training.watch import Outcome, Watch, outcome

PyTree = Any


class TrainStep:
    """A compiled data-parallel train step; made by :func:`make_train_step`."""

    def __init__(self, step: Callable, mesh: Mesh, axis_name: str, watch: Watch):
        self._step = jax.jit(step, donate_argnums=0)
        self._mesh = mesh
        self._axis_name = axis_name
        self._watch = watch
        self._shardings: dict[Any, list[NamedSharding]] = {}
        axis = mesh.axis_names.index(axis_name)
        rank = jax.process_index()
        mine = {i[axis] for i, d in np.ndenumerate(mesh.devices) if d.process_index == rank}
        self._workers_here = len(mine)

    def __call__(self, state: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Any:
        """One step: ``(state, metrics)``.

        Args:
          state: donated, so use the returned one. Put on the mesh if it is not
            there yet, see :meth:`place`.
          batch: pytree of arrays with a leading batch axis, cut into equal parts
            for the workers; with several processes, this process's part.
          rng: a key, folded with the worker's index, for a loss that takes one.

        Returns:
          The new state, and the metrics averaged over the workers, a dict of
          replicated arrays with at least ``"loss"``.

        Raises:
          ValueError: if the batch cannot be cut evenly, or as :meth:`place`.
          FloatingPointError: after ``max_consecutive_skips``.
          AssertionError: if a check of replicas finds a difference.
        """
        state = self.place(state)
        self._watch.before(state, _params_of(state))
        state, metrics, done = self._step(state, self._place_batch(batch), rng)
        if done is not None:
            self._watch.after(done)
        return state, metrics

    def lower(self, state: PyTree, batch: PyTree, rng: jax.Array | None = None) -> Any:
        """Lowers the step for these arguments, as ``jax.jit(...).lower`` does.

        The program has a third result, for what is watched.
        """
        return self._step.lower(self.place(state), self._place_batch(batch), rng)

    def place(self, state: PyTree) -> PyTree:
        """Puts a state on the mesh: per-worker leaves sharded, others replicated.

        Args:
          state: as the step takes it; with several processes the same on all.

        Returns:
          The same values as arrays over the mesh.

        Raises:
          ValueError: if the state is that of another number of workers, or
            differs between processes.
        """
        leaves, treedef = jax.tree.flatten(state)
        known = self._shardings.get(treedef)
        if known is not None and all(
            isinstance(x, jax.Array) and x.sharding == s
            for x, s in zip(leaves, known, strict=True)
        ):
            return state
        size = self._mesh.shape[self._axis_name]
        for leaf in feedback.per_worker_leaves(state):
            if leaf.shape[0] != size:
                raise workers.wrong_worker_count(
                    "make_train_step",
                    f"a leaf for {leaf.shape[0]} workers, the mesh axis "
                    f"{self._axis_name!r} has {size}",
                )
        specs = jax.tree.leaves(
            feedback.state_specs(state, self._axis_name),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        shardings = [
            NamedSharding(self._mesh, self._spec_as_returned(spec, np.ndim(leaf)))
            for spec, leaf in zip(specs, leaves, strict=True)
        ]
        if jax.process_count() > 1:
            _check_same_on_all_processes(leaves)
        placed = [workers.put(x, s) for x, s in zip(leaves, shardings, strict=True)]
        self._shardings[treedef] = shardings
        return jax.tree.unflatten(treedef, placed)

    def _spec_as_returned(self, spec: PartitionSpec, ndim: int) -> PartitionSpec:
        """The spec as the compiled step writes it, so that its results are in place already."""
        if AxisType.Explicit not in self._mesh.axis_types:
            return spec
        return PartitionSpec(*spec, *[None] * (ndim - len(spec)))

    def _place_batch(self, batch: PyTree) -> PyTree:
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis_name))

        def put(leaf: Any) -> jax.Array:
            everywhere = workers.is_global(leaf)
            parts = self._mesh.shape[self._axis_name] if everywhere else self._workers_here
            shape = np.shape(leaf)
            if not shape or shape[0] % parts:
                raise ValueError(
                    f"the batch must have a leading axis that {parts} workers can share "
                    f"equally, found a leaf of shape {shape}"
                )
            if everywhere or jax.process_count() == 1:
                return jax.device_put(leaf, sharding)
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

        return jax.tree.map(put, batch)


def _check_same_on_all_processes(leaves: list[Any]) -> None:
    """Refuses initial states that differ, from other seeds or checkpoints."""
    checksum = 0
    for leaf in leaves:
        if not workers.is_global(leaf):
            checksum = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), checksum)
    checksums = multihost_utils.process_allgather(np.uint32(checksum))
    if len(set(checksums.tolist())) > 1:
        raise ValueError(
            "make_train_step: the processes hold different states "
            f"(checksums {checksums.tolist()}). Initialise all of them with the same seed, "
            "or restore the same checkpoint in all."
        )


def make_train_step(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str = "data",
    *,
    has_aux: bool = False,
    mutable: str | None = None,
    max_consecutive_skips: int | None = None,
    check_replicas_every: int | None = None,
) -> TrainStep:
    """Builds ``step(state, batch, rng=None) -> (state, metrics)``.

    Each worker takes the gradient of the loss on its part of the batch, ``tx``
    exchanges it, and all apply the same updates. The state is a Flax
    ``TrainState`` or a plain tuple ``(params, opt_state)``. Make the optimizer's
    state under ``with jax.set_mesh(mesh):``, so that ``tx.init`` knows the number
    of workers. ``tx.update`` also gets the mean loss as ``value=``, for parts of a
    chain that look at it.

    A step that ``tx`` skips because of a NaN or Inf changes nothing in the state
    but the counts of rounds.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the mean loss of a local batch, a
        float ``()``. With ``has_aux`` it returns ``(loss, metrics)``. With
        ``mutable`` it is ``loss_fn(params, model_state, batch)`` and returns
        ``(loss, model_state)`` or ``(loss, (model_state, metrics))``. If the step
        is given a key it must take ``rng=``, different on every worker.
      tx: a transformation that takes local gradients and synchronises them.
      mesh: a device mesh with the axis ``axis_name``; other axes replicate.
      axis_name: the data-parallel axis.
      has_aux: the loss also returns a dict of metrics, averaged over workers.
      mutable: name of a mutable Flax collection, such as ``"batch_stats"``, that
        the loss updates; averaged over the workers after each step. It is the
        field of that name of a ``TrainState``, or third in a plain tuple.
      max_consecutive_skips: raise when so many steps in a row were skipped, with the
        names of the leaves whose gradients were bad on this process's workers. It is
        noticed one step later, and the state is still that of the last good step.
        Default: never.
      check_replicas_every: compare all bits of parameters and shared state between
        the workers before the first and every so many steps, as
        ``assert_replicas_equal`` does. Default: never.

    Returns:
      A :class:`TrainStep`: jitted, the state donated, the batch sharded.

    Raises:
      ValueError: if the mesh lacks the axis or a number is below 1; when tracing, if
        ``tx`` synchronises nothing; and as ``tx`` raises.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((2,), ("data",))
      >>> tx = onebit_jax.onebit_adam(0.1, "data", variance=5)
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params - 1.0) ** 2)
      >>> step = onebit_jax.make_train_step(loss_fn, tx, mesh)
      >>> params = jnp.zeros(3)
      >>> with jax.set_mesh(mesh):
      ...     state = (params, tx.init(params))
      >>> for _ in range(50):
      ...     state, metrics = step(state, jnp.eye(3)[jnp.array([0, 1, 2, 0])])
      >>> bool(metrics["loss"] < 0.05)
      True
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, which has {mesh.axis_names}"
        )
    watch = Watch(axis_name, max_consecutive_skips, check_replicas_every)
    tx = optax.with_extra_args_support(tx)
    data, everywhere = PartitionSpec(axis_name), PartitionSpec()

    def local_gradients(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        kwargs = {}
        if rng is not None:
            kwargs["rng"] = jax.random.fold_in(rng, lax.axis_index(axis_name))
        args = (params, batch) if mutable is None else (params, model_state, batch)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=has_aux or mutable is not None)
        out, grads = grad_fn(*args, **kwargs)
        loss, model_state, metrics = _unpack(out, has_aux, mutable)
        results = (grads, model_state, {"loss": loss, **metrics})
        return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

    def synchronise(state: Any, results: Any) -> Any:
        grads, model_state, metrics = jax.tree.map(lambda x: x[0], results)
        params, opt_state, old_model_state = _take(state, mutable)
        before = opt_state
        model_state, metrics = _mean((model_state, metrics), axis_name)
        updates, new_opt_state = tx.update(grads, opt_state, params, value=metrics["loss"])
        new_params = optax.apply_updates(params, updates)
        skipped = skipped_rounds(new_opt_state) > skipped_rounds(opt_state)
        params, opt_state = _hold(skipped, (params, opt_state), (new_params, new_opt_state))
        # Also bad before its gradients are exchanged, while they accumulate.
        bad = skipped | ~_all_finite(model_state)
        model_state = _hold(bad, old_model_state, model_state)
        new_state = _give(state, params, opt_state, model_state, ~skipped, mutable)
        done = None
        if watch.max_skips is not None:
            done = outcome(grads, before, new_opt_state, skipped)
        return new_state, metrics, done

    def step(state: Any, batch: Any, rng: Any) -> Any:
        params, opt_state, model_state = _take(state, mutable)
        if not rounds_in(opt_state):
            raise ValueError(
                "make_train_step: tx exchanges nothing between workers, so they would drift "
                "apart. Chain onebit_jax.exact_mean(axis_name) or compressed_mean(axis_name) in "
                "front, or use onebit_jax.onebit_adam."
            )
        # Types that track the axis would ask for casts inside the user's model
        # (in every lax.scan), but they do prove that the updates are the same
        # on all workers: off for the first half, on for the second.
        results = jax.shard_map(
            local_gradients, mesh=mesh, in_specs=(everywhere, everywhere, data, everywhere),
            out_specs=data, check_vma=False,
        )(params, model_state, batch, rng)
        specs = feedback.state_specs(state, axis_name)
        done: Any = None
        if watch.max_skips is not None:
            done = Outcome._make((everywhere, everywhere, data))
        return jax.shard_map(
            synchronise, mesh=mesh, in_specs=(specs, data), out_specs=(specs, everywhere, done)
        )(state, results)

    return TrainStep(step, mesh, axis_name, watch)


def _unpack(out: Any, has_aux: bool, mutable: str | None) -> tuple[Any, Any, dict]:
    """``(loss, model_state, metrics)`` from what the loss returned."""
    if mutable is None:
        loss, metrics = out if has_aux else (out, {})
        model_state = None
    else:
        loss, rest = out
        model_state, metrics = rest if has_aux else (rest, {})
    if not isinstance(metrics, dict) or "loss" in metrics:
        raise TypeError(
            "make_train_step: with has_aux the loss returns a dict of metrics without the key "
            f"'loss', found {metrics!r}"
        )
    return loss, model_state, metrics


def _params_of(state: Any) -> Any:
    return state.params if hasattr(state, "opt_state") else state[0]


def _take(state: Any, mutable: str | None) -> tuple[Any, Any, Any]:
    """``(params, opt_state, model_state)`` of either kind of state."""
    if hasattr(state, "opt_state"):
        return state.params, state.opt_state, getattr(state, mutable) if mutable else None
    size = 2 if mutable is None else 3
    if not isinstance(state, tuple) or len(state) != size:
        names = ("params", "opt_state", mutable)[:size]
        raise TypeError(
            f"the state must be a Flax TrainState or a tuple ({', '.join(map(str, names))}), "
            f"found {type(state).__name__}"
        )
    return (*state, None)[:3]


def _give(
    state: Any, params: Any, opt_state: Any, model_state: Any, done: jax.Array, mutable: str | None
) -> Any:
    """Inverse of :func:`_take`."""
    if hasattr(state, "opt_state"):
        new = {} if mutable is None else {mutable: model_state}
        return state.replace(
            params=params, opt_state=opt_state, step=state.step + done.astype(jnp.int32), **new
        )
    return (params, opt_state) if mutable is None else (params, opt_state, model_state)


def _mean(tree: Any, axis_name: str) -> Any:
    """Means over the workers, in one exchange; counters are the same on all."""
    leaves, treedef = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    means = lax.pmean([leaves[i] for i in floats], axis_name)
    for i, mean in zip(floats, means, strict=True):
        leaves[i] = mean
    for i in set(range(len(leaves))) - set(floats):
        leaves[i] = lax.pmax(leaves[i], axis_name)
    return jax.tree.unflatten(treedef, leaves)


def _all_finite(tree: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return workers.all_finite(leaves)


def _hold(skipped: jax.Array, old: Any, new: Any) -> Any:
    """``new``, or ``old`` with the skips and bytes of ``new`` if the step was skipped.

    An accumulation goes on: its sum is spent, also where it was the bad one.
    """
    # These hold themselves, and to keep their old arrays would be to copy them. Of
    # several, as in a partition, one may have moved while another skipped.
    alone = len(rounds_in(old)) == 1
    holds_itself = (ScaleByOnebitAdamState, *means.STATES) if alone else ()
    goes_on = (Rounds, AccumulateState, *holds_itself)

    def hold(o: Any, n: Any) -> Any:
        if isinstance(n, holds_itself):
            return n
        if isinstance(n, Rounds):
            # In a partition another group may have finished its round.
            return n._replace(
                exact=jnp.where(skipped, o.exact, n.exact),
                onebit=jnp.where(skipped, o.onebit, n.onebit),
            )
        if isinstance(n, AccumulateState):
            return n._replace(inner_state=_hold(skipped, o.inner_state, n.inner_state))
        return jnp.where(skipped, o, n)

    return jax.tree.map(hold, old, new, is_leaf=lambda x: isinstance(x, goes_on))
