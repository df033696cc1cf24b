"""Trains a small ResNet with batch norm on images.

    python examples/cnn.py                    # scikit-learn's digits
    python examples/cnn.py --data DIR         # IDX files, such as Fashion-MNIST
"""

import argparse
import gzip
import pathlib

import comparison
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 256  # images per step, over all workers
WIDTHS = (16, 32, 64)


class ResNet(nn.Module):
    """Three residual blocks; images ``(B, H, W, 1)`` to logits ``(B, 10)``."""

    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def normed(x: jax.Array, features: int, stride: int, size: int = 3) -> jax.Array:
            x = nn.Conv(features, (size, size), stride, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(x)

        x = nn.relu(normed(x, WIDTHS[0], 1))
        for stage, features in enumerate(WIDTHS):
            stride = 1 if stage == 0 else 2
            y = normed(nn.relu(normed(x, features, stride)), features, 1)
            shortcut = x if stage == 0 else normed(x, features, stride, size=1)
            x = nn.relu(y + shortcut)
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


def read_idx(path: pathlib.Path) -> np.ndarray:
    """An IDX file, gzipped or not, of unsigned bytes."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        data = file.read()
    if data[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path}: not an IDX file of unsigned bytes")
    dimensions = data[3]
    shape = np.frombuffer(data, ">u4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def idx_folder(folder: pathlib.Path) -> list[np.ndarray]:
    """Training images and labels, test images and labels, from the usual names."""
    result = []
    for name in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        found = sorted(folder.glob(f"{name}*ubyte*"))
        if not found:
            raise SystemExit(f"{folder}: no file {name}*ubyte[.gz]")
        result.append(read_idx(found[0]))
    return result


def digits() -> list[np.ndarray]:
    """scikit-learn's 1,797 digits of 8 x 8, every sixth held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) * 255 / 16
    held = np.arange(len(images)) % 6 == 0
    return [images[~held], labels[~held], images[held], labels[held]]


def load(folder: pathlib.Path | None) -> list[np.ndarray]:
    """Images as float32 ``(N, H, W, 1)`` with the training set's mean 0 and variance 1."""
    parts = digits() if folder is None else idx_folder(folder)
    mean, deviation = parts[0].mean(), parts[0].std()
    parts[::2] = [((x - mean) / deviation).astype(np.float32)[..., None] for x in parts[::2]]
    parts[1::2] = [y.astype(np.int32) for y in parts[1::2]]
    return parts


def loss_fn(params: dict, batch_stats: dict, batch: tuple) -> tuple[jax.Array, dict]:
    images, labels = batch
    logits, changed = ResNet(train=True).apply(
        {"params": params, "batch_stats": batch_stats}, images, mutable=["batch_stats"]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses), changed["batch_stats"]


@jax.jit
def scores(params: dict, batch_stats: dict, images: jax.Array, labels: jax.Array) -> tuple:
    """Summed loss and number of correct answers."""
    logits = ResNet(train=False).apply({"params": params, "batch_stats": batch_stats}, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses), jnp.sum(jnp.argmax(logits, axis=-1) == labels)


def make_task(folder: pathlib.Path | None) -> comparison.Task:
    images, labels, held_images, held_labels = load(folder)

    def init(seed: int) -> tuple[dict, dict]:
        variables = ResNet(train=True).init(jax.random.key(seed), images[:1])
        return variables["params"], variables["batch_stats"]

    def batch(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        per_epoch = max(len(images) // BATCH, 1)
        epoch, part = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(images))
        chosen = order[part * BATCH : (part + 1) * BATCH]
        return images[chosen], labels[chosen]

    def evaluate(params: dict, batch_stats: dict) -> dict[str, float]:
        totals = np.zeros(2)
        for i in range(0, len(held_images), 1000):
            part = slice(i, i + 1000)
            totals += scores(params, batch_stats, held_images[part], held_labels[part])
        loss, correct = totals / len(held_images)
        return {"loss": float(loss), "accuracy": float(correct)}

    return comparison.Task(init, loss_fn, "batch_stats", batch, evaluate, peak_rate=3e-3)


def parser() -> argparse.ArgumentParser:
    parser = comparison.arguments(__doc__.splitlines()[0], steps=500)
    parser.add_argument("--data", type=pathlib.Path, metavar="DIR", help="folder of IDX files")
    return parser


if __name__ == "__main__":
    args = parser().parse_args()
    mesh = comparison.start(args)
    comparison.compare(make_task(args.data), args, mesh, "cnn")
