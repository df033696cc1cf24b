"""Trains a byte-level transformer on the sources of Python's standard library.

    python examples/lm.py                     # Adam and 1-bit Adam, 4 simulated workers
    python examples/lm.py --optimizer paper   # one optimizer
    python examples/lm.py --distributed --coordinator localhost:1234 \\
        --num-processes 2 --process-id 0      # one worker per process
"""

import functools
import pathlib
import sysconfig
import zlib

import comparison
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 16  # sequences per step, over all workers


class Transformer(nn.Module):
    """Decoder with learned positions; bytes ``(B, T)`` to logits ``(B, T, 256)``."""

    context: int = 128
    width: int = 128
    layers: int = 2
    heads: int = 4

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Bytes ``(B, T)`` to vectors ``(B, T, width)``."""
        x = nn.Embed(256, self.width)(tokens)
        return x + nn.Embed(self.context, self.width)(jnp.arange(tokens.shape[1]))

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads)(y, mask=mask)
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(y)))
        return nn.Dense(256)(nn.LayerNorm()(x))


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's modules: training and held-out files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
            continue
        held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
        parts[held_out].append(path.read_bytes())
    train, held = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    return train, held


def make_task(
    model: Transformer, sequences: int, peak_rate: float, held_out: int = 256
) -> comparison.Task:
    """Predict each next byte, from so many sequences per step over all workers.

    The held-out loss is that of ``held_out`` sequences, a multiple of 64.
    """
    train, held = text()

    def windows(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return data[starts[:, None] + np.arange(model.context + 1)].astype(np.int32)

    def init(seed: int) -> tuple[dict, None]:
        tokens = jnp.zeros((1, model.context), jnp.int32)
        return model.init(jax.random.key(seed), tokens)["params"], None

    def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    def batch(seed: int, step: int) -> np.ndarray:
        last = len(train) - model.context - 1
        return windows(train, np.random.default_rng((seed, step)).integers(0, last, sequences))

    held_loss = jax.jit(loss_fn)

    def evaluate(params: dict, model_state: None) -> dict[str, float]:
        starts = np.linspace(0, len(held) - model.context - 2, held_out).astype(int)
        parts = windows(held, starts).reshape(-1, 64, model.context + 1)
        return {"loss": float(np.mean([held_loss(params, part) for part in parts]))}

    return comparison.Task(init, loss_fn, None, batch, evaluate, peak_rate)


if __name__ == "__main__":
    args = comparison.arguments(__doc__.splitlines()[0], steps=600).parse_args()
    mesh = comparison.start(args)
    comparison.compare(make_task(Transformer(), BATCH, peak_rate=3e-3), args, mesh, "lm")
