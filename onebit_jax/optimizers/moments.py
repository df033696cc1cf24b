"""The pieces of which the optimizers are made: moments in exact and in 1-bit rounds.

Pure functions of a :class:`Rule`, which does not change, and of :class:`Moments`, which
do. What they have of the state of an optimizer is for its own file to keep.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax import workers
from onebit_jax.compression import allreduce, packing, tiles
from onebit_jax.compression.chunks import Lazy, Spans
from onebit_jax.compression.feedback import ErrorFeedback
from onebit_jax.compression.quantize import SignQuantizer

#: Largest update of a 1-bit round, before the learning rate. Adam's own stays
#: below 6.5 when a gradient jumps from 0 to a constant, at the default decays.
UPDATE_LIMIT = 8.0

#: Mean gradients above this count as not finite: their squares, and sums of those over
#: a model, would not be.
LARGEST = 1e14


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is the same in all steps; the arguments of ``scale_by_onebit_adam``."""

    axis_name: str | None
    b1: Any
    b2: Any
    eps: Any
    quantizer: SignQuantizer
    precondition: bool
    variance_floor: Any
    bias_correction: bool
    wire_dtype: Any

    def mu_correction(self, count: jax.Array) -> jax.Array:
        """By what ``mu`` is too small after ``count`` steps."""
        return bias_correction(self.b1, count) if self.bias_correction else jnp.float32(1)

    def nu_correction(self, nu_count: jax.Array) -> jax.Array:
        """By what ``nu`` is too small after so many steps of decay."""
        if not self.bias_correction:
            return jnp.float32(1)
        # A policy of one's own may start with 1-bit rounds: then nu is 0.
        return bias_correction(self.b2, jnp.maximum(nu_count, 1))

    def moved_mu(self, m: jax.Array, g: jax.Array) -> jax.Array:
        """The first moment one step on."""
        return self.b1 * m + (1 - self.b1) * g


class Moments(NamedTuple):
    """What a round changes.

    Attributes:
      mu: first moment, float32.
      nu: second moment, float32.
      nu_spans: its means by span, see :func:`span_means`.
      nu_count: int32 ``()``, steps of decay that ``nu`` has had.
      errors: worker and server errors.
      finite: bool ``()``, whether all was finite in the round; if not, nothing has moved.
      cut: float32 ``()``, share of the blocks in which updates were cut.
    """

    mu: optax.Updates
    nu: optax.Updates
    nu_spans: optax.Updates
    nu_count: jax.Array
    errors: ErrorFeedback
    finite: jax.Array
    cut: jax.Array


def before_round(
    mu: Any, nu: Any, nu_spans: Any, nu_count: jax.Array, errors: ErrorFeedback
) -> Moments:
    """Moments of which a round is still to be made."""
    mu = optax.tree.cast(mu, jnp.float32)
    return Moments(mu, nu, nu_spans, nu_count, errors, jnp.bool_(True), jnp.float32(0))


def exact_round(rule: Rule, moments: Moments, gradients: Any, gap: Any) -> Moments:
    """Both moments from the mean gradient, in full precision.

    Args:
      rule: what is the same in all steps.
      moments: of before.
      gradients: this worker's own.
      gap: int32 ``()``, steps of decay for the second moment.
    """
    mean, finite = allreduce.exact_allreduce(gradients, rule.axis_name, rule.wire_dtype, LARGEST)
    keep, take = decay_over(rule.b2, gap)
    mu = jax.tree.map(rule.moved_mu, moments.mu, mean)
    nu = jax.tree.map(lambda v, g: keep * v + take * jnp.square(g), moments.nu, mean)
    nu = optax.tree.where(finite, nu, moments.nu)
    return Moments(
        optax.tree.where(finite, mu, moments.mu), nu, jax.tree.map(span_means, nu),
        moments.nu_count + jnp.where(finite, gap, 0), moments.errors, finite, jnp.float32(0),
    )


def onebit_round(rule: Rule, moments: Moments, gradients: Any, count: jax.Array) -> Moments:
    """The first moment from the 1-bit mean of the workers'; the second stays.

    Args:
      rule: what is the same in all steps.
      moments: of before.
      gradients: this worker's own.
      count: int32 ``()``, finished steps.
    """
    moved = lambda m, g: rule.moved_mu(m, g.astype(jnp.float32))
    values = jax.tree.map(lambda m, g: Lazy(moved, (m, g)), moments.mu, gradients)
    divisors, limit = None, None
    if rule.precondition:
        divisors = update_units(rule, moments)
        # On the momentum, so that the corrected one stays below the limit.
        limit = UPDATE_LIMIT * rule.mu_correction(count + 1)
    mu, errors, finite, cut, _ = allreduce.compressed_allreduce(
        values, moments.errors, rule.axis_name, rule.quantizer, divisors, limit, moments.mu
    )
    return moments._replace(mu=mu, errors=errors, finite=finite, cut=cut)


def update_units(rule: Rule, moments: Moments) -> Any:
    """By what a first moment is divided to be an update: :class:`Lazy` leaves."""
    correction = 1 / rule.nu_correction(moments.nu_count)

    def root(v: jax.Array, floor: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.maximum(v, floor) * correction) + rule.eps

    return jax.tree.map(
        lambda v, spans: Lazy(root, (v, Spans(rule.variance_floor * spans))),
        moments.nu, moments.nu_spans,
    )


def one_of(
    exact: Any,
    exact_round: Callable[[Moments], Moments],
    onebit_round: Callable[[Moments], Moments],
    moments: Moments,
) -> Moments:
    """The round that is due; a Python bool decides when compiling."""
    otherwise = not exact if isinstance(exact, bool) else ~exact
    return _if(otherwise, onebit_round, _if(exact, exact_round, moments))


def _if(condition: Any, body: Callable[[Any], Any], carry: Any) -> Any:
    """``body(carry)`` if so, else ``carry``, where ``lax.cond`` would copy it.

    A loop of at most one turn is updated in place. A Python bool decides when
    compiling.
    """
    if isinstance(condition, bool):
        return body(carry) if condition else carry
    once = lambda loop: (jnp.bool_(False), body(loop[1]))
    return lax.while_loop(lambda loop: loop[0], once, (condition, carry))[1]


def directions(rule: Rule, moments: Moments, count: jax.Array, floored: Any) -> Any:
    """Adam's updates before the learning rate, float32, not negated.

    Args:
      rule: what is the same in all steps.
      moments: of after the round.
      count: int32 ``()``, finished steps, this one included.
      floored: bool ``()``, whether the floor of the second moment is in force.
    """
    # At least 1, for a skipped first step.
    mu_scale = 1 / rule.mu_correction(jnp.maximum(count, 1))
    nu_scale = 1 / rule.nu_correction(moments.nu_count)
    floor = jnp.where(floored, rule.variance_floor, 0.0)

    def direction(m: jax.Array, v: jax.Array, spans: jax.Array) -> jax.Array:
        v_hat = jnp.maximum(v, over_spans(floor * spans, v)) * nu_scale
        return m * mu_scale / (jnp.sqrt(v_hat) + rule.eps)

    return jax.tree.map(direction, moments.mu, moments.nu, moments.nu_spans)


def nu_norm(rule: Rule, nu: Any, nu_count: jax.Array) -> jax.Array:
    """L1 norm of the bias-corrected second moment, float32 ``()``."""
    norms = [jnp.sum(v) for v in jax.tree.leaves(nu)]
    return workers.sum_over_shards(norms, rule.axis_name) / rule.nu_correction(nu_count)


def round_bytes(rule: Rule, gradients: Any) -> tuple[int, int]:
    """Bytes that each worker sends in an exact round, and in a 1-bit one."""
    w = workers.bound_axis_size(rule.axis_name)
    return (
        allreduce.exact_round_bytes(gradients, w, rule.wire_dtype),
        allreduce.onebit_round_bytes(gradients, w, rule.quantizer),
    )


def bias_correction(decay: Any, steps: jax.Array) -> jax.Array:
    """What ``steps`` steps have put into an average that began at 0."""
    return 1 - jnp.asarray(decay, jnp.float32) ** steps.astype(jnp.float32)


def decay_over(b2: Any, gap: jax.Array) -> tuple[Any, Any]:
    """``b2 ** gap`` and one minus it, equal to Optax's constants at gap 1."""
    log = jnp.log(jnp.asarray(b2, jnp.float32)) * gap.astype(jnp.float32)
    return (
        jnp.where(gap == 1, b2, jnp.exp(log)).astype(jnp.float32),
        jnp.where(gap == 1, 1 - b2, -jnp.expm1(log)).astype(jnp.float32),
    )


def span_means(v: jax.Array) -> jax.Array:
    """Means of a leaf over each 512 entries in a row: float32 ``(spans,)``.

    Where none of them had a gradient, the mean over the leaf stands in.
    """
    n = v.size
    spans = -(-n // packing.SPAN)
    flat = jnp.pad(workers.unshard(v).reshape(-1), (0, spans * packing.SPAN - n))
    if not n:
        return flat
    planes = flat.reshape(spans, packing.SPAN // packing.WORD_BITS, packing.WORD_BITS)
    per_word = tiles.compute(lambda part: packing.sum_planes(part, lambda x: x), planes)
    sums = jnp.sum(per_word, axis=-1)
    entries = np.full(spans, packing.SPAN, np.float32)
    entries[-1] -= spans * packing.SPAN - n
    return jnp.where(sums > 0, sums / entries, jnp.sum(sums) / n)


def over_spans(values: jax.Array, like: jax.Array) -> jax.Array:
    """Each entry's value of its span: ``(spans,)`` to the shape of the leaf ``like``."""
    flat = jnp.repeat(values, packing.SPAN)
    flat = flat if flat.size == like.size else flat[: like.size]
    return workers.reshard_like(flat.reshape(like.shape), like)


def init_spans(p: Any) -> jax.Array:
    """What :func:`span_means` gives of zeros like a parameter."""
    spans = -(-math.prod(jnp.shape(p)) // packing.SPAN)
    return workers.vary(jnp.zeros(spans, jnp.float32), workers.varying_axes(p))
