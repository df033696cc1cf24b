"""Trains until something ends it; started by test_killed.py.

    python endless_training.py FOLDER HEARTBEAT SHUTDOWN [SIGNAL]

HEARTBEAT and SHUTDOWN are timeouts of jax.distributed.initialize, in seconds.

The environment has what ``onebit_jax launch`` sets. After 20 steps the process writes
FOLDER/RANK, and rank 1 gives itself the SIGNAL, if there is one. On SIGUSR1 it sleeps for
ever, in Python. A start after the first ends well there.
"""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np

import onebit_jax


def main(folder, heartbeat, shutdown, number=None):
    count, rank = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], count, rank,
        heartbeat_timeout_seconds=int(heartbeat), shutdown_timeout_seconds=int(shutdown),
    )
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e6))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    x = np.full((4, 40), 1.0 + rank, np.float32)

    def loss_fn(params, batch):
        return ((batch @ params["w"] - 1) ** 2).mean()

    tx = onebit_jax.onebit_adam(1e-3, "data", variance=onebit_jax.refresh(4, exact_steps=5))
    step = onebit_jax.make_train_step(loss_fn, tx, mesh)
    params = {"w": np.zeros((40, 3), np.float32)}
    with jax.set_mesh(mesh):
        state = step.place((params, tx.init(params)))
    t = 0
    while True:
        state, metrics = step(state, x)
        float(metrics["loss"])
        t += 1
        if t == 20:
            pathlib.Path(folder, str(rank)).touch()
            if os.environ.get("ONEBIT_RESTARTS", "0") != "0":
                return
            if number and rank == 1:
                os.kill(os.getpid(), int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
