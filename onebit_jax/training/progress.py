"""What a run has done so far, and whether it freezes the second moment too early."""

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax.compression import marks
from onebit_jax.optimizers.means import CompressedMeanState
from onebit_jax.optimizers.rounds import Rounds, rounds_in
from onebit_jax.optimizers.scaling import ScaleByOnebitAdamState

#: RMS of the momentum, in units of the root of the second moment, above which a frozen
#: second moment is too small. Where gradients do not grow it stays below 1, as the square
#: of a mean is at most the mean of the squares.
LARGEST_MOMENTUM = 1.2

#: A second moment is stale when it is so many times older than the steps before its last
#: update, and these are fewer than its decay averages over.
STALE = 20

#: Weight in a second moment of the gradients of 1 / (1 - b2) steps.
FULL_WEIGHT = 1 - math.exp(-1)

#: Steps at which a run was last warned of; a state of fewer is another run's.
_warned_after = math.inf


class EarlyFreezeWarning(UserWarning):
    """The second moment was frozen too early, see :func:`metrics`."""


def bytes_sent(state: Any) -> int:
    """Bytes each worker has sent so far, by the usual ring formulas.

    Reads the counters from the device. Safe in a process that holds only its
    own part of the state.

    Args:
      state: an optimizer state, or a pytree around one.

    Returns:
      The bytes, summed over all synchronising transformations in the state. What
      a train step averages besides (metrics, batch statistics) is not in it.

    Raises:
      ValueError: if the state holds none.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None)
      >>> onebit_jax.bytes_sent(tx.init(jnp.zeros(8)))
      0
    """
    halves = [_mine(rounds.sent).reshape(-1, 2)[0] for rounds in _all_rounds(state)]
    return sum(int(low) + (int(high) << 32) for low, high in halves)


def metrics(state: Any) -> dict[str, Any]:
    r"""What an optimizer has done so far, for logging and for a look.

    Reads counters from the device and, after 1-bit rounds, passes once over moments and
    errors there: call it every so many steps. Exchanges nothing between processes, and
    may be called in one of several; each sees the errors of its own workers.

    The errors are in units of the update. With :math:`e_l` the error of leaf l, the root
    of its mean square over the workers, :math:`m_l` its momentum and :math:`v_l` the mean
    of its second moment, they are

    .. math::
      \sqrt{\sum_l \|e_l\|^2 / v_l \;\big/\; \sum_l \|m_l\|^2 / v_l}

    over the leaves that had a gradient in exact rounds; of ``compressed_mean`` the norm of
    the error over that of the last mean. Scales of gradients and learning rates
    cancel out. docs/reliability.md says what is usual.

    Args:
      state: an optimizer state, or a pytree around one; arrays on devices or NumPy.

    Returns:
      A dict, summed over all synchronising transformations in the state:
      ``stage``, ``"exact"`` until the first 1-bit round and then ``"1-bit"``;
      ``exact_rounds``, ``onebit_rounds`` and ``skipped_rounds``, ints;
      ``bytes_sent`` by each worker, an int. And the largest of all of them:
      ``worker_error`` and ``server_error``, floats, or None before the first 1-bit round,
      and where there is no server (up to two workers); ``variance_age``, an int, the steps
      since the second moment was last updated, or None where there is none.

    Raises:
      ValueError: if the state holds none.

    Warns:
      EarlyFreezeWarning: if the second moment was frozen too early, once in a run (a state
        of fewer steps is one of another run). It is older than a quarter of the steps before
        its last update, and the RMS of momentum over the root of the second moment is
        above 1.2; or it is 20 times older than these steps, and they are fewer than
        its decay averages over, ``1 / (1 - b2)``.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None, variance=1)
      >>> state = tx.init(jnp.zeros(8))
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.ones(8), state)
      >>> onebit_jax.metrics(state)["stage"], onebit_jax.metrics(state)["onebit_rounds"]
      ('1-bit', 2)
      >>> onebit_jax.metrics(state)["variance_age"]
      2
    """
    state = marks.typed(state)
    # The same on all workers, so that the first will do, under pmap too.
    exact, onebit, skipped = (
        sum(_number(getattr(rounds, name)) for rounds in _all_rounds(state))
        for name in ("exact", "onebit", "skipped")
    )
    kinds = (ScaleByOnebitAdamState, CompressedMeanState)
    is_part = lambda x: isinstance(x, kinds)
    parts = [x for x in jax.tree.leaves(state, is_leaf=is_part) if is_part(x)]
    sizes = [_sizes(part) if _number(part.rounds.onebit) else _NO_SIZES for part in parts]
    pairs = zip(parts, sizes, strict=True)
    adams = [(x, size) for x, size in pairs if isinstance(x, ScaleByOnebitAdamState)]
    early = next(filter(None, (_early(x, size.momentum) for x, size in adams)), None)
    _warn_once(early, exact + onebit)
    return {
        "stage": "1-bit" if onebit else "exact",
        "exact_rounds": exact,
        "onebit_rounds": onebit,
        "skipped_rounds": skipped,
        "bytes_sent": bytes_sent(state),
        "worker_error": _largest(size.worker for size in sizes),
        "server_error": _largest(size.server for size in sizes),
        "variance_age": _largest(_number(part.nu_age) for part, _ in adams),
    }


def _all_rounds(state: Any) -> list[Rounds]:
    found = rounds_in(marks.typed(state))
    if not found:
        raise ValueError(
            "no counts of rounds in this state: it is not that of onebit_adam, "
            "compressed_mean or exact_mean, or was restored as plain dicts and lists "
            "(restore it into the structure of tx.init)"
        )
    return found


def _mine(x: Any) -> np.ndarray:
    """What this process holds of an array."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_shards[0].data
    return np.asarray(x)


def _number(x: Any) -> Any:
    """A scalar that is the same on all workers."""
    return _mine(x).reshape(-1)[0].item()


def _largest(values: Iterable[Any]) -> Any:
    return max((x for x in values if x is not None), default=None)


class _Sizes(NamedTuple):
    """Of the errors, relative to what is quantized; None where there is none.

    Attributes:
      worker: of the worker errors.
      server: of the server errors.
      momentum: RMS of the momentum, in units of the root of the second moment.
    """

    worker: float | None
    server: float | None
    momentum: float | None


_NO_SIZES = _Sizes(None, None, None)


def _sizes(part: ScaleByOnebitAdamState | CompressedMeanState) -> _Sizes:
    """Of this process's own workers, after 1-bit rounds."""
    moments = (part.mu, part.nu) if isinstance(part, ScaleByOnebitAdamState) else ((), ())
    # All in one order. Empty leaves say nothing, and have no mean.
    worker, server, mu, nu = (
        [x for x in jax.tree.leaves(tree) if x.size] for tree in (*part.errors, *moments)
    )
    if not worker:
        return _NO_SIZES
    lost, lost_there, squares, means = np.split(
        _means_here([*worker, *server, *mu], nu), np.cumsum([len(worker), len(server), len(mu)])
    )
    entries = np.asarray([x.size for x in worker]) // (part.rounds.sent.size // 2)
    if isinstance(part, ScaleByOnebitAdamState):
        # A leaf without a gradient in exact rounds has no unit.
        unit = np.divide(1, means, where=means > 0, out=np.zeros_like(means))
        whole = float(np.sum(entries * squares * unit))
        rms = math.sqrt(whole * _number(part.nu_weight) / max(np.sum(entries[unit > 0]), 1))
    else:
        unit, whole, rms = np.ones(len(worker)), _number(part.norm) ** 2, None
    if not whole > 0:
        return _NO_SIZES
    relative = lambda squared_norms: math.sqrt(np.sum(squared_norms * unit) / whole)
    chunks = np.asarray([x.size for x in server])  # of all servers, one for each
    return _Sizes(
        relative(entries * lost), relative(chunks * lost_there) if server else None, rms
    )


def _means_here(squared: list[Any], plain: list[Any]) -> np.ndarray:
    """Mean squares of arrays and means of others, of what this process holds: float64."""
    is_global = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
    spread = [x for x in squared if is_global(x)]
    if not spread:
        return np.asarray(_means(squared, plain), np.float64)

    def on(device: jax.Device, x: Any) -> Any:
        if not is_global(x):
            return np.asarray(x)
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    # Its shards are all of one size, and no other process takes part.
    rows = [
        np.asarray(_means(*jax.tree.map(functools.partial(on, device), (squared, plain))))
        for device in spread[0].sharding.addressable_devices
    ]
    return np.asarray(np.mean(rows, axis=0, dtype=np.float64))


@jax.jit
def _means(squared: list[Any], plain: list[Any]) -> jax.Array:
    squares = [jnp.mean(jnp.square(x.astype(jnp.float32))) for x in squared]
    return jnp.stack([*squares, *map(jnp.mean, plain)])


def _early(part: ScaleByOnebitAdamState, momentum: float | None) -> str | None:
    """What says that the second moment was frozen too early, if anything does."""
    age = _number(part.nu_age)
    seen = _number(part.count) - age
    if momentum is None or 4 * age <= seen:
        return None
    when = f"it was last updated {age} steps ago, after {seen} steps"
    if momentum > LARGEST_MOMENTUM:
        return (
            f"{when}, and gradients have grown since. The momentum is {momentum:.1f} times its "
            "root (RMS), at most 1 where gradients do not grow: updates are too large"
        )
    if age > STALE * seen and _number(part.nu_weight) < FULL_WEIGHT:
        return f"{when}, fewer than it averages over: old noise scales all updates"
    return None


def _warn_once(early: str | None, steps: int) -> None:
    global _warned_after
    if steps < _warned_after:
        _warned_after = math.inf
    if early and _warned_after == math.inf:
        _warned_after = steps
        warnings.warn(
            f"The second moment was frozen too early: {early}. Take more exact steps, at least "
            "the learning-rate warm-up and 15 % of the run, or refresh the second moment instead "
            "of freezing it (variance=onebit_jax.refresh(), the default of onebit_adam).",
            EarlyFreezeWarning, stacklevel=3,
        )
