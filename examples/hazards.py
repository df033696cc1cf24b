"""What breaks 1-bit Adam, and which variant: four small tasks, each with one known hazard.

    python examples/hazards.py

Four simulated workers. Every variant has the same exact rounds at first, 15 % of the steps,
or 2 % where that is the hazard; "breaks" is a held-out loss more than 10 % above Adam's.
"""

import argparse
from collections.abc import Callable

import cnn
import comparison
import flax.linen as nn
import jax
import jax.numpy as jnp
import lm
import numpy as np
import optax
import results_table
from rich.console import Console

import onebit_jax

AXIS = comparison.AXIS
BREAKS = 0.10
#: Exact steps of 1,000 where they are not the hazard.
WARMUP = 150

VARIANTS: dict[str, Callable] = {
    "adam": comparison.OPTIMIZERS["adam"],
    "paper": lambda rate, exact: onebit_jax.paper_1bit_adam(rate, AXIS, exact),
    "frozen": lambda rate, exact: onebit_jax.onebit_adam(rate, AXIS, variance=exact),
    "refreshed": lambda rate, exact: onebit_jax.onebit_adam(
        rate, AXIS, variance=onebit_jax.refresh(exact_steps=exact)
    ),
}


def short_warmup() -> comparison.Task:
    """The second moment is frozen while the gradients still change."""
    return lm.make_task(lm.Transformer(context=64, width=64), 16, peak_rate=3e-3)


class Bag(nn.Module):
    """Sums embeddings; words ``(B, T)`` to one logit ``(B,)``."""

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.Embed(4096, 16)(words).sum(axis=1))[:, 0]


def unseen_rows() -> comparison.Task:
    """Half of the rows of an embedding appear only after the exact rounds, and many rarely."""
    weights = np.random.default_rng(1).normal(size=4096)
    frequency = 1 / np.arange(1, 2049)

    def draw(rng: np.random.Generator, n: int, late: bool) -> tuple[np.ndarray, np.ndarray]:
        words = rng.choice(2048, size=(n, 8), p=frequency / frequency.sum())
        words = 2 * words + (rng.integers(0, 2, words.shape) if late else 0)
        return words.astype(np.int32), (weights[words].sum(axis=1) > 0).astype(np.float32)

    def loss_fn(params: dict, batch: tuple) -> jax.Array:
        logits = Bag().apply({"params": params}, batch[0])
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch[1]))

    held = draw(np.random.default_rng(2), 4096, late=True)
    held_loss = jax.jit(loss_fn)
    return comparison.Task(
        init=lambda seed: (Bag().init(jax.random.key(seed), held[0][:1])["params"], None),
        loss_fn=loss_fn,
        mutable=None,
        batch=lambda seed, step: draw(np.random.default_rng((seed, step)), 256, step > WARMUP),
        evaluate=lambda params, _: {"loss": float(held_loss(params, held))},
        peak_rate=1e-2,
    )


def unlike_scales() -> comparison.Task:
    """Gradients within one array differ by a factor of 10,000."""
    images, labels, held_images, held_labels = cnn.load(None)
    scales = np.geomspace(1e-2, 1e2, 64, dtype=np.float32)
    flat = lambda x: x.reshape(len(x), -1) * scales
    model = nn.Sequential([nn.Dense(64, use_bias=False), nn.relu, nn.Dense(10)])

    def init(seed: int) -> tuple[dict, None]:
        params = model.init(jax.random.key(seed), flat(images[:1]))["params"]
        first = params["layers_0"]
        return {**params, "layers_0": {"kernel": first["kernel"] / scales[:, None]}}, None

    def loss_fn(params: dict, batch: tuple) -> jax.Array:
        # The same function as without scales, but for the units of the first layer.
        logits = model.apply({"params": params}, batch[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    def batch(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.random.default_rng((seed, step)).integers(0, len(images), 128)
        return flat(images[chosen]), labels[chosen]

    held = flat(held_images), held_labels
    held_loss = jax.jit(loss_fn)
    evaluate = lambda params, _: {"loss": float(held_loss(params, held))}
    return comparison.Task(init, loss_fn, None, batch, evaluate, peak_rate=3e-4)


def batch_norm() -> comparison.Task:
    """A ResNet on digits: parameters whose scale does not matter, and running statistics."""
    return cnn.make_task(None)


#: The task, its steps, and the exact rounds at first.
HAZARDS = {
    "warm-up of 2 %": (short_warmup, 1000, 20),
    "rows not seen in the warm-up": (unseen_rows, 1000, WARMUP),
    "gradients of unlike scales": (unlike_scales, 1000, WARMUP),
    "batch norm": (batch_norm, 200, 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="of each task, for a quick look")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rows = [["hazard", "optimizer", "held-out loss", "against Adam", "breaks"], ["---"] * 5]
    mesh = None
    for hazard, (make_task, steps, exact) in HAZARDS.items():
        task, steps = make_task(), chosen.steps or steps
        args = comparison.arguments("", steps).parse_args(["--seed", str(chosen.seed)])
        mesh = mesh or comparison.start(args)
        rate = comparison.schedule(task.peak_rate, steps)
        losses = {}
        for name, build in VARIANTS.items():
            tx = build(rate, min(exact, steps))
            run = comparison.train(task, name, tx, args, mesh, Console(stderr=True))
            loss = losses[name] = run["eval_loss"]
            above = loss / losses["adam"] - 1
            breaks = "" if name == "adam" else "yes" if not above <= BREAKS else "no"
            rows.append([hazard, name, f"{loss:.4f}", f"{above:+.1%}", breaks])
    print(results_table.markdown(rows))


if __name__ == "__main__":
    main()
