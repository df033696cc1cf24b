import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax.optimizers import variance


def decisions(policy, steps, norms=None, b2=0.999, cut_at=()):
    """(exact, gap) of each step, from a scan, as in training."""
    cuts = jnp.asarray([t in cut_at for t in range(steps)])
    norms = jnp.ones(steps) if norms is None else jnp.asarray(norms, jnp.float32)

    def step(state, x):
        t, norm, cut = x
        decision, state = policy.update(state, t, variance.Signals(lambda: norm, cut))
        return state, (decision.exact, decision.gap)

    _, (exact, gap) = jax.lax.scan(step, policy.init(b2), (jnp.arange(steps), norms, cuts))
    return np.asarray(exact), np.asarray(gap)


def test_proportional_refresh_as_a_loop_in_python():
    for every, warm, steps in ((16, 100, 2000), (4, 1, 500), (1, 10, 300)):
        exact, gap = decisions(onebit_jax.refresh(every=every, exact_steps=warm), steps)
        last = -1
        for t in range(steps):
            expected = t < warm or t - last >= max(last // every, 1)
            assert exact[t] == expected
            if expected:
                assert gap[t] == min(t - last, 133)  # 0.999 ** 133 is 7/8
                last = t


def test_the_default_is_exact_in_a_tenth_of_2000_steps():
    exact, _ = decisions(onebit_jax.refresh(), 2000)
    assert exact[:100].all()
    assert 140 <= exact.sum() <= 160


@pytest.mark.parametrize(("steps", "wire", "share"), [
    (2_000, None, 8), (10_000, "bfloat16", 20), (100_000, None, 20), (100_000, "bfloat16", 20),
])
def test_a_run_of_the_default_sends_at_most_a_share_of_float32(steps, wire, share):
    exact, _ = decisions(onebit_jax.refresh(), steps)
    bytes_each = 2 if wire else 4
    # In exact rounds so many bytes an entry; in others a bit, and a scale for each 512.
    sent = exact.sum() * bytes_each + (steps - exact.sum()) * (1 / 8 + 4 / 512)
    assert sent <= steps * 4 / share


def test_doubling_refresh_doubles_its_gap_every_k():
    exact, _ = decisions(onebit_jax.refresh(every=4, exact_steps=1, grid="doubling"), 200)
    gaps = np.diff(np.flatnonzero(exact))
    assert gaps[:16].tolist() == [1] * 4 + [2] * 4 + [4] * 4 + [8] * 4


@pytest.mark.parametrize("grid", ["proportional", "doubling"])
def test_a_cut_starts_the_grid_anew(grid):
    policy = onebit_jax.refresh(every=4, exact_steps=10, grid=grid)
    quiet, _ = decisions(policy, 400)
    exact, gap = decisions(policy, 400, cut_at=(301,))
    assert (exact[:301] == quiet[:301]).all()
    assert not quiet[301:308].any()
    assert exact[301:305].all()
    assert gap[301] > 1
    assert gap[302] == 1
    later = np.diff(np.flatnonzero(exact[301:]))
    assert (np.diff(later) >= 0).all()
    assert later[-1] > 4


def test_refresh_until():
    exact, _ = decisions(onebit_jax.refresh(every=2, exact_steps=3, until=20), 100)
    assert exact[3:20].any()
    assert not exact[20:].any()


def test_freeze_after():
    exact, gap = decisions(onebit_jax.freeze_after(7), 20)
    assert exact.tolist() == [True] * 7 + [False] * 13
    assert (gap == 1).all()


@pytest.mark.parametrize("window", [5, 20])
def test_freezes_once_the_norm_is_stable(window):
    """Falling by 1 % a step, then constant: stable one window later."""
    norms = np.concatenate([0.99 ** np.arange(60), np.full(60, 0.99**59)])
    policy = onebit_jax.freeze_when_stable(0.96, window=window, min_steps=10)
    exact, _ = decisions(policy, 120, norms)
    wanted = next(t for t in range(10, 120) if t > window and norms[t] / norms[t - window] >= 0.96)
    assert exact[:wanted].all()
    assert not exact[wanted:].any()


def test_a_growing_norm_is_not_stable():
    policy = onebit_jax.freeze_when_stable(window=5, min_steps=1)
    exact, _ = decisions(policy, 50, 1.1 ** np.arange(50))
    assert exact.all()


def test_no_freeze_before_min_steps_or_without_a_gradient():
    exact, _ = decisions(onebit_jax.freeze_when_stable(window=2, min_steps=30), 60)
    assert exact[:30].all()
    assert not exact[30:].any()
    exact, _ = decisions(onebit_jax.freeze_when_stable(window=2, min_steps=5), 60, np.zeros(60))
    assert exact.all()


def test_the_default_window_comes_from_b2():
    assert onebit_jax.freeze_when_stable().init(0.99).norms.shape == (100,)
    with pytest.raises(ValueError, match="give window= explicitly"):
        jax.jit(onebit_jax.freeze_when_stable().init)(0.99)


def test_freeze_when_stable_in_the_optimizer():
    tx = onebit_jax.onebit_adam(
        1e-2, None, b2=0.9, variance=onebit_jax.freeze_when_stable(min_steps=30)
    )

    def step(state, _):
        updates, state = tx.update(jnp.asarray([1.0, -2.0]), state)
        return state, state[0].rounds.exact

    _, exact = jax.lax.scan(step, tx.init(jnp.zeros(2)), length=60)
    assert int(exact[-1]) == 30  # a constant gradient is stable at once
