"""Synchronisation as Optax transformations: local updates in, common ones out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import allreduce, feedback, marks
from onebit_jax.compression.feedback import ErrorFeedback
from onebit_jax.compression.quantize import SignQuantizer
from onebit_jax.optimizers import wrappers
from onebit_jax.optimizers.rounds import Rounds, count_round, init_rounds, zero_unless


@marks.state_class()
class CompressedMeanState(NamedTuple):
    """State of :func:`compressed_mean`.

    Attributes:
      errors: worker and server errors.
      norm: float32 ``()``, of the last mean; for two workers, root mean square of the
        norms of what each has sent.
      rounds: counts of rounds and bytes.
    """

    errors: ErrorFeedback
    norm: jax.Array
    rounds: Rounds


def compressed_mean(
    axis_name: str | None, quantizer: SignQuantizer = SignQuantizer(), *, error_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's updates by their 1-bit mean, with error feedback.

    Put it in front of an optimizer that needs no second moment. Two payload
    collectives for the whole pytree, about ``2 (w - 1) / w * N / 8`` bytes sent
    by each worker for N entries. In front of Adam use :func:`exact_mean`, or
    ``onebit_adam``: a second moment of quantized gradients is all noise (Tang et
    al. 2021, arXiv 2102.02888, on why naive compression fails for Adam).

    Error feedback acts like a delay of a few steps, so a learning rate close to
    where plain momentum SGD becomes unstable is too large here: on a quadratic of
    curvature 1 with momentum 0.9, 0.01 converges and 0.05 does not.

    If anything in a round is not finite on any worker, all workers return
    zeros, keep their errors and count the round as skipped.

    Args:
      axis_name: data-parallel mesh axis, or None for one worker.
      quantizer: block size and scale.
      error_dtype: dtype in which the errors are kept, ``"bfloat16"`` to save
        memory; default float32.

    Returns:
      A transformation with :class:`CompressedMeanState`. Its ``update`` must
      run where the axis is bound, on gradients not yet reduced over it.

    Raises:
      ValueError, TypeError: from ``init`` or ``update``, as
        ``scale_by_onebit_adam``.

    Example:
      >>> import optax, onebit_jax
      >>> tx = optax.chain(
      ...     onebit_jax.compressed_mean("data"), optax.sgd(0.1, momentum=0.9)
      ... )
    """

    def init(params: Any) -> CompressedMeanState:
        return CompressedMeanState(
            feedback.init_errors(params, axis_name, error_dtype),
            jnp.zeros((), jnp.float32),
            init_rounds(axis_name),
        )

    def update(
        updates: Any, state: CompressedMeanState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, CompressedMeanState]:
        del params, extra_args
        wrappers.refuse_wrappers(updates, axis_name)
        workers.check_updates(updates, axis_name)
        workers.check_tree(updates, state.errors.worker_error, "compressed_mean")
        mean, errors, finite, _, squares = allreduce.compressed_allreduce(
            updates, state.errors, axis_name, quantizer
        )
        w = workers.bound_axis_size(axis_name)
        n_bytes = allreduce.onebit_round_bytes(updates, w, quantizer)
        rounds = count_round(state.rounds, False, finite, (0, n_bytes))
        norm = jnp.sqrt(workers.sum_over_shards(squares, axis_name))
        new_state = CompressedMeanState(errors, jnp.where(finite, norm, state.norm), rounds)
        return zero_unless(finite, mean, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


class ExactMeanState(NamedTuple):
    """State of :func:`exact_mean`.

    Attributes:
      rounds: counts of rounds and bytes.
    """

    rounds: Rounds


def exact_mean(
    axis_name: str | None, wire_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's updates by their mean in full precision.

    ``optax.chain(exact_mean("data"), optax.adam(1e-3))`` is ordinary
    data-parallel Adam with the bytes counted. A round with anything that is
    not finite gives zeros and counts as skipped.

    Args:
      axis_name: data-parallel mesh axis, or None for one worker.
      wire_dtype: None for float32, or ``"bfloat16"`` / ``"float16"`` for two
        bytes per entry on the wire and a float32 sum.

    Returns:
      A transformation with :class:`ExactMeanState`.

    Raises:
      ValueError: for another ``wire_dtype``, and as ``compressed_mean``.
      TypeError: as ``compressed_mean``.

    Example:
      >>> import optax, onebit_jax
      >>> tx = optax.chain(onebit_jax.exact_mean("data", "bfloat16"), optax.adam(1e-3))
    """
    allreduce.check_wire_dtype(wire_dtype)

    def init(params: Any) -> ExactMeanState:
        return ExactMeanState(init_rounds(axis_name))

    def update(
        updates: Any, state: ExactMeanState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ExactMeanState]:
        del params, extra_args
        wrappers.refuse_wrappers(updates, axis_name)
        workers.check_updates(updates, axis_name)
        workers.check_worker_axis(state.rounds.sent, "exact_mean")
        mean, finite = allreduce.exact_allreduce(updates, axis_name, wire_dtype)
        w = workers.bound_axis_size(axis_name)
        n_bytes = allreduce.exact_round_bytes(updates, w, wire_dtype)
        rounds = count_round(state.rounds, True, finite, (n_bytes, 0))
        return zero_unless(finite, mean, updates), ExactMeanState(rounds)

    return optax.GradientTransformationExtraArgs(init, update)


#: States of which nothing but counts moves in a skipped round.
STATES = (CompressedMeanState, ExactMeanState)


def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike, axis_name: str | None
) -> optax.GradientTransformationExtraArgs:
    """Clips local updates by one factor that is the same on all workers.

    The norm is the root of the mean squared norm of the workers, an upper
    bound of the norm of the mean; equal to it when all workers have the same
    gradient. ``optax.clip_by_global_norm`` in front of a compressed mean would
    clip each worker by its own norm, and so bias the mean. Exchanges one
    float32 scalar per step.

    Args:
      max_norm: the largest norm that passes unchanged.
      axis_name: data-parallel mesh axis, or None for one worker.

    Returns:
      A stateless transformation to chain in front.

    Raises:
      ValueError: from ``update``, for an unbound axis or reduced gradients.
      TypeError: from ``update``, for integer or complex gradients.

    Example:
      >>> import optax, onebit_jax
      >>> tx = optax.chain(
      ...     onebit_jax.clip_by_global_norm(1.0, "data"),
      ...     onebit_jax.onebit_adam(1e-3, "data"),
      ... )
    """

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        wrappers.refuse_wrappers(updates, axis_name)
        workers.check_updates(updates, axis_name)
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(updates)]
        # The squares of a sharded parameter add up over its other axes.
        square = workers.sum_over_shards(squares, axis_name)
        if axis_name is not None:
            square = lax.pmean(square, axis_name)
        norm = jnp.sqrt(square)
        factor = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
        scale = lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
