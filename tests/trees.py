"""Random pytrees and what is put into them, for property-based tests.

Compiling takes most of the time, so the default run tries many inputs on few
trees, the same ones every time, and ``make test-slow`` many trees, others every
time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import onebit_jax

DTYPES = ("float32", "bfloat16", "float16")
#: Scalars, empty ones, fewer entries than workers, around words, blocks and tiles.
SHAPES = ((), (0,), (1,), (0, 4), (2,), (3,), (2, 3), (31,), (32,), (33,), (4, 8, 5), (511,),
          (512,), (513,), (25, 28), (1024,), (1025,), (3, 1000))
BLOCK_SIZES = (512, 32, 64, 96, 1024, None)

MODERATE = ("normal", "zeros", "constant", "sparse", "scaled")
EXTREME = ("negative zeros", "denormal", "tiny", "large", "huge", "mixed")

ROUNDS = 6
U = 2.0**-24  # largest relative error of one rounding to float32
TINY = float(np.finfo(np.float32).tiny)  # what is smaller may be flushed to zero
LARGEST = float(np.finfo(np.float32).max)
#: Half the time to compile. Nothing here runs for long.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def quick(examples, strategy):
    """The same examples in every run."""
    chosen = settings(
        max_examples=examples, derandomize=True, deadline=None, print_blob=True, database=None
    )
    return lambda body: chosen(given(strategy)(body))


def slow(examples, strategy):
    """Other examples in every run."""
    chosen = settings(max_examples=examples, derandomize=False, deadline=None, print_blob=True)
    return lambda body: pytest.mark.slow(chosen(given(strategy)(body)))


def leaf(shape=(), dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def trees():
    """Nested containers of one to four leaves, and of None."""
    leaves = st.builds(
        leaf, st.sampled_from(SHAPES) | st.tuples(st.integers(1, 1500)), st.sampled_from(DTYPES)
    )
    names = st.sampled_from(("b", "a", "mu", "0"))

    def inside(children):
        several = st.lists(children, max_size=3)
        return several | several.map(tuple) | st.dictionaries(names, children, max_size=3)

    nested = st.recursive(leaves | st.none(), inside, max_leaves=4)
    return nested.filter(lambda tree: 1 <= len(jax.tree.leaves(tree)) <= 4)


def quantizers():
    return st.builds(
        onebit_jax.SignQuantizer, st.sampled_from(BLOCK_SIZES),
        st.sampled_from(("rms", "mean_abs")), st.sampled_from((1.0, 0.5)),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """What a program is compiled for."""

    leaves: tuple[Any, ...]
    treedef: Any
    w: int
    quantizer: onebit_jax.SignQuantizer = onebit_jax.SignQuantizer()

    @property
    def tree(self):
        return self.treedef.unflatten(self.leaves)


def case(kind, tree, w, *args, **options):
    """A :class:`Case`, or a kind of it, of a tree of leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return kind(tuple(leaves), treedef, w, *args, **options)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the workers' gradients are, in few words.

    Attributes:
      kinds: of each leaf, one of ``MODERATE`` or ``EXTREME``.
      seed: of the random numbers.
      spikes: ``(round, worker, leaf, entry, value)``, modulo how many there are.
      bad: the same for values that are not finite.
    """

    kinds: tuple[str, ...]
    seed: int = 0
    spikes: tuple = ()
    bad: tuple = ()

    @property
    def moderate(self):
        return not self.spikes and all(kind in MODERATE for kind in self.kinds)

    def arrays(self, tree, w, rounds):
        """Leaves ``(w, rounds, *shape)``, and in which rounds all of them are finite."""
        rng = np.random.default_rng(self.seed)
        like, treedef = jax.tree.flatten(tree)
        leaves = [
            cast(fill(kind, (w, rounds, *x.shape), rng), x.dtype)
            for kind, x in zip(self.kinds, like, strict=True)
        ]
        good = np.ones(rounds, bool)
        full = [x for x in leaves if x.size]
        for t, i, which, entry, value in (*self.spikes, *self.bad) if full else ():
            x = full[which % len(full)]
            flat = x.reshape(w, rounds, -1)  # a view
            flat[i % w, t % rounds, entry % flat.shape[-1]] = cast(np.float64(value), x.dtype)
            good[t % rounds] &= bool(np.isfinite(value))
        return treedef.unflatten(leaves), good


def cast(x, dtype):
    """To a dtype, without overflow of what is finite."""
    largest = float(jnp.finfo(dtype).max)
    return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)


def fill(kind, shape, rng):
    """Float64 numbers; the workers and rounds are the first two axes."""
    normal = rng.normal(size=shape)
    match kind:
        case "normal":
            return normal
        case "zeros":
            return np.zeros(shape)
        case "negative zeros":
            return np.full(shape, -0.0)
        case "constant":
            return np.full(shape, rng.normal())
        case "sparse":
            return np.where(rng.random(shape) < 0.02, normal, 0.0)
        case "scaled":
            return normal * 10 ** rng.uniform(-3, 3, (1, 1, *shape[2:]))
        case "denormal":
            return normal * 1e-40
        case "tiny":
            return normal * 1e-30
        case "large":
            return normal * 10 ** rng.uniform(10, 25)
        case "huge":
            return np.sign(normal) * rng.uniform(1e37, 3.4e38, shape)
        case "mixed":
            return np.sign(normal) * 10 ** rng.uniform(-45, 38.5, shape)
    raise ValueError(kind)


def places(values, most):
    index = st.integers(0, 2000)
    return st.lists(st.tuples(index, index, index, index, values), max_size=most).map(tuple)


@st.composite
def inputs(draw, tree):
    number = len(jax.tree.leaves(tree))
    kinds = MODERATE + EXTREME if draw(st.booleans()) else MODERATE
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return Inputs(
        tuple(draw(st.sampled_from(kinds)) for _ in range(number)),
        draw(st.integers(0, 2**32 - 1)),
        draw(places(finite, 3)) if kinds != MODERATE else (),
        draw(places(st.sampled_from((np.nan, np.inf, -np.inf)), 2)),
    )


@st.composite
def with_inputs(draw, cases):
    """A case and inputs for its tree."""
    case = draw(cases)
    return case, draw(inputs(case.tree))


def bits(x):
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x


def assert_replicated(tree):
    for x in map(bits, jax.tree.leaves(tree)):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


def assert_finite(tree):
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert np.isfinite(np.asarray(x, np.float64)).all()
