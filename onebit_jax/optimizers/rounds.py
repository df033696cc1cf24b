"""Rounds: how many there were of which kind, what was sent, and what a skipped one gives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onebit_jax import workers
from onebit_jax.compression import marks


@marks.state_class(own=("sent",))
class Rounds(NamedTuple):
    """Counts of what a synchronising transformation has done.

    Attributes:
      exact: int32 ``()``, full-precision rounds.
      onebit: int32 ``()``, 1-bit rounds.
      skipped: int32 ``()``, rounds thrown away because something in them was
        not finite. They are in neither of the other counts, but in ``sent``.
      sent: uint32 ``(1 or w, 2)``, bytes each worker has sent so far, low and
        high half; read it with ``onebit_jax.bytes_sent``.
    """

    exact: jax.Array
    onebit: jax.Array
    skipped: jax.Array
    sent: jax.Array


def init_rounds(axis_name: str | None) -> Rounds:
    """All counts at zero."""
    # Three arrays, because a donated state must not hold one buffer twice.
    exact, onebit, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
    sent = workers.worker_zeros(exact, (2,), jnp.uint32, axis_name)
    return Rounds(exact, onebit, skipped, sent)


def count_round(rounds: Rounds, exact: Any, finite: jax.Array, n_bytes: tuple[int, int]) -> Rounds:
    """One round more, of ``n_bytes = (if exact, if 1-bit)`` sent by each worker."""
    done = finite.astype(jnp.int32)
    was_exact = jnp.asarray(exact).astype(jnp.int32)
    halves = [jnp.asarray([b & 0xFFFFFFFF, b >> 32], jnp.uint32) for b in n_bytes]
    more = jnp.where(jnp.asarray(exact), *halves)
    low = rounds.sent[:, 0] + more[0]
    high = rounds.sent[:, 1] + more[1] + (low < more[0]).astype(jnp.uint32)
    return Rounds(
        exact=rounds.exact + done * was_exact,
        onebit=rounds.onebit + done * (1 - was_exact),
        skipped=rounds.skipped + (1 - done),
        sent=jnp.stack([low, high], axis=1),
    )


def rounds_in(state: Any) -> list[Rounds]:
    """The counts of all synchronising transformations in a state."""
    is_rounds = lambda x: isinstance(x, Rounds)
    return [x for x in jax.tree.leaves(state, is_leaf=is_rounds) if is_rounds(x)]


def skipped_rounds(state: Any) -> jax.Array:
    """Rounds skipped by all synchronising transformations in a state."""
    return jnp.stack([rounds.skipped for rounds in rounds_in(state)]).sum()


def zero_unless(finite: jax.Array, updates: Any, like: Any) -> Any:
    """Updates in the dtypes of ``like``, or zeros if not all was finite."""

    # A mean of float16 gradients may decode to more than float16 holds.
    return jax.tree.map(
        lambda u, g: jnp.where(finite, saturate(u, g.dtype), jnp.zeros((), g.dtype)), updates, like
    )


def saturate(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in a dtype, its largest number where that does not hold more."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)
