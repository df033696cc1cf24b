"""What tests of compiled programs have in common: a policy and a tree."""

import jax.numpy as jnp

from onebit_jax.optimizers.variance import Decision, VariancePolicy


def always(exact):
    """A static policy: only one kind of round is compiled."""
    return VariancePolicy(lambda b2: (), lambda s, t, signals: (Decision(exact, jnp.int32(1)), s))


def gpt2_leaves(width, vocabulary, context, blocks):
    """Shapes of a GPT-2: embeddings, and twelve leaves a block."""
    yield from ((vocabulary, width), (context, width))
    for _ in range(blocks):
        yield from ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width))
        yield (width,)
    yield from ((width,), (width,))
