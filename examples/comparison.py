"""Trains one task with several optimizers and compares them; used by lm.py and cnn.py.

Every optimizer starts from the same parameters and sees the same batches.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from reporting import Report, summary_writer
from rich.console import Console
from rich.table import Table
from saving import Saved

import onebit_jax

AXIS = "data"
COUNTS = ("exact_rounds", "onebit_rounds", "skipped_rounds", "bytes_sent")


def _adam(wire_dtype: str | None) -> Callable:
    def build(learning_rate: Any, steps: int) -> optax.GradientTransformation:
        del steps
        return optax.chain(onebit_jax.exact_mean(AXIS, wire_dtype), optax.adam(learning_rate))

    return build


def _warmup(steps: int) -> int:
    return max(round(0.15 * steps), 1)


OPTIMIZERS: dict[str, Callable[[Any, int], optax.GradientTransformation]] = {
    "adam": _adam(None),
    "adam_bf16": _adam("bfloat16"),
    # The default: exact for 100 steps, then a refresh of the variance now and then.
    "onebit_adam": lambda rate, steps: onebit_jax.onebit_adam(rate, AXIS),
    "bf16_errors": lambda rate, steps: onebit_jax.onebit_adam(
        rate, AXIS, error_dtype="bfloat16"
    ),
    "bf16_exact": lambda rate, steps: onebit_jax.onebit_adam(
        rate, AXIS, wire_dtype="bfloat16"
    ),
    "frozen": lambda rate, steps: onebit_jax.onebit_adam(rate, AXIS, variance=_warmup(steps)),
    "paper": lambda rate, steps: onebit_jax.paper_1bit_adam(rate, AXIS, _warmup(steps)),
    # Both frozen far too early, to see what onebit_jax.metrics says of it.
    "frozen_early": lambda rate, steps: onebit_jax.onebit_adam(
        rate, AXIS, variance=max(steps // 50, 1)
    ),
    "paper_early": lambda rate, steps: onebit_jax.paper_1bit_adam(rate, AXIS, max(steps // 50, 1)),
}


@dataclasses.dataclass
class Task:
    """What there is to train.

    Attributes:
      init: ``init(seed) -> (params, model_state)``; the latter may be None.
      loss_fn: the loss as ``onebit_jax.make_train_step`` takes it.
      mutable: the argument of that name of ``make_train_step``.
      batch: ``batch(seed, step) -> pytree`` of arrays with a leading axis, the
        global batch.
      evaluate: ``evaluate(params, model_state) -> {"loss": ..., ...}`` on
        held-out data.
      peak_rate: highest learning rate.
      evaluations: how many there are in a run.
    """

    init: Callable
    loss_fn: Callable
    mutable: str | None
    batch: Callable
    evaluate: Callable
    peak_rate: float
    evaluations: int = 12


def arguments(description: str, steps: int) -> argparse.ArgumentParser:
    """The arguments that both examples take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), action="append",
                        help="train only this one; may be repeated (default: adam, onebit_adam)")
    parser.add_argument("--workers", type=int, default=4, help="simulated devices (default: 4)")
    parser.add_argument("--steps", type=int, default=steps, help=f"default: {steps}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), metavar="DIR",
                        help="where the plot goes (default: out)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results here")
    parser.add_argument("--tensorboard", type=pathlib.Path, metavar="DIR",
                        help="write losses and onebit_jax.metrics here, for TensorBoard, a "
                        "folder for each optimizer")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR",
                        help="save checkpoints here, a folder for each optimizer; with several "
                        "processes one that all of them see")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS",
                        help="default: 100")
    parser.add_argument("--resume", action="store_true",
                        help="go on from the latest checkpoint in DIR, if there is one; with "
                        "another number of workers too")
    parser.add_argument("--distributed", action="store_true",
                        help="one worker per process, joined by jax.distributed")
    parser.add_argument("--coordinator", metavar="HOST:PORT",
                        help="with --distributed, where the cluster does not say")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser


def start(args: argparse.Namespace) -> jax.sharding.Mesh:
    """Joins the other processes or makes simulated devices; returns the mesh."""
    if args.steps < 1 or args.workers < 1 or args.checkpoint_every < 1:
        raise SystemExit("--steps, --workers and --checkpoint-every must be at least 1")
    if args.resume and args.checkpoint is None:
        raise SystemExit("--resume needs --checkpoint DIR, to know from where")
    if args.tensorboard is not None:
        summary_writer()
    if args.distributed:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id, heartbeat_timeout_seconds=20
        )
        args.workers = jax.device_count()
    else:
        jax.config.update("jax_num_cpu_devices", args.workers)
    return jax.make_mesh((args.workers,), (AXIS,), devices=jax.devices()[: args.workers])


def compare(task: Task, args: argparse.Namespace, mesh: jax.sharding.Mesh, name: str) -> None:
    """Trains with each optimizer, prints the table, writes plot and JSON."""
    console = Console(quiet=jax.process_index() > 0)
    names = args.optimizer or ["adam", "onebit_adam"]
    rate = schedule(task.peak_rate, args.steps)
    runs = [
        train(task, optimizer, OPTIMIZERS[optimizer](rate, args.steps), args, mesh, console)
        for optimizer in names
    ]
    if jax.process_index() > 0:
        return
    console.print(_table(runs, args, name))
    args.out.mkdir(parents=True, exist_ok=True)
    plot = args.out / f"{name}.png"
    _plot(runs, plot)
    console.print(f"plot: {plot}")
    if args.json is not None:
        settings = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"arguments": settings, "runs": runs}, indent=1))


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up over a tenth of the run, at most 100 steps, then a cosine."""
    warmup = min(max(steps // 10, 1), 100)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), peak / 10)


def train(
    task: Task, optimizer: str, tx: optax.GradientTransformation, args: Any, mesh: Any,
    console: Console,
) -> dict[str, Any]:
    """Trains with one optimizer, of that name in the progress and the results."""
    step_fn = onebit_jax.make_train_step(task.loss_fn, tx, mesh, AXIS, mutable=task.mutable)
    rows = len(jax.tree.leaves(task.batch(args.seed, 0))[0])
    if rows % args.workers:
        raise SystemExit(f"--workers must divide the batch of {rows}, found {args.workers}")
    params, model_state = task.init(args.seed)
    with jax.set_mesh(mesh):
        state = (params, tx.init(params))
    if task.mutable is not None:
        state = (*state, model_state)
    state = step_fn.place(state)
    saved = Saved(args, optimizer)
    state, first, notes = saved.resume(state, console)
    notes = {"curve": [], "seconds": 0.0, "result": {}, **notes}
    curve, seconds, result = notes["curve"], notes["seconds"], notes["result"]
    started = time.perf_counter()
    with Report(args, optimizer, first, console) as report:
        for step in range(first, args.steps):
            state, metrics = step_fn(state, _my_part(task.batch(args.seed, step)))
            if step == first:  # this step compiles; time starts after it
                jax.block_until_ready(state)
                started = time.perf_counter()
            last = step == args.steps - 1
            evaluate = last or (step + 1) % max(args.steps // task.evaluations, 1) == 0
            if (step + 1) % 10 == 0 or evaluate:
                report.trained(step + 1, float(metrics["loss"]), onebit_jax.metrics(state))
            if evaluate:
                jax.block_until_ready(state)
                seconds += time.perf_counter() - started
                result = task.evaluate(*map(_local, (state[0], (*state, None)[2])))
                report.evaluated(step + 1, result)
                curve.append([step + 1, onebit_jax.bytes_sent(state), seconds, result["loss"]])
                started = time.perf_counter()
            if (step + 1) % args.checkpoint_every == 0 or last:
                now = seconds + time.perf_counter() - started
                notes = {"curve": curve, "seconds": now, "result": result}
                saved.save(step + 1, state, notes)
    saved.close()
    done = onebit_jax.metrics(state)
    run = {
        "optimizer": optimizer,
        "seed": args.seed,
        "eval_loss": result["loss"],
        **{name: done[name] for name in COUNTS},
        "seconds": seconds,
        "curve": curve,
    }
    if "accuracy" in result:
        run["accuracy"] = result["accuracy"]
    return run


def _my_part(batch: Any) -> Any:
    """This process's rows of the global batch."""
    n, i = jax.process_count(), jax.process_index()
    return jax.tree.map(lambda x: x[i * (len(x) // n) : (i + 1) * (len(x) // n)], batch)


def _local(tree: Any) -> Any:
    """One device's copy of replicated arrays, to evaluate once and not once a worker."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def _table(runs: list[dict], args: Any, name: str) -> Table:
    title = f"{name}: {args.steps} steps, {args.workers} workers, seed {args.seed}; held-out loss"
    table = Table(title=title)
    table.add_column("optimizer", no_wrap=True)
    with_accuracy = "accuracy" in runs[0]
    columns = ["loss", *["accuracy"][: with_accuracy], "exact", "1-bit", "MB sent", "ratio", "time"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        sent = run["bytes_sent"]
        ratio = f"{runs[0]['bytes_sent'] / sent:.1f}x" if sent else "-"
        accuracy = [f"{100 * run['accuracy']:.2f} %"] if with_accuracy else []
        table.add_row(run["optimizer"], f"{run['eval_loss']:.4f}", *accuracy,
                      str(run["exact_rounds"]), str(run["onebit_rounds"]), f"{sent / 1e6:.1f}",
                      ratio, f"{run['seconds']:.0f} s")
    return table


def _plot(runs: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for run in runs:
        steps, sent, _, loss = np.asarray(run["curve"]).T
        by_step.plot(steps, loss, marker=".", label=run["optimizer"])
        by_bytes.plot(sent / 1e6, loss, marker=".", label=run["optimizer"])
    by_step.set(xlabel="steps", ylabel="held-out loss")
    by_bytes.set(xlabel="MB sent per worker")
    by_step.legend()
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
