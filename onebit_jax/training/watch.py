"""What a train step looks at on the host: steps skipped in a row, workers that differ."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import workers
from onebit_jax.optimizers.rounds import rounds_in
from onebit_jax.optimizers.wrappers import AccumulateState
from onebit_jax.training import replicas

PyTree = Any


class Outcome(NamedTuple):
    """What became of one step.

    Attributes:
      skipped: bool ``()``, the same on all workers.
      finished: bool ``()``, whether a round was finished; neither of the two while
        micro-batches accumulate.
      bad: bool ``(1 or w, leaves)``, the leaves in which this worker's gradient, or
        its sum over micro-batches, was not finite; looked at in skipped steps only.
    """

    skipped: jax.Array
    finished: jax.Array
    bad: jax.Array


def outcome(gradients: PyTree, before: PyTree, after: PyTree, skipped: jax.Array) -> Outcome:
    """The outcome of a step from its local gradients and optimizer states."""
    rounds = lambda state: jnp.stack([r.exact + r.onebit for r in rounds_in(state)]).sum()
    trees, structure = [gradients], _structure(gradients)
    is_sum = lambda x: isinstance(x, AccumulateState)
    for state in jax.tree.leaves(before, is_leaf=is_sum):
        # One inside of optax.partition sums but a part of the gradients.
        if is_sum(state) and _structure(state.worker_sum) == structure:
            trees.append(state.worker_sum)

    def look() -> jax.Array:
        finite = [jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(t)]) for t in trees]
        return ~jnp.stack(finite).all(axis=0)

    # Varying as the gradients do, as both branches must.
    nothing = lambda: jnp.zeros_like(jax.eval_shape(look))
    bad = lax.cond(skipped, look, nothing)
    return Outcome(skipped, rounds(after) > rounds(before), bad[None])


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree)


class Watch:
    """Raises after too many skipped steps, or where replicas differ."""

    def __init__(self, axis_name: str, max_skips: int | None, replicas_every: int | None):
        for name, value in (
            ("max_consecutive_skips", max_skips), ("check_replicas_every", replicas_every)
        ):
            if value is not None and not workers.is_count(value):
                raise ValueError(f"{name} must be None or an int of at least 1, found {value!r}")
        self.max_skips = max_skips
        self._axis_name, self._replicas_every = axis_name, replicas_every
        self._steps = self._in_a_row = 0
        self._pending: collections.deque[Outcome] = collections.deque()

    def before(self, state: PyTree, params: PyTree) -> None:
        """Looks at a state that a step is about to take, and so has still to be donated.

        Raises:
          AssertionError: if the workers' replicas differ.
          FloatingPointError: if too many steps in a row were skipped.
        """
        if self._replicas_every and self._steps % self._replicas_every == 0:
            replicas.assert_replicas_equal(state, self._axis_name)
        self._steps += 1
        # The last step may still be running: it is looked at when the next is asked for.
        while len(self._pending) > 1:
            last = self._pending.popleft()
            if np.asarray(last.skipped):
                self._in_a_row += 1
            elif np.asarray(last.finished):
                self._in_a_row = 0
            if self.max_skips is not None and self._in_a_row >= self.max_skips:
                raise FloatingPointError(_too_many(self._in_a_row, last.bad, params))

    def after(self, step: Outcome) -> None:
        """Keeps the outcome of a step, which may still be running."""
        self._pending.append(step)


def _too_many(steps: int, bad: jax.Array, params: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path) or "the parameters" for path, _ in leaves]
    found = {}
    for shard in bad.addressable_shards:
        for row, flags in enumerate(np.asarray(shard.data), start=shard.index[0].start or 0):
            if flags.any():
                found[row] = ", ".join(names[i] for i in np.flatnonzero(flags))
    where = "; ".join(f"{found[row]} on worker {row}" for row in sorted(found)) or (
        "none of this process's own: look at what the other processes say. If theirs were finite "
        "too, values were too large to be squared and summed (above 1e14)"
    )
    return (
        f"{steps} steps in a row were skipped, as something was not finite on some worker. Bad "
        f"gradients in the last of them: {where}. The state is as the last good step left it. "
        "Look at the batch, and lower the learning rate or the loss scale."
    )
