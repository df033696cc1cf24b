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


def round_counts(state: Any) -> dict[str, int]:
    """How many exact, 1-bit and skipped rounds a state has seen.

    Args:
      state: an optimizer state, or a pytree around one.

    Returns:
      ``{"exact": ..., "onebit": ..., "skipped": ...}``, summed over all
      synchronising transformations in the state.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name=None)
      >>> onebit_jax.round_counts(tx.init(jnp.zeros(8)))
      {'exact': 0, 'onebit': 0, 'skipped': 0}
    """
    names = ("exact", "onebit", "skipped")
    rounds = rounds_in(state)
    # Replicated, so that the first entry is right under pmap's leading axis too.
    first = lambda x: int(np.asarray(x).reshape(-1)[0])
    return {name: sum(first(getattr(r, name)) for r in rounds) for name in names}
