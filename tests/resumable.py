"""A small training that survives its own death; started by launch, see test_resume.py.

    python resumable.py FOLDER STEPS --every 10 --die 25

Each process writes FOLDER/rank-R.json at the end. The batch and everything else that a
step uses follows from its number, so that a resumed run can equal an unbroken one.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import onebit_jax
from onebit_jax import checkpoints
from onebit_jax.cli import launch

ROWS = 16  # of a batch, over all workers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 12)).astype(np.float32)
TARGET = np.tanh(X @ RNG.normal(size=(12, 8))) @ RNG.normal(size=(8, 3))
Y = (TARGET + 0.3 * RNG.normal(size=TARGET.shape)).astype(np.float32)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] + params["b"][None] - y) ** 2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--stop", type=int, help="end after this step of the steps")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--die", type=int, nargs="*", default=[],
                        help="steps after which the last process kills itself, once each")
    parser.add_argument("--die-saving", type=int, nargs="*", default=[],
                        help="the same, while the checkpoint of that step is being written")
    parser.add_argument("--nan-every", type=int, default=0, help="steps between bad gradients")
    parser.add_argument("--resize", action="store_true")
    parser.add_argument("--check-every", type=int, default=100)
    return parser.parse_args()


def die_once(folder, step):
    """SIGKILL, which nothing can clean up after; not again in the next start."""
    with contextlib.suppress(FileExistsError):
        (folder / f"died-{step}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def start(folder, steps, *args, n=2, **kwargs):
    """Runs this program in n processes; the status of ``launch``."""
    command = [*map(str, (__file__, folder, steps, *args))]
    env = {"JAX_ENABLE_PREEMPTION_SERVICE": "0"}  # else SIGTERM does not end a worker
    return launch.launch(command, n, env=env, **kwargs)


def results(folder, n=2):
    """What all n processes ended with."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(n)]
    assert all(rank == ranks[0] for rank in ranks), "the processes ended with different results"
    return ranks[0]


def main(args):
    jax.distributed.initialize(heartbeat_timeout_seconds=20)
    rank, count = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shapes = {"in": (12, 16), "out": (16, 3), "b": (3,)}
    init = np.random.default_rng(1)
    params = {k: 0.3 * init.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    rate = optax.linear_schedule(1e-2, 0.0, args.steps)
    tx = onebit_jax.onebit_adamw(rate, "data", variance=onebit_jax.refresh(16, exact_steps=25))
    step_fn = onebit_jax.make_train_step(
        loss_fn, tx, mesh, max_consecutive_skips=5, check_replicas_every=args.check_every
    )
    with jax.set_mesh(mesh):
        state = step_fn.place((params, tx.init(params)))
    last = rank == count - 1
    with ocp.CheckpointManager((args.folder / "saved").absolute()) as manager:
        first = manager.latest_step() or 0
        if first:
            state = checkpoints.restore(manager, state, resize=args.resize)
        for step in range(first, args.steps if args.stop is None else args.stop):
            rows = np.random.default_rng((2, step)).integers(0, len(X), ROWS)
            mine = np.split(rows, count)[rank]
            x = X[mine]
            if args.nan_every and step % args.nan_every == args.nan_every - 1 and last:
                x = np.full_like(x, np.nan)
            state, _ = step_fn(state, (x, Y[mine]))
            done = step + 1
            if last and done in args.die:
                die_once(args.folder, done)
            if done % args.every == 0 or done in (args.steps, args.stop):
                manager.save(done, args=ocp.args.Composite(**checkpoints.items(state)))
                if last and done in args.die_saving:
                    die_once(args.folder, done)
    onebit_jax.assert_replicas_equal(state)
    params = {k: v.addressable_shards[0].data for k, v in state[0].items()}
    done = onebit_jax.metrics(state)
    del done["worker_error"], done["server_error"]  # of this process's workers alone
    result = {
        "first": first,
        "workers": jax.device_count(),
        "loss": float(loss_fn(params, (X, Y))),
        "params": {k: np.asarray(v).tolist() for k, v in params.items()},
        **done,
    }
    (args.folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(arguments())
