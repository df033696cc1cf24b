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

CONTEXT = 128
BATCH = 16  # sequences per step, over all workers
WIDTH, LAYERS, HEADS = 128, 2, 4


class Transformer(nn.Module):
    """Decoder with learned positions; bytes ``(B, T)`` to logits ``(B, T, 256)``."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, WIDTH)(tokens) + nn.Embed(CONTEXT, WIDTH)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(y, mask=mask)
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(y)))
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


def windows(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Windows of ``CONTEXT + 1`` bytes, int32 ``(len(starts), CONTEXT + 1)``."""
    return data[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    logits = Transformer().apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def init(seed: int) -> tuple[dict, None]:
    tokens = jnp.zeros((1, CONTEXT), jnp.int32)
    return Transformer().init(jax.random.key(seed), tokens)["params"], None


def batch(seed: int, step: int) -> np.ndarray:
    train, _ = text()
    starts = np.random.default_rng((seed, step)).integers(0, len(train) - CONTEXT - 1, BATCH)
    return windows(train, starts)


def evaluate(params: dict, model_state: None) -> dict[str, float]:
    _, held = text()
    starts = np.linspace(0, len(held) - CONTEXT - 2, 256).astype(int)
    parts = windows(held, starts).reshape(4, 64, CONTEXT + 1)
    return {"loss": float(np.mean([_eval_loss(params, part) for part in parts]))}


_eval_loss = jax.jit(loss_fn)

if __name__ == "__main__":
    args = comparison.arguments(__doc__.splitlines()[0], steps=600).parse_args()
    mesh = comparison.start(args)
    task = comparison.Task(init, loss_fn, None, batch, evaluate, peak_rate=3e-3)
    comparison.compare(task, args, mesh, "lm")
