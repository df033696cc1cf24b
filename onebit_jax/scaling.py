"""The scaling of 1-bit Adam: moments in exact and in 1-bit rounds, without learning rate."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import allreduce, feedback, sync, variance as policies, workers, wrappers
from onebit_jax.feedback import ErrorFeedback
from onebit_jax.leaves import Lazy, Spans
from onebit_jax.quantize import SignQuantizer
from onebit_jax.sync import Rounds
from onebit_jax.variance import VariancePolicy

DEFAULT_VARIANCE = policies.refresh()

#: Largest update of a 1-bit round, before the learning rate. Adam's own stays
#: below 6.5 when a gradient jumps from 0 to a constant, at the default decays.
UPDATE_LIMIT = 8.0

#: Share of blocks with cut updates from which the second moment counts as far
#: too small. Rows of an embedding that are rarely seen cut single blocks.
CUT_SHARE = 0.1

#: Mean gradients above this count as not finite: their squares, and sums of those over
#: a model, would not be.
LARGEST = 1e14


class ScaleByOnebitAdamState(NamedTuple):
    """State of :func:`scale_by_onebit_adam`.

    Attributes:
      count: int32 ``()``, finished steps; skipped ones do not count.
      mu: first moment, like the parameters, float32 or ``mu_dtype``.
      nu: second moment, like the parameters, float32.
      nu_spans: float32 ``(ceil(n / 512),)`` for each leaf of ``n`` entries, means
        of ``nu`` over 512 entries in a row, to which its floor is relative.
      nu_count: int32 ``()``, steps of decay that ``nu`` has had.
      nu_age: int32 ``()``, steps since ``nu`` was last updated.
      nu_weight: float32 ``()``, sum of the weights of gradients in ``nu``, up to 1.
      errors: worker and server errors, one per worker.
      variance: state of the variance policy.
      cut: bool ``()``, whether the last round's updates were cut in many blocks.
      rounds: counts of exact, 1-bit and skipped rounds, and of bytes.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in Optax
    mu: optax.Updates
    nu: optax.Updates
    nu_spans: optax.Updates
    nu_count: jax.Array
    nu_age: jax.Array
    nu_weight: jax.Array
    errors: ErrorFeedback
    variance: Any
    cut: jax.Array
    rounds: Rounds


class _Moments(NamedTuple):
    """What a round changes, as :class:`ScaleByOnebitAdamState` has it."""

    mu: Any
    nu: Any
    nu_spans: Any
    nu_count: jax.Array
    errors: ErrorFeedback
    finite: jax.Array
    cut: jax.Array


def _if(condition: Any, body: Callable[[Any], Any], carry: Any) -> Any:
    """``body(carry)`` if so, else ``carry``, where ``lax.cond`` would copy it.

    A loop of at most one turn is updated in place. A Python bool decides when
    compiling.
    """
    if isinstance(condition, bool):
        return body(carry) if condition else carry
    once = lambda loop: (jnp.bool_(False), body(loop[1]))
    return lax.while_loop(lambda loop: loop[0], once, (condition, carry))[1]


def scale_by_onebit_adam(
    axis_name: str | None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    variance: int | VariancePolicy = DEFAULT_VARIANCE,
    quantizer: SignQuantizer = SignQuantizer(),
    precondition: bool = True,
    variance_floor: jax.typing.ArrayLike = 1e-2,
    bias_correction: bool = True,
    mu_dtype: Any = None,
    error_dtype: Any = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales **local** gradients by the 1-bit Adam algorithm.

    See :func:`onebit_adam` for the method and for all arguments but these.

    Args:
      axis_name: data-parallel mesh axis, or None for one worker without a mesh.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      variance: which rounds are exact; an int or a policy.
      quantizer: block size and scale.
      precondition: quantize the momentum divided by the root of the second
        moment.
      variance_floor: lower bound of the second moment relative to the mean of
        its neighbours, in force from the first 1-bit round on.
      bias_correction: as in Optax; False as in DeepSpeed.
      mu_dtype: dtype in which the first moment is kept.
      error_dtype: dtype in which the errors are kept.
      wire_dtype: dtype of the gradients on the wire in exact rounds.

    Returns:
      A transformation with :class:`ScaleByOnebitAdamState`.

    Raises:
      ValueError: when built, for an invalid ``variance`` or ``wire_dtype``; from
        ``init``, if the size of the axis is not known; from ``update``, if the
        axis is not bound, the gradients are already reduced, the tree is
        another one than at init, the state is that of another number of
        workers, or a wrapper that cannot work is calling; from ``init``, for an
        ``error_dtype`` other than float32 and bfloat16.
      TypeError: from ``update``, for integer or complex gradients, or a
        ``quantizer`` that is none.
    """
    policy = policies.as_policy(variance)
    allreduce.check_wire_dtype(wire_dtype)
    mu_dtype = None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype)

    def init_spans(p: Any) -> jax.Array:
        spans = -(-math.prod(jnp.shape(p)) // policies.FLOOR_SPAN)
        return workers.vary(jnp.zeros(spans, jnp.float32), workers.varying_axes(p))

    def init(params: optax.Params) -> ScaleByOnebitAdamState:
        return ScaleByOnebitAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype or jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu_spans=jax.tree.map(init_spans, params),
            nu_count=jnp.zeros((), jnp.int32),
            nu_age=jnp.zeros((), jnp.int32),
            nu_weight=jnp.zeros((), jnp.float32),
            errors=feedback.init_errors(params, axis_name, error_dtype),
            variance=policy.init(b2),
            cut=jnp.zeros((), jnp.bool_),
            rounds=sync.init_rounds(axis_name),
        )

    def update(
        updates: optax.Updates,
        state: ScaleByOnebitAdamState,
        params: optax.Params | None = None,
        *,
        exact: bool | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        del params, extra_args
        wrappers.refuse_wrappers(updates, axis_name)
        workers.check_updates(updates, axis_name)
        workers.check_tree(updates, state.errors.worker_error, "onebit_adam")

        def nu_correction(nu_count: jax.Array) -> jax.Array:
            if not bias_correction:
                return jnp.float32(1)
            # A policy of one's own may start with 1-bit rounds: then nu is 0.
            return policies.bias_correction(b2, jnp.maximum(nu_count, 1))

        def mu_correction(count: jax.Array) -> jax.Array:
            return policies.bias_correction(b1, count) if bias_correction else jnp.float32(1)

        def nu_norm() -> jax.Array:
            norms = [jnp.sum(v) for v in jax.tree.leaves(state.nu)]
            return workers.sum_over_shards(norms, axis_name) / nu_correction(state.nu_count)

        signals = policies.Signals(nu_norm, state.cut)
        decision, variance_state = policy.update(state.variance, state.count, signals)

        def moved_mu(m: jax.Array, g: jax.Array) -> Any:
            return b1 * m + (1 - b1) * g

        def held_mu(m: jax.Array, old: jax.Array) -> jax.Array:
            return m if m.dtype == old.dtype else sync.saturate(m, old.dtype)

        def exact_round(moments: _Moments) -> _Moments:
            mean, finite = allreduce.exact_allreduce(updates, axis_name, wire_dtype, LARGEST)
            keep, take = policies.decay_over(b2, decision.gap)
            mu = jax.tree.map(moved_mu, moments.mu, mean)
            nu = jax.tree.map(lambda v, g: keep * v + take * jnp.square(g), moments.nu, mean)
            nu = optax.tree.where(finite, nu, moments.nu)
            return _Moments(
                optax.tree.where(finite, mu, moments.mu), nu,
                jax.tree.map(policies.span_means, nu),
                moments.nu_count + jnp.where(finite, decision.gap, 0),
                moments.errors, finite, jnp.float32(0),
            )

        def onebit_round(moments: _Moments) -> _Moments:
            values = jax.tree.map(
                lambda m, g: Lazy(lambda m, g: moved_mu(m, g.astype(jnp.float32)), (m, g)),
                moments.mu, updates,
            )
            divisors, limit = None, None
            if precondition:
                correction = 1 / nu_correction(moments.nu_count)

                def divisor(v: jax.Array, floor: jax.Array) -> Any:
                    return jnp.sqrt(jnp.maximum(v, floor) * correction) + eps

                divisors = jax.tree.map(
                    lambda v, spans: Lazy(divisor, (v, Spans(variance_floor * spans))),
                    moments.nu, moments.nu_spans,
                )
                # On the momentum, so that the corrected one stays below the limit.
                limit = UPDATE_LIMIT * mu_correction(state.count + 1)
            mu, errors, finite, cut, _ = allreduce.compressed_allreduce(
                values, moments.errors, axis_name, quantizer, divisors, limit, moments.mu
            )
            return moments._replace(mu=mu, errors=errors, finite=finite, cut=cut)

        moments = _Moments(
            optax.tree.cast(state.mu, jnp.float32), state.nu, state.nu_spans, state.nu_count,
            state.errors, jnp.bool_(True), jnp.float32(0),
        )
        if exact is None:
            exact = decision.exact
        otherwise = not exact if isinstance(exact, bool) else ~exact
        moments = _if(exact, exact_round, moments)
        moments = _if(otherwise, onebit_round, moments)
        finite = moments.finite

        count = jnp.where(finite, optax.safe_increment(state.count), state.count)
        # At least 1, for a skipped first step.
        mu_scale = 1 / mu_correction(jnp.maximum(count, 1))
        nu_scale = 1 / nu_correction(moments.nu_count)
        compressed = (state.rounds.onebit > 0) | otherwise
        # The momentum carries the noise of the floored divisor from then on.
        floor = jnp.where(compressed, variance_floor, 0.0)

        def direction(m: jax.Array, v: jax.Array, spans: jax.Array) -> jax.Array:
            v_hat = jnp.maximum(v, policies.over_spans(floor * spans, v)) * nu_scale
            return m * mu_scale / (jnp.sqrt(v_hat) + eps)

        directions = jax.tree.map(direction, moments.mu, moments.nu, moments.nu_spans)

        w = workers.bound_axis_size(axis_name)
        n_bytes = (
            allreduce.exact_round_bytes(updates, w, wire_dtype),
            allreduce.onebit_round_bytes(updates, w, quantizer),
        )
        new_state = ScaleByOnebitAdamState(
            count=count,
            mu=jax.tree.map(held_mu, moments.mu, state.mu),
            nu=moments.nu,
            nu_spans=moments.nu_spans,
            nu_count=moments.nu_count,
            nu_age=jnp.where(finite, jnp.where(exact, 0, state.nu_age + 1), state.nu_age),
            nu_weight=policies.bias_correction(b2, moments.nu_count),
            errors=moments.errors,
            variance=optax.tree.where(finite, variance_state, state.variance),
            cut=jnp.where(finite, moments.cut > CUT_SHARE, state.cut),
            rounds=sync.count_round(state.rounds, exact, finite, n_bytes),
        )
        return sync.zero_unless(finite, directions, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)
