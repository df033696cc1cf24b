"""Wrapping a synchronised optimizer: accumulation, and what cannot wrap it."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import feedback, marks

# Wrappers whose function runs the inner update in a way that breaks a
# collective, by the qualified name of that function in optax.
_REFUSED = {
    "MultiSteps.update": (
        "optax.MultiSteps runs the inner update, exchange included, on every micro-step: no "
        "byte is saved. Use onebit_jax.accumulate(tx, every_k) instead."
    ),
    "apply_if_finite.<locals>.update": (
        "optax.apply_if_finite decides on each worker alone, so that workers hang or drift "
        "apart when one of them sees a NaN. Leave it out: the optimizers of onebit_jax skip "
        "non-finite steps on all workers together."
    ),
    "conditionally_transform.<locals>.update_fn": (
        "optax.conditionally_transform runs the exchange under a condition that need not be "
        "the same on every worker. Put the condition on the learning rate instead."
    ),
    "conditionally_mask.<locals>.update_fn": (
        "optax.conditionally_mask runs the exchange under a condition that need not be the "
        "same on every worker. Put the condition on the learning rate instead."
    ),
}
_MASKED = (
    "optax.masked leaves the gradients of the masked leaves local, so that workers drift apart. "
    "Use optax.partition with a group such as "
    "optax.chain(onebit_jax.exact_mean(axis_name), ...) for the other leaves."
)


def refuse_wrappers(updates: Any, axis_name: str | None) -> None:
    """Raises where an Optax wrapper that cannot work is calling.

    A wrapper hands nothing down that tells of it, so this looks at the calling
    functions, once, while tracing.

    Raises:
      ValueError: naming the wrapper and what to use instead.
    """
    if axis_name is None:
        return
    is_mask = lambda x: isinstance(x, optax.MaskedNode)
    masked = any(map(is_mask, jax.tree.leaves(updates, is_leaf=is_mask)))
    callers = _optax_callers()
    for caller in callers:
        if caller in _REFUSED:
            raise ValueError(_REFUSED[caller])
    # optax.partition is made of optax.masked and gives every leaf to a group.
    in_partition = any(caller.startswith("partition.") for caller in callers)
    if masked and not in_partition:
        raise ValueError(_MASKED)


def _optax_callers() -> list[str]:
    """Qualified names of the optax functions on the stack, innermost first."""
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("optax."):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return names


@marks.state_class(own=("worker_sum",))
class AccumulateState(NamedTuple):
    """State of :func:`accumulate`.

    Attributes:
      mini_step: int32 ``()``, micro-batches summed since the last exchange.
      worker_sum: float32 ``(1 or w, *shape)`` for each leaf, this worker's sum.
      inner_state: state of the wrapped transformation.
    """

    mini_step: jax.Array
    worker_sum: Any
    inner_state: Any


def accumulate(
    tx: optax.GradientTransformation, every_k: int
) -> optax.GradientTransformationExtraArgs:
    """Averages the local gradients of ``every_k`` micro-batches, then exchanges.

    The place of ``optax.MultiSteps`` around a transformation that communicates:
    nothing is sent in between, and the updates of those calls are zero.

    Args:
      tx: a transformation that holds ``onebit_adam``, ``compressed_mean`` or
        ``exact_mean``, and gets local gradients.
      every_k: micro-batches per exchange, at least 1.

    Returns:
      A transformation with :class:`AccumulateState`; initialise and use it
      like ``tx``.

    Raises:
      ValueError: if ``every_k`` is below 1, or (from ``init``) if ``tx``
        synchronises nothing.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.accumulate(onebit_jax.onebit_adam(1e-3, "data"), every_k=4)
    """
    if not workers.is_count(every_k):
        raise ValueError(f"every_k must be an int of at least 1, found {every_k!r}")
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> AccumulateState:
        inner_state = inner.init(params)
        held = feedback.per_worker_leaves(inner_state)
        if not held:
            raise ValueError(
                "accumulate: the wrapped transformation exchanges nothing between workers. "
                "Wrap a chain that holds onebit_adam, compressed_mean or exact_mean."
            )
        # What all per-worker leaves vary over is the data axis.
        axes = frozenset.intersection(*map(workers.varying_axes, held))
        size = held[0].shape[0]

        def zeros(p: Any) -> jax.Array:
            zeros = jnp.zeros_like(p, jnp.float32)[None]
            sums = jnp.broadcast_to(zeros, (size, *jnp.shape(p)))
            return workers.vary(sums, axes | workers.varying_axes(p))

        return AccumulateState(jnp.int32(0), jax.tree.map(zeros, params), inner_state)

    def update(
        updates: Any, state: AccumulateState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AccumulateState]:
        workers.check_tree(updates, state.worker_sum, "accumulate")
        # The sum would hide from the wrapped transformation that a gradient is
        # already reduced over the axis.
        sums = jax.tree.leaves(state.worker_sum)
        for axis in frozenset.intersection(*map(workers.varying_axes, sums)) if sums else ():
            workers.check_updates(updates, axis)
        total = jax.tree.map(
            lambda s, g: s + (g.astype(jnp.float32) / every_k)[None], state.worker_sum, updates
        )

        def exchange(total: Any, inner_state: Any) -> tuple[Any, Any]:
            mean = jax.tree.map(lambda s, g: s[0].astype(g.dtype), total, updates)
            return inner.update(mean, inner_state, params, **extra_args)

        # The types of a cond's branches must agree: zeros that vary over what
        # the exchanged updates vary over, which is not the data axis.
        like = jax.eval_shape(lambda: exchange(total, state.inner_state)[0])

        def wait(total: Any, inner_state: Any) -> tuple[Any, Any]:
            return jax.tree.map(_zeros_of, like), inner_state

        last = state.mini_step == every_k - 1
        new_updates, inner_state = lax.cond(last, exchange, wait, total, state.inner_state)
        kept = jax.tree.map(lambda s: jnp.where(last, jnp.zeros_like(s), s), total)
        return new_updates, AccumulateState(
            jnp.where(last, 0, state.mini_step + 1), kept, inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros_of(aval: Any) -> jax.Array:
    zeros = workers.reshard_like(jnp.zeros(aval.shape, aval.dtype), aval)
    return workers.vary(zeros, workers.varying_axes(aval))
