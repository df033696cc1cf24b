"""What goes over the wire, as the state has counted it."""

from typing import Any

import jax
import numpy as np

from onebit_jax.sync import rounds_in


def bytes_sent(state: Any) -> int:
    """Bytes each worker has sent so far, by the usual ring formulas.

    Reads the counters from the device. Safe in a process that holds only its
    own part of the state.

    Args:
      state: an optimizer state, or a pytree around one.

    Returns:
      The bytes, summed over all synchronising transformations in the state.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None)
      >>> onebit_jax.bytes_sent(tx.init(jnp.zeros(8)))
      0
    """
    total = 0
    for rounds in rounds_in(state):
        sent = rounds.sent
        if isinstance(sent, jax.Array) and not sent.is_fully_addressable:
            sent = sent.addressable_shards[0].data
        low, high = np.asarray(sent).reshape(-1, 2)[0]
        total += int(low) + (int(high) << 32)
    return total


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

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None, variance=1)
      >>> state = tx.init(jnp.zeros(8))
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.ones(8), state)
      >>> onebit_jax.metrics(state)["stage"], onebit_jax.metrics(state)["onebit_rounds"]
      ('1-bit', 2)
    """
    # Replicated, so that the first entry is right under pmap's leading axis too.
    first = lambda x: int(np.asarray(x).reshape(-1)[0])
    exact, onebit, skipped = (
        sum(first(getattr(rounds, name)) for rounds in rounds_in(state))
        for name in ("exact", "onebit", "skipped")
    )
    return {
        "stage": "1-bit" if onebit else "exact",
        "exact_rounds": exact,
        "onebit_rounds": onebit,
        "skipped_rounds": skipped,
        "bytes_sent": bytes_sent(state),
    }
