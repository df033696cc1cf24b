"""What holds for 1-bit Adam on every tree, whatever finite gradients it is given.

Compared with Optax on the exact mean, as long as all rounds were exact. All workers
keep the same bits, what comes out is finite, and one NaN or Inf skips the step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from hypothesis import strategies as st
from meshes import AXIS, COUNTS
from trees import ROUNDS, Case, U, bits, case, leaf

import onebit_jax
from onebit_jax.optimizers import variance as policies

RATE, B1, B2, EPS = 1e-2, 0.9, 0.999, 1e-8


def own_policy():
    """Begins with a 1-bit round, before there is a second moment."""
    decide = lambda state, step, signals: (policies.Decision(step % 3 == 1, jnp.int32(1)), state)
    return onebit_jax.VariancePolicy(lambda b2: (), decide)


POLICIES = {
    "one": lambda: 1,
    "four": lambda: 4,
    "refresh": lambda: onebit_jax.refresh(every=1, exact_steps=2),
    "doubling": lambda: onebit_jax.refresh(every=1, exact_steps=1, grid="doubling"),
    "stable": lambda: onebit_jax.freeze_when_stable(0.3, window=1, min_steps=2),
    "own": own_policy,
}
#: How many of the finished steps are exact, where that does not depend on gradients.
EXACT = {
    "one": lambda done: min(done, 1),
    "four": lambda done: min(done, 4),
    "own": lambda done: (done + 1) // 3,
}


@dataclasses.dataclass(frozen=True)
class AdamCase(Case):
    policy: str = "refresh"
    precondition: bool = True
    bias_correction: bool = True
    mu_dtype: str | None = None
    weight_decay: float = 0.0


Q = onebit_jax.SignQuantizer
ADAMS = (
    case(AdamCase, {"a": leaf((25, 28)), "b": [leaf(), None, leaf((0,))]}, 4),
    case(AdamCase, [leaf((3,), "bfloat16"), leaf((33,), "float16")], 2, Q(32), "one"),
    case(AdamCase, leaf((1025,)), 3, Q(64, "mean_abs"), "four"),
    case(AdamCase, (leaf((31,)),), 2, Q(None, "mean_abs"), "own", precondition=False),
    case(AdamCase, {"m": leaf((2,)), "e": leaf((0, 4))}, 1, Q(96), "stable", weight_decay=0.1),
    case(AdamCase, [leaf((600,))], 8, Q(512), "doubling", bias_correction=False),
    case(AdamCase, leaf((7, 30)), 3, Q(None), "one", False, False, "bfloat16"),
)


def decays_in_range(spec):
    """Whether Optax's weight decay cannot overflow: it is added in the updates' dtype.

    Without a limit, a float16 update may already be the largest of its numbers.
    """
    half = any(x.dtype == jnp.float16 for x in spec.leaves)
    return not (spec.weight_decay and half and not spec.precondition)


def adam_cases(counts):
    flags = st.booleans()
    return st.builds(
        functools.partial(case, AdamCase), trees.trees(), counts,
        trees.quantizers(), st.sampled_from(tuple(POLICIES)), flags, flags,
        st.sampled_from((None, "bfloat16", "float16")), st.sampled_from((0.0, 0.1)),
    ).filter(decays_in_range)


@functools.lru_cache(maxsize=32)
def adam_program(spec):
    """The state before all rounds, and what comes out of each, on every worker."""
    options = {
        "variance": POLICIES[spec.policy](), "quantizer": spec.quantizer,
        "precondition": spec.precondition, "bias_correction": spec.bias_correction,
        "mu_dtype": spec.mu_dtype,
    }
    if spec.weight_decay:
        tx = onebit_jax.onebit_adamw(RATE, AXIS, weight_decay=spec.weight_decay, **options)
    else:
        tx = onebit_jax.onebit_adam(RATE, AXIS, **options)

    def worker(grads, params):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, params, state)

        start = (params, tx.init(params))
        return start, jax.lax.scan(step, start, grads)[1]

    mapped = jax.vmap(worker, in_axes=(0, None), out_axes=0, axis_name=AXIS)
    return jax.jit(mapped, compiler_options=trees.QUICKLY)


@jax.jit
def optax_adam(mean, good):
    """First and second moments and updates; nothing moves where ``good`` is False."""
    tx = optax.adam(RATE, B1, B2, EPS)

    def step(state, inputs):
        g, good = inputs
        with jax.numpy_dtype_promotion("standard"):
            updates, new = tx.update(g, state)
        state = optax.tree.where(good, new, state)
        return state, (state[0].mu, state[0].nu, jnp.where(good, updates, 0))

    return jax.lax.scan(step, tx.init(mean[0]), (mean, good))[1]


def check_adam(spec, inputs):
    grads, good = inputs.arrays(spec.tree, spec.w, ROUNDS)
    rng = np.random.default_rng(inputs.seed)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), spec.tree)
    (_, start), trained = jax.tree.map(np.asarray, adam_program(spec)(grads, params))
    updates, trained_params, state = trained
    adam = state[0]
    shared = adam._replace(errors=(), rounds=adam.rounds._replace(sent=()))
    trees.assert_replicated((updates, trained_params, shared, state[1:]))
    trees.assert_finite((updates, trained_params, state))
    rounds = jax.tree.map(lambda x: x[0], adam.rounds)
    done = np.arange(1, ROUNDS + 1)
    np.testing.assert_array_equal(rounds.exact + rounds.onebit + rounds.skipped, done)
    np.testing.assert_array_equal(rounds.exact + rounds.onebit, adam.count[0])
    if spec.policy in EXACT:
        assert rounds.exact.tolist() == [EXACT[spec.policy](int(n)) for n in adam.count[0]]
    skipped = np.diff(rounds.skipped, prepend=0) > 0
    assert skipped[~good].all()
    peak = max(np.abs(np.nan_to_num(g.astype(np.float64), posinf=0, neginf=0)).max(initial=0)
               for g in jax.tree.leaves(grads))
    # In units of an epsilon of 1e-8, only more than that has a square that overflows.
    assert not skipped[good].any() or peak > 1e8
    check_skipped(skipped, start, params, trained)
    onebit = np.diff(rounds.onebit, prepend=0) > 0
    check_onebit(spec, onebit, start[0], trained)
    if inputs.moderate:
        exact = (rounds.onebit == 0) & good
        check_exact(spec, exact, grads, good, updates, adam)


def check_skipped(skipped, start, params, trained):
    """All zero, and the state as before but for two counts."""
    updates, trained_params, state = trained
    held = lambda s: (s[0]._replace(rounds=s[0].rounds._replace(skipped=(), sent=())), s[1:])
    first = lambda p, x: np.broadcast_to(p, (x.shape[0], *x.shape[2:]))
    before = jax.tree.leaves((jax.tree.map(first, params, trained_params), held(start)))
    after = jax.tree.leaves((trained_params, held(state)))
    for t in np.flatnonzero(skipped):
        for x in jax.tree.leaves(updates):
            assert not x[:, t].any()
        for old, new in zip(before, after, strict=True):
            old = new[:, t - 1] if t else old
            np.testing.assert_array_equal(bits(new[:, t]), bits(old))


def check_onebit(spec, onebit, start, trained):
    """The second moment stays, and an update has at most its limit."""
    updates, _, (adam, *_) = trained
    moment = lambda s: jax.tree.leaves((s.nu, s.nu_spans, s.nu_count))
    for t in np.flatnonzero(onebit):
        for old, new in zip(moment(start), moment(adam), strict=True):
            old = new[:, t - 1] if t else old
            np.testing.assert_array_equal(bits(new[:, t]), bits(old))
        if spec.precondition and not spec.weight_decay:
            for u in jax.tree.leaves(updates):
                slack = 1e-5 + 2 * float(jnp.finfo(u.dtype).eps)
                assert np.abs(u[:, t].astype(np.float64)).max(initial=0) <= 8 * RATE * (1 + slack)


def check_exact(spec, exact, grads, good, updates, adam):
    """Moments and updates of the exact rounds before any other, in flat vectors.

    The sum over workers and each step's arithmetic is rounded: k = w + 2 ROUNDS times
    relative to the largest gradient G of the entry. The root of the second moment is a
    norm of gradients, so it is off by as much; the update, their ratio, by k U G times
    (1 + |update|) / root, and by the rounding of the terms of its own.
    """
    flat = lambda tree, *lead: np.concatenate(
        [np.asarray(x, np.float64).reshape(*lead, -1) for x in jax.tree.leaves(tree)], axis=-1
    )
    g = np.where(good[:, None], flat(grads, spec.w, ROUNDS), 0)
    n = g.shape[-1]
    mean = np.pad(g.mean(axis=0), ((0, 0), (0, -n % 4096))).astype(np.float32)
    mu, nu, wanted = (np.asarray(x, np.float64)[:, :n] for x in optax_adam(mean, good))
    k, size = spec.w + 2 * ROUNDS, np.maximum.accumulate(np.abs(g).max(axis=0), axis=0)
    close = lambda got, ref, off: np.testing.assert_array_less(
        np.abs(got - ref)[exact], off[exact] + 1e-37
    )
    if spec.mu_dtype is None:
        close(flat(adam.mu, spec.w, ROUNDS)[0], mu, k * U * size)
    close(flat(adam.nu, spec.w, ROUNDS)[0], nu, 2 * k * U * size**2)
    if spec.mu_dtype is None and spec.bias_correction and not spec.weight_decay:
        steps = np.maximum(good.cumsum(), 1)[:, None]
        root = np.sqrt(nu / (1 - B2**steps)) + EPS
        # In the dtype of the leaf: the direction, the rate and their product are rounded
        # by half an epsilon each, and by half the least number of all.
        infos = [(x.size, jnp.finfo(x.dtype)) for x in spec.leaves]
        each = lambda f: np.concatenate([np.full(size, f(info)) for size, info in infos])
        own = each(lambda info: 1.5 * float(info.eps) * (1 + float(info.eps)))
        least = each(lambda info: float(info.smallest_subnormal))
        ratio = np.abs(wanted) / RATE
        off = k * U * size * (1 + ratio) / root + (k * U + own) * ratio
        close(flat(updates, spec.w, ROUNDS)[0], wanted, RATE * off + least)


@trees.quick(50, trees.with_inputs(st.sampled_from(ADAMS)))
def test_adam_on_known_trees(example):
    check_adam(*example)


@trees.quick(4, trees.with_inputs(adam_cases(st.sampled_from(COUNTS))))
def test_adam_on_other_trees(example):
    check_adam(*example)


@pytest.mark.parametrize("w", COUNTS)
@trees.slow(100, st.data())
def test_adam_on_many_trees(w, data):
    check_adam(*data.draw(trees.with_inputs(adam_cases(st.just(w)))))
