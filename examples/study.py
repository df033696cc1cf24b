"""Time to the same loss on slow links: trains with each optimizer, compares, draws.

    sudo python examples/study.py --data DIR    # hours; DIR: Fashion-MNIST's IDX files
    sudo python examples/study.py --small       # minutes

Two processes, a core and a network namespace each, joined by links of limited rate; see
python -m onebit_jax launch. Each optimizer also runs in two processes side by side that
exchange nothing, each on its half of the batches: its computation. What a run takes beyond
that and beyond what its bytes take at the rate of the link is waiting: latency, headers, and
one process waiting for the other. Runs whose results are in --out are not repeated.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import results_table

from onebit_jax.cli import rates

WORKERS = 2
ALONE = "alone"
#: A run has reached Adam's final loss when it is within this share of it.
WITHIN = 0.01
OPTIMIZERS = ("adam", "adam_bf16", "paper", "frozen", "onebit_adam", "bf16_exact")


class Part(NamedTuple):
    """One task on links of several rates."""

    task: str
    steps: int
    rates: tuple[str, ...]
    optimizers: tuple[str, ...]


FULL = (
    Part("ngram_lm", 2000, ("1gbit", "200mbit"), OPTIMIZERS),
    Part("cnn", 470, ("200mbit",), OPTIMIZERS),
)
SMALL = (Part("ngram_lm", 400, ("200mbit",), ("adam", "paper", "onebit_adam", "bf16_exact")),)


def measure(part: Part, rate: str, optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    """The result of one run, measured now or before."""
    file = args.out / f"{part.task}-{part.steps}-{rate}-{optimizer}-{args.seed}.json"
    if not file.exists():
        load = os.getloadavg()[0]
        print(f"{part.task}, {rate}, {optimizer}, load average {load:.2f} ...", flush=True)
        command = [
            pathlib.Path(__file__).with_name("study_run.py"), "--task", part.task,
            "--distributed", "--optimizer", optimizer, "--steps", part.steps, "--seed", args.seed,
            *(["--data", args.data] if args.data else []),
        ]
        if rate == ALONE:
            cores = sorted(os.sched_getaffinity(0))[:WORKERS]
            command += ["--share", WORKERS]
            starts = [
                start(command, 1, "none", file.with_suffix(f".{i}.raw"), cores[i % len(cores)])
                for i in range(WORKERS)
            ]
        else:
            starts = [start(command, WORKERS, rate, file.with_suffix(".raw"))]
        runs = [result(*each) for each in starts]
        slowest = max(runs, key=lambda run: run["seconds"])
        file.write_text(json.dumps({"load_average": load, **slowest}, indent=1) + "\n")
    return json.loads(file.read_text())


def start(
    command: list[Any], n: int, rate: str, raw: pathlib.Path, core: int | None = None
) -> tuple[subprocess.Popen, pathlib.Path]:
    """Starts processes whose result goes to a file, on one core if it is given."""
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    launch = [sys.executable, "-m", "onebit_jax", "launch", "-n", n, "--rate", rate, "--"]
    output = ["--out", raw.parent / "runs", "--json", raw]
    with raw.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in (*launch, *command, *output)],
            stdout=log, stderr=subprocess.STDOUT, preexec_fn=pin,
        )
    return process, raw


def result(process: subprocess.Popen, raw: pathlib.Path) -> dict[str, Any]:
    """Waits for what was started; its result."""
    if status := process.wait():
        log = raw.with_suffix(".log")
        print(log.read_text()[-2000:], file=sys.stderr)
        raise SystemExit(f"study: a run ended with status {status}, see {log}")
    (run,) = json.loads(raw.read_text())["runs"]
    raw.unlink()
    return run


def seconds_to(curve: list[list[float]], target: float) -> float | None:
    """When the held-out loss came down to the target, between two evaluations; None if never."""
    before: tuple[float, float] | None = None
    for _, _, seconds, loss in curve:
        if loss <= target:
            if before is None:
                return seconds
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (seconds - before[0])
        before = (seconds, loss)
    return None


def table(rate: str, runs: dict[str, dict], alone: dict[str, dict]) -> list[list[str]]:
    """A heading, and a row for each optimizer, the first of which is the measure."""
    first = next(iter(runs.values()))
    target = (1 + WITHIN) * first["eval_loss"]
    base = seconds_to(first["curve"], target)
    rows = [
        ["optimizer", "held-out loss", "against Adam", "bytes", f"s to {target:.4f}", "speed-up",
         "s in all", "computation", "wire", "waiting"],
        ["---"] * 10,
    ]
    for name, run in runs.items():
        reached = seconds_to(run["curve"], target)
        compute = alone[name]["seconds"]
        wire = 8 * run["bytes_sent"] / rates.bits_per_second(rate)
        rows.append([
            name, f"{run['eval_loss']:.4f}", f"{run['eval_loss'] / first['eval_loss'] - 1:+.2%}",
            f"1/{first['bytes_sent'] / run['bytes_sent']:.1f}",
            "never" if reached is None else f"{reached:.0f}",
            "" if reached is None else f"{base / reached:.1f}x", f"{run['seconds']:.0f}",
            f"{compute:.0f}", f"{wire:.0f}", f"{run['seconds'] - compute - wire:.0f}",
        ])
    return rows


def draw(runs: dict[str, dict], path: pathlib.Path, title: str) -> None:
    """Held-out loss against time and against bytes."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display

    matplotlib.rcParams["svg.hashsalt"] = "study"
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        _, sent, seconds, loss = zip(*run["curve"], strict=True)
        by_time.plot(seconds, loss, label=name)
        by_bytes.plot([n / 1e6 for n in sent], loss, label=name)
    by_time.set(xlabel="seconds", ylabel="held-out loss", xscale="log", title=title)
    by_bytes.set(xlabel="MB sent by each worker", xscale="log")
    by_time.legend()
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="minutes; the language model only")
    parser.add_argument("--data", type=pathlib.Path, metavar="DIR",
                        help="IDX files for the ResNet (default: scikit-learn's digits)")
    parser.add_argument("--task", choices=[part.task for part in FULL], help="only this one")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append",
                        help="besides adam only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/study"),
                        metavar="DIR", help="results and plots (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = ("adam", *(args.optimizer or OPTIMIZERS))
    for part in SMALL if args.small else FULL:
        if args.task not in (None, part.task):
            continue
        names = [name for name in part.optimizers if name in chosen]
        alone = {name: measure(part, ALONE, name, args) for name in names}
        for rate in part.rates:
            runs = {name: measure(part, rate, name, args) for name in names}
            loads = [run["load_average"] for run in runs.values()]
            title = f"{part.task}, {part.steps} steps, {WORKERS} workers, {rate}, seed {args.seed}"
            print(f"\n{title}; load average before the runs {min(loads):.2f}-{max(loads):.2f}\n")
            print(results_table.markdown(table(rate, runs, alone)), flush=True)
            plot = args.out / f"{part.task}-{rate}.svg"
            draw(runs, plot, title)
            print(f"\nplot: {plot}\n", flush=True)


if __name__ == "__main__":
    main()
