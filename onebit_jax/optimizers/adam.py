"""1-bit Adam: Adam whose momentum is averaged in one bit per entry."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax.compression.quantize import SignQuantizer
from onebit_jax.optimizers import variance as policies
from onebit_jax.optimizers.scaling import DEFAULT_VARIANCE, scale_by_onebit_adam
from onebit_jax.optimizers.variance import VariancePolicy


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
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
    r"""Adam that exchanges one bit per parameter in most of its steps.

    Takes the **local** gradients of each worker and returns updates that are
    bit-identical on all of them; do not average the gradients yourself. With
    worker error :math:`e_i` and server error :math:`d`:

    .. math::
      \text{exact round:}\quad & g = \tfrac1w \sum_i g_i,\;
        m = \beta_1 m + (1-\beta_1) g,\; v = \beta_2 v + (1-\beta_2) g^2 \\
      \text{1-bit round:}\quad & c_i = \beta_1 m + (1-\beta_1) g_i + e_i,\;
        q_i = Q(c_i),\; e_i = c_i - q_i \\
      & s = \tfrac1w \sum_i q_i + d,\; m = Q(s),\; d = s - m \\
      \text{both:}\quad & \theta = \theta - \alpha\, \hat m / (\sqrt{\hat v} + \epsilon)

    Until the first 1-bit round it is ``optax.adam`` on the mean gradient. Which
    rounds are exact is up to ``variance``; by default the first 100, and then
    ever fewer. Q quantizes in units of the update, block by block (see
    ``precondition`` and ``quantizer``). With ``precondition``, updates of a 1-bit
    round are cut at 8 learning rates, which only a second moment that is far too
    small can ask for; where many are, the default policy goes back to exact rounds.

    A step in which any worker has a NaN or Inf, or gradients too large to be squared
    and summed (certainly those below 1e14 are not), is skipped on all workers: zero
    updates, and the state unchanged but for ``rounds.skipped`` and the bytes.

    Where the caller knows which stage comes next, ``update(..., exact=False)`` or
    ``exact=True`` compiles just that one. It must be what ``variance`` would say.

    Gradients may be of any real floating dtype and shape, empty and scalar leaves
    included; updates have their dtype, and all state is float32 but for
    ``mu_dtype`` and ``error_dtype``.

    Args:
      learning_rate: a number or an Optax schedule.
      axis_name: data-parallel mesh axis over which ``update`` runs in
        ``jax.shard_map`` or ``jax.pmap``; None for one worker without a mesh,
        which still quantizes.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      variance: which rounds are exact and update the second moment. An int n:
        the first n, then it is frozen. Or a policy: ``refresh``,
        ``freeze_when_stable``. The exact steps should cover the learning-rate
        warm-up.
      quantizer: block size and scale.
      precondition: quantize the momentum divided by the root of the second
        moment, so that the noise has the size of an update everywhere.
      variance_floor: from the first 1-bit round on, the second moment counts as
        at least this fraction of its mean over 512 neighbours in the leaf.
        Entries that had no gradient in an exact round would else get enormous
        updates. 0 is no floor.
      bias_correction: as in Optax; the second moment is corrected by the decay
        that it has had. False never corrects, as in DeepSpeed.
      mu_dtype: dtype in which the first moment is kept; default float32.
      error_dtype: dtype in which worker and server errors are kept; default float32.
        ``"bfloat16"`` saves up to 4 bytes per parameter.
      wire_dtype: dtype of the gradients on the wire in exact rounds; default float32.
        ``"bfloat16"`` halves their bytes, and then they are Adam but for its rounding:
        the sum is in float32.

    Returns:
      A transformation that is chained, scheduled and partitioned like
      ``optax.adam``. Its state is a tuple that begins with a
      :class:`ScaleByOnebitAdamState`.

    Raises:
      ValueError: see :func:`scale_by_onebit_adam`.
      TypeError: likewise.

    Example:
      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.onebit_adam(0.1, axis_name=None, variance=10)
      >>> params = jnp.array([1.0, -2.0])
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state):
      ...     grads = jax.grad(lambda p: jnp.sum(p**2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> for _ in range(100):
      ...     params, state = step(params, state)
      >>> bool(jnp.abs(params).max() < 0.1)
      True
      >>> onebit_jax.metrics(state)["onebit_rounds"]
      90

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training
      with Adam's Convergence Speed <https://arxiv.org/abs/2102.02888>`_, 2021
    """
    return _chain_held(
        scale_by_onebit_adam(
            axis_name, b1, b2, eps, variance=variance, quantizer=quantizer,
            precondition=precondition, variance_floor=variance_floor,
            bias_correction=bias_correction, mu_dtype=mu_dtype, error_dtype=error_dtype,
            wire_dtype=wire_dtype,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def onebit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str | None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any = None,
    variance: int | VariancePolicy = DEFAULT_VARIANCE,
    quantizer: SignQuantizer = SignQuantizer(),
    precondition: bool = True,
    variance_floor: jax.typing.ArrayLike = 1e-2,
    bias_correction: bool = True,
    mu_dtype: Any = None,
    error_dtype: Any = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """:func:`onebit_adam` with decoupled weight decay, as in ``optax.adamw``.

    The decay needs no exchange: parameters are the same on all workers. A
    skipped step does not decay either.

    Args:
      learning_rate: see :func:`onebit_adam`, as all others not named here.
      axis_name: see there.
      b1: see there.
      b2: see there.
      eps: see there.
      weight_decay: strength, multiplied by the learning rate.
      mask: pytree of booleans, or a function of the parameters that gives one:
        which leaves decay. Default: all.
      variance: see there.
      quantizer: see there.
      precondition: see there.
      variance_floor: see there.
      bias_correction: see there.
      mu_dtype: see there.
      error_dtype: see there.
      wire_dtype: see there.

    Returns:
      A transformation; its ``update`` needs ``params``.

    Raises:
      ValueError: see :func:`scale_by_onebit_adam`.
      TypeError: likewise.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.onebit_adamw(1e-3, "data", weight_decay=0.01)

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019
    """
    return _chain_held(
        scale_by_onebit_adam(
            axis_name, b1, b2, eps, variance=variance, quantizer=quantizer,
            precondition=precondition, variance_floor=variance_floor,
            bias_correction=bias_correction, mu_dtype=mu_dtype, error_dtype=error_dtype,
            wire_dtype=wire_dtype,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def paper_1bit_adam(
    learning_rate: optax.ScalarOrSchedule, axis_name: str | None, warmup_steps: int
) -> optax.GradientTransformationExtraArgs:
    """1-bit Adam as its paper has it, for comparison.

    One RMS scale per leaf, no preconditioning, no floor, the second moment
    frozen after the warm-up (Tang et al. 2021, algorithm 1). Mind what the
    defaults of :func:`onebit_adam` were made for: entries without a gradient
    in the warm-up get enormous updates.

    Args:
      learning_rate: a number or an Optax schedule.
      axis_name: data-parallel mesh axis, or None for one worker.
      warmup_steps: exact steps, at least 1; 15 to 25 % of a run in the paper.

    Returns:
      A transformation like :func:`onebit_adam`.

    Raises:
      ValueError: for ``warmup_steps`` below 1, and as ``onebit_adam``.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.paper_1bit_adam(1e-3, "data", warmup_steps=500)
    """
    return onebit_adam(
        learning_rate, axis_name, variance=policies.freeze_after(warmup_steps),
        quantizer=SignQuantizer(block_size=None), precondition=False, variance_floor=0.0,
    )


def _chain_held(
    first: optax.GradientTransformationExtraArgs, *rest: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """``optax.chain`` in which a step that ``first`` skips changes nothing.

    Otherwise a skipped step would still decay the weights and move schedules.
    """
    after = optax.chain(*rest)

    def init(params: optax.Params) -> tuple[Any, ...]:
        return (first.init(params), *after.init(params))

    def update(
        updates: optax.Updates, state: tuple[Any, ...], params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        updates, first_state = first.update(updates, state[0], params, **extra_args)
        skipped = first_state.rounds.skipped > state[0].rounds.skipped
        updates, after_state = after.update(updates, state[1:], params, **extra_args)
        updates = jax.tree.map(lambda u: jnp.where(skipped, jnp.zeros_like(u), u), updates)
        return updates, (first_state, *optax.tree.where(skipped, state[1:], after_state))

    return optax.GradientTransformationExtraArgs(init, update)
