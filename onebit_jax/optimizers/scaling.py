"""The scaling of 1-bit Adam: moments in exact and in 1-bit rounds, without learning rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import workers
from onebit_jax.compression import allreduce, feedback, marks
from onebit_jax.compression.feedback import ErrorFeedback
from onebit_jax.compression.quantize import SignQuantizer
from onebit_jax.optimizers import moments, variance as policies, wrappers
from onebit_jax.optimizers.moments import Rule
from onebit_jax.optimizers.rounds import Rounds, count_round, init_rounds, saturate, zero_unless
from onebit_jax.optimizers.variance import VariancePolicy

DEFAULT_VARIANCE = policies.refresh()

#: Share of blocks with cut updates from which the second moment counts as far
#: too small. Rows of an embedding that are rarely seen cut single blocks.
CUT_SHARE = 0.1


@marks.state_class(spans=("nu_spans",))
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


def _before_all_steps(
    params: optax.Params, mu: optax.Updates, errors: ErrorFeedback, variance: Any, rounds: Rounds
) -> ScaleByOnebitAdamState:
    return ScaleByOnebitAdamState(
        count=jnp.zeros((), jnp.int32),
        mu=mu,
        nu=optax.tree.zeros_like(params, dtype=jnp.float32),
        nu_spans=jax.tree.map(moments.init_spans, params),
        nu_count=jnp.zeros((), jnp.int32),
        nu_age=jnp.zeros((), jnp.int32),
        nu_weight=jnp.zeros((), jnp.float32),
        errors=errors,
        variance=variance,
        cut=jnp.zeros((), jnp.bool_),
        rounds=rounds,
    )


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
    rule = Rule(
        axis_name, b1, b2, eps, quantizer, precondition, variance_floor, bias_correction, wire_dtype
    )

    def init(params: optax.Params) -> ScaleByOnebitAdamState:
        mu = optax.tree.zeros_like(params, dtype=mu_dtype or jnp.float32)
        errors = feedback.init_errors(params, axis_name, error_dtype)
        return _before_all_steps(params, mu, errors, policy.init(b2), init_rounds(axis_name))

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

        norm = lambda: moments.nu_norm(rule, state.nu, state.nu_count)
        signals = policies.Signals(norm, state.cut)
        decision, variance_state = policy.update(state.variance, state.count, signals)
        if exact is None:
            exact = decision.exact
        after = moments.one_of(
            exact,
            lambda before: moments.exact_round(rule, before, updates, decision.gap),
            lambda before: moments.onebit_round(rule, before, updates, state.count),
            moments.before_round(
                state.mu, state.nu, state.nu_spans, state.nu_count, state.errors
            ),
        )
        finite = after.finite
        count = jnp.where(finite, optax.safe_increment(state.count), state.count)
        # The momentum carries the noise of the floored divisor from the first 1-bit round on.
        floored = (state.rounds.onebit > 0) | jnp.logical_not(exact)
        directions = moments.directions(rule, after, count, floored)
        held_mu = lambda m, old: m if m.dtype == old.dtype else saturate(m, old.dtype)
        new_state = ScaleByOnebitAdamState(
            count=count,
            mu=jax.tree.map(held_mu, after.mu, state.mu),
            nu=after.nu,
            nu_spans=after.nu_spans,
            nu_count=after.nu_count,
            nu_age=jnp.where(finite, jnp.where(exact, 0, state.nu_age + 1), state.nu_age),
            nu_weight=moments.bias_correction(b2, after.nu_count),
            errors=after.errors,
            variance=optax.tree.where(finite, variance_state, state.variance),
            cut=jnp.where(finite, after.cut > CUT_SHARE, state.cut),
            rounds=count_round(state.rounds, exact, finite, moments.round_bytes(rule, updates)),
        )
        return zero_unless(finite, directions, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)
