"""One of several processes under jax.distributed; started by test_distributed.py.

    python two_processes.py COORDINATOR COUNT RANK OUT
"""

import sys

import jax
import numpy as np
import pytest

import onebit_jax
from onebit_jax.compression import allreduce

#: So that several processes send even this small model in pieces.
allreduce.PIECE_BYTES = 12


def main(coordinator, count, rank, out):
    jax.distributed.initialize(coordinator, int(count), int(rank))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 40)).astype(np.float32)
    y = np.sin(x @ rng.normal(size=(40, 3))).astype(np.float32)

    def loss_fn(params, batch):
        return ((batch[0] @ params["w"] + params["b"][None] - batch[1]) ** 2).mean()

    params = {"w": np.zeros((40, 3), np.float32), "b": np.zeros(3, np.float32)}
    tx = onebit_jax.onebit_adamw(1e-2, "data", variance=onebit_jax.refresh(4, exact_steps=5))
    step = onebit_jax.make_train_step(loss_fn, tx, mesh)
    with jax.set_mesh(mesh):
        state = (params, tx.init(params))
        if jax.process_count() > 1:
            other = dict(params, b=params["b"] + jax.process_index())
            with pytest.raises(ValueError, match="the processes hold different states"):
                step.place((other, state[1]))
    rows = len(x) // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    losses = []
    for t in range(40):
        part = x[mine].copy()
        if t == 20 and jax.process_index() == jax.process_count() - 1:
            part[-1, 0] = np.nan
        state, metrics = step(step.place(state), (part, y[mine]))
        losses.append(float(metrics["loss"]))
    params, opt_state = state
    if jax.process_index() == 0:
        onebit_jax.metrics(opt_state)  # in one process alone
    done = onebit_jax.metrics(opt_state)
    errors = (done["worker_error"], done["server_error"] or 0.0)
    np.savez(
        out,
        losses=losses,
        sent=onebit_jax.bytes_sent(opt_state),
        rounds=[v for k, v in done.items() if k.endswith("_rounds")],
        errors=errors,
        **{k: v.addressable_shards[0].data for k, v in params.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
