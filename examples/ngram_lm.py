"""Trains a small transformer over hashed n-grams of bytes: many parameters, little to compute.

    python examples/ngram_lm.py               # Adam and 1-bit Adam, 4 simulated workers

Nearly all of its 2.2 million parameters are embeddings of the last 2 to 5 bytes,
hashed into tables (as in Pagnoni et al. 2024, arXiv 2412.09871), so that data-parallel
training mostly waits for the exchange of their gradients.
"""

import comparison
import flax.linen as nn
import jax
import jax.numpy as jnp
import lm

BATCH = 8  # sequences per step, over all workers
ORDERS = (2, 3, 4, 5)  # n of the n-grams
ROWS = 8192  # of each table
HELD_OUT = 512  # sequences; with half of them optimizers differ more by chance


class NgramTransformer(lm.Transformer):
    """A transformer that also sees the n-gram that ends at each position."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Bytes ``(B, T)`` to vectors ``(B, T, width)``."""
        tables = (nn.Embed(ROWS, self.width)(hashed(tokens, n)) for n in ORDERS)
        return sum(tables, start=super().embed(tokens))


def hashed(tokens: jax.Array, n: int) -> jax.Array:
    """A row for the ``n`` bytes that end at each position, int32 like ``tokens``."""
    code = jnp.zeros(tokens.shape, jnp.uint32)
    for back in range(n):
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        code = code * jnp.uint32(0x9E3779B1) + shifted.astype(jnp.uint32) + 1
    return ((code ^ (code >> 15)) % ROWS).astype(jnp.int32)


def make_task() -> comparison.Task:
    """Predict each next byte of Python's standard library."""
    model = NgramTransformer(context=64, width=64)
    return lm.make_task(model, BATCH, peak_rate=3e-3, held_out=HELD_OUT)


if __name__ == "__main__":
    args = comparison.arguments(__doc__.splitlines()[0], steps=2000).parse_args()
    mesh = comparison.start(args)
    comparison.compare(make_task(), args, mesh, "ngram_lm")
