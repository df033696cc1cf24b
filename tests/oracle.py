"""A plain NumPy version of the method, written from the equations; no JAX.

Works on flat float64 vectors: ``values[i]`` is worker i's. An entry within
``TIE`` of zero, relative to its scale, has a sign that float32 cannot know;
there, and only there, a hint from the code under test decides.
"""

import math

import numpy as np


def chunk(n: int, w: int) -> int:
    """Entries that each of w workers serves: whole tiles of 1024, or words of 32."""
    unit = 1024 if n >= 65536 * w else 32
    return unit * math.ceil(math.ceil(n / w) / unit)


def blocks(length: int, block_size: int | None) -> list[np.ndarray]:
    """Index sets of the blocks of one chunk of ``length`` entries.

    A block is block_size / 32 words in a row. Words come in tiles of T: bit j of
    word k of a tile is its entry j * T + k. T is 32, or all words in one tile
    where that does not divide them.
    """
    words = length // 32
    t = 32 if words % 32 == 0 else words
    of_word = [32 * t * (k // t) + np.arange(32) * t + k % t for k in range(words)]
    per_block = max(words, 1) if block_size is None else block_size // 32
    starts = range(0, words, per_block)
    return [np.concatenate(of_word[first : first + per_block]) for first in starts]


def magnitude(x: np.ndarray, scale: str, gain: float) -> float:
    if len(x) == 0:
        return 0.0
    return gain * float(np.sqrt(np.mean(x**2)) if scale == "rms" else np.mean(np.abs(x)))


TIE = 1e-5


def quantize(x: np.ndarray, scale: str, gain: float, hint: np.ndarray | None) -> np.ndarray:
    """Q(x) of one block."""
    s = magnitude(x, scale, gain)
    positive = x >= 0
    if hint is not None:
        positive = np.where(np.abs(x) <= TIE * s, hint >= 0, positive)
    return np.where(positive, s, -s)


def quantize_chunks(
    x: np.ndarray, w: int, block_size: int | None, scale: str, gain: float, hint=None,
    one_scale: bool = True,
) -> np.ndarray:
    """Q(x) in blocks within the workers' chunks.

    ``block_size=None`` is one scale for the leaf, or for each chunk where
    ``one_scale`` is False, as a server knows only its own.
    """
    n, length = len(x), chunk(len(x), w)
    if block_size is None and one_scale:
        return quantize(x, scale, gain, hint)
    q = np.zeros(n)
    for r in range(w):
        for block in blocks(length, block_size):
            index = r * length + block
            index = index[index < n]
            part = None if hint is None else hint[index]
            q[index] = quantize(x[index], scale, gain, part)
    return q


class CompressedMean:
    """The 1-bit mean with both errors, for w workers and one leaf of n."""

    def __init__(self, n, w, block_size=512, scale="rms", gain=1.0):
        self.n, self.w = n, w
        self.options = (block_size, scale, gain)
        self.worker_error = np.zeros((w, n))
        self.server_error = np.zeros(n)

    def step(
        self, values, divisor=None, sent_hint=None, mean_hint=None, limit=np.inf
    ) -> np.ndarray:
        d = np.ones(self.n) if divisor is None else divisor
        hints = [None] * self.w if sent_hint is None else sent_hint
        c = values + self.worker_error
        direct = self.w <= 2  # all bits to all workers, no server
        q = [
            d * quantize_chunks(row / d, 1 if direct else self.w, *self.options, hint)
            for row, hint in zip(c, hints, strict=True)
        ]
        self.worker_error = c - np.stack(q)
        if direct:
            self.cut = (np.abs(q).mean(axis=0) / d).max(initial=0) >= limit
            return d * np.clip(np.mean(q, axis=0) / d, -limit, limit)
        s = np.mean(q, axis=0) + self.server_error
        y = quantize_chunks(s / d, self.w, *self.options, mean_hint, one_scale=False)
        m = d * np.clip(y, -limit, limit)
        self.server_error = d * np.clip((s - m) / d, -limit, limit)
        self.cut = np.abs(y).max(initial=0) >= limit
        return m


class OnebitAdam:
    """Moments and direction of 1-bit Adam for one leaf; design as in the docs."""

    def __init__(self, n, w, b1=0.9, b2=0.999, eps=1e-8, floor=1e-2, precondition=True,
                 bias_correction=True, **quantizer):
        self.mean = CompressedMean(n, w, **quantizer)
        self.b1, self.b2, self.eps, self.floor = b1, b2, eps, floor
        self.precondition, self.bias_correction = precondition, bias_correction
        self.m, self.v = np.zeros(n), np.zeros(n)
        self.t = self.decay_steps = self.onebit_rounds = 0

    def v_hat(self, floored: bool) -> np.ndarray:
        v = self.v / (1 - self.b2**self.decay_steps) if self.bias_correction else self.v
        if not floored:
            return v
        near = [v[i : i + 512].mean() or v.mean() for i in range(0, len(v), 512)]
        return np.maximum(v, self.floor * np.repeat(near, 512)[: len(v)])

    def step(self, gradients: np.ndarray, exact: bool, gap: int = 1) -> np.ndarray:
        self.t += 1
        if exact:
            g = gradients.mean(axis=0)
            self.m = self.b1 * self.m + (1 - self.b1) * g
            self.v = self.b2**gap * self.v + (1 - self.b2**gap) * g**2
            self.decay_steps += gap
        else:
            d = np.sqrt(self.v_hat(True)) + self.eps if self.precondition else None
            limit = 8.0 if self.precondition else np.inf
            self.m = self.mean.step(self.b1 * self.m + (1 - self.b1) * gradients, d, limit=limit)
            self.onebit_rounds += 1
        m_hat = self.m / (1 - self.b1**self.t) if self.bias_correction else self.m
        return m_hat / (np.sqrt(self.v_hat(self.onebit_rounds > 0)) + self.eps)
