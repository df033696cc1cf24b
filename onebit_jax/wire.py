"""What goes over the wire, as the state has counted it."""

from typing import Any

import jax
import numpy as np

from onebit_jax.sync import Rounds, rounds_in


def _all_rounds(state: Any) -> list[Rounds]:
    found = rounds_in(state)
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
    """What an optimizer has done so far, for logging and for a look.

    Reads the counters from the device.

    Args:
      state: an optimizer state, or a pytree around one.

    Returns:
      A dict, summed over all synchronising transformations in the state:
      ``stage``, ``"exact"`` until the first 1-bit round and then ``"1-bit"``;
      ``exact_rounds``, ``onebit_rounds`` and ``skipped_rounds``, ints; and
      ``bytes_sent`` by each worker, an int.

    Raises:
      ValueError: if the state holds none.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None, variance=1)
      >>> state = tx.init(jnp.zeros(8))
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.ones(8), state)
      >>> onebit_jax.metrics(state)["stage"], onebit_jax.metrics(state)["onebit_rounds"]
      ('1-bit', 2)
    """
    # The same on all workers, so that the first will do, under pmap too.
    exact, onebit, skipped = (
        sum(int(_mine(getattr(rounds, name)).reshape(-1)[0]) for rounds in _all_rounds(state))
        for name in ("exact", "onebit", "skipped")
    )
    return {
        "stage": "1-bit" if onebit else "exact",
        "exact_rounds": exact,
        "onebit_rounds": onebit,
        "skipped_rounds": skipped,
        "bytes_sent": bytes_sent(state),
    }
