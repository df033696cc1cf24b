"""The second moment: in which steps it is updated, and how much it then decays.

A policy is a pair of pure functions. Its decisions depend only on values that
are the same on every worker, so a collective inside ``lax.cond`` is safe.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from onebit_jax import workers


class Decision(NamedTuple):
    """What a policy says of one step.

    Attributes:
      exact: bool ``()``, whether this step is an exact round. A Python bool
        makes the stage static: only that branch is compiled.
      gap: int32 ``()``, how many steps of decay the second moment gets in an
        exact round.
    """

    exact: Any
    gap: Any


class Signals(NamedTuple):
    """What a policy may look at, the same on every worker.

    Attributes:
      norm: computes the L1 norm of the bias-corrected second moment, a float32
        ``()``; costs nothing unless called.
      cut: bool ``()``, whether many updates of the last round were so large that
        they were cut: the second moment is far too small.
    """

    norm: Callable[[], jax.Array]
    cut: jax.Array


class VariancePolicy(NamedTuple):
    """When the second moment is updated.

    Attributes:
      init: ``init(b2) -> state``, a pytree of small arrays.
      update: ``update(state, step, signals) -> (Decision, state)`` with the
        number of finished steps, int32 ``()``, and :class:`Signals`.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, jax.Array, Signals], tuple[Decision, Any]]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def freeze_after(exact_steps: int) -> VariancePolicy:
    """Exactly ``exact_steps`` exact rounds, then a frozen second moment.

    What an int given as ``variance=`` means (Tang et al. 2021, algorithm 1).

    Args:
      exact_steps: length of the warm-up in steps, at least 1.

    Returns:
      A :class:`VariancePolicy` for ``variance=``.

    Raises:
      ValueError: if it is not an int of at least 1.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, "data", variance=onebit_jax.freeze_after(500))
    """
    _require(
        workers.is_count(exact_steps),
        f"variance: the number of exact steps must be an int of at least 1, found {exact_steps!r}",
    )

    def update(state: Any, step: jax.Array, signals: Signals) -> tuple[Decision, Any]:
        return Decision(step < exact_steps, jnp.int32(1)), state

    return VariancePolicy(lambda b2: (), update)


class StableState(NamedTuple):
    """State of :func:`freeze_when_stable`.

    Attributes:
      norms: float32 ``(window,)``, the last norms of the second moment.
      frozen: bool ``()``.
    """

    norms: jax.Array
    frozen: jax.Array


def freeze_when_stable(
    threshold: float = 0.96, window: int | None = None, min_steps: int = 100
) -> VariancePolicy:
    """Exact until the second moment has stopped moving, then frozen.

    The rule of Tang et al. 2021 (arXiv 2102.02888): with ``D`` the window, freeze
    once ``||v_t||_1 / ||v_{t-D}||_1 >= threshold``. The norms are of the
    bias-corrected second moment, and a ratio above ``1 / threshold`` does not
    count as stable either: a growing second moment frozen too early is too
    small for the rest of the run.

    Args:
      threshold: above 0 and below 1.
      window: steps between the norms compared; default ``1 / (1 - b2)``.
      min_steps: no freeze before; set it to the end of the learning-rate
        warm-up.

    Returns:
      A :class:`VariancePolicy` for ``variance=``.

    Raises:
      ValueError: for arguments outside of the above.

    Example:
      >>> import onebit_jax
      >>> policy = onebit_jax.freeze_when_stable(window=100, min_steps=500)
      >>> tx = onebit_jax.onebit_adam(1e-3, "data", variance=policy)
    """
    _require(0 < threshold < 1, f"threshold must be in (0, 1), found {threshold!r}")
    _require(
        window is None or workers.is_count(window),
        f"window must be an int of at least 1 or None, found {window!r}",
    )
    _require(workers.is_count(min_steps), f"min_steps must be at least 1, found {min_steps!r}")

    def init(b2: Any) -> StableState:
        steps = window
        if steps is None:
            _require(
                not isinstance(b2, jax.core.Tracer),
                "freeze_when_stable: b2 is a traced value, so give window= explicitly",
            )
            steps = max(round(1 / (1 - float(b2))), 1)
        return StableState(jnp.zeros(steps, jnp.float32), jnp.bool_(False))

    def update(state: StableState, step: jax.Array, signals: Signals) -> tuple[Decision, Any]:
        slot = step % state.norms.shape[0]
        before = state.norms[slot]
        # Once frozen there is nothing to measure.
        now = jax.lax.cond(state.frozen, lambda: before, signals.norm)
        stable = (now >= threshold * before) & (before >= threshold * now) & (now > 0)
        # A slot is first filled at its own step; step 0 has no second moment yet.
        enough = (step >= min_steps) & (step > state.norms.shape[0])
        frozen = state.frozen | (stable & enough)
        return Decision(~frozen, jnp.int32(1)), StableState(state.norms.at[slot].set(now), frozen)

    return VariancePolicy(init, update)


#: Largest weight of one refresh in the second moment. A single gradient is noise: at
#: ``b2 ** gap`` alone, refreshes of a long run would each replace all that came before.
LARGEST_WEIGHT = 1 / 8


class RefreshState(NamedTuple):
    """State of :func:`refresh`.

    Attributes:
      longest: int32 ``()``, steps of decay that a refresh gives at most.
      origin: int32 ``()``, the step from which the grid of refreshes counts.
      last: int32 ``()``, the step of the last exact round.
      refreshes: int32 ``()``, exact rounds since the warm-up or the origin.
    """

    longest: jax.Array
    origin: jax.Array
    last: jax.Array
    refreshes: jax.Array


def refresh(
    every: int = 16,
    exact_steps: int = 100,
    until: int | None = None,
    grid: Literal["proportional", "doubling"] = "proportional",
) -> VariancePolicy:
    """Exact at first, then refreshed ever more rarely; the default.

    After the exact steps, the gap between refreshes is a fraction of the steps
    up to the last one (``last // every``, "proportional"), or doubles every
    ``every`` refreshes (0/1 Adam's T_v, Lu et al. 2023, arXiv 2202.06009). Either
    way a run of T steps has ``O(every * log T)`` exact rounds. A refresh
    after a gap of ``d`` steps decays the second moment by ``b2 ** d``, as if
    the steps between had seen the same gradient, but by no less than 7/8.

    When many updates had to be cut because the second moment is far too small,
    as when gradients grow suddenly, the grid starts anew at that step: the next
    rounds are exact, as they were at first.

    Args:
      every: at least 1; larger means more refreshes.
      exact_steps: at least 1; should cover the learning-rate warm-up.
      until: no refresh from this step on. Default: they never end.
      grid: which gaps.

    Returns:
      A :class:`VariancePolicy` for ``variance=``.

    Raises:
      ValueError: for arguments outside of the above.

    Example:
      >>> import onebit_jax
      >>> policy = onebit_jax.refresh(every=8, exact_steps=1000)
      >>> tx = onebit_jax.onebit_adam(1e-3, "data", variance=policy)
    """
    for name, value in (("every", every), ("exact_steps", exact_steps)):
        _require(
            workers.is_count(value), f"{name} must be an int of at least 1, found {value!r}"
        )
    _require(
        until is None or workers.is_count(until, exact_steps),
        f"until must be None or an int of at least exact_steps={exact_steps}, found {until!r}",
    )
    _require(
        grid in ("proportional", "doubling"),
        f'grid must be "proportional" or "doubling", found {grid!r}',
    )

    def update(state: RefreshState, step: jax.Array, signals: Signals) -> tuple[Decision, Any]:
        origin = jnp.where(signals.cut, step, state.origin)
        refreshes = jnp.where(signals.cut, 0, state.refreshes)
        if grid == "proportional":
            wanted = jnp.maximum((state.last - origin) // every, 1)
        else:
            wanted = jnp.left_shift(jnp.int32(1), jnp.minimum(refreshes // every, 30))
        gap = step - state.last
        warming = step < exact_steps
        exact = warming | (gap >= wanted)
        if until is not None:
            exact &= step < until
        last = jnp.where(exact, step, state.last)
        refreshes = refreshes + (exact & ~warming).astype(jnp.int32)
        decays = jnp.minimum(gap, state.longest)
        return Decision(exact, decays), RefreshState(state.longest, origin, last, refreshes)

    def init(b2: Any) -> RefreshState:
        longest = jnp.log1p(-LARGEST_WEIGHT) / jnp.log(jnp.asarray(b2, jnp.float32))
        longest = jnp.maximum(longest, 1).astype(jnp.int32)
        return RefreshState(longest, jnp.int32(0), jnp.int32(-1), jnp.int32(0))

    return VariancePolicy(init, update)


def as_policy(variance: int | VariancePolicy) -> VariancePolicy:
    """The policy that a ``variance=`` argument means.

    Raises:
      ValueError: if it is neither a policy nor an int of at least 1.
    """
    if isinstance(variance, VariancePolicy):
        return variance
    _require(
        not isinstance(variance, jax.Array),
        "variance must be a Python int or a policy, found a jax array; under "
        "optax.inject_hyperparams name it in static_args=('variance',)",
    )
    return freeze_after(variance)
