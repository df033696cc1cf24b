"""Measure step time and bytes of Adam and 1-bit Adam on links of limited rate.

Starts processes on this machine, each with a core and (but for the rate none, which is
loopback) a link of its own; that needs root, see launch. All methods run in the same
processes, one step of each in turn. Bytes are those that the network interface counted.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from onebit_jax.cli import launch, netns, rates, terminal
from onebit_jax.cli.bench_models import EXCHANGE, METHODS, MODELS

#: Of counted against predicted bytes; more is marked.
TOLERANCE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line."""
    parser.add_argument("-n", type=int, default=2, help="processes, one worker each (default 2)")
    parser.add_argument(
        "--rates", type=_list, default="none,1gbit,200mbit,100mbit",
        help="of the links, separated by commas; none is loopback (default %(default)s)",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="mlp",
        help="mlp: 25 M parameters in 14 leaves (default); transformer: 25 M in 170 leaves; "
        "tiny: for tests",
    )
    parser.add_argument(
        "--methods", type=_list, default=",".join(METHODS),
        help="separated by commas (default %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=12, help="timed steps (default 12)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the step times")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if problem := _problem(args):
        print(f"bench net: {problem}", file=sys.stderr)
        return 2
    load = os.getloadavg()
    summary = {"load_average": load, "cores": os.cpu_count(), "steps": args.steps}
    results: list[dict[str, Any]] = []
    for rate in args.rates:
        print(f"{args.model}, {args.n} processes, rate {rate} ...", flush=True)
        try:
            status, measured = _measure(args, rate)
        except (launch.LaunchError, netns.NetworkError) as error:
            print(f"bench net: {error}", file=sys.stderr)
            return 2
        if status:
            problem = f"stopped with status {status} at rate {rate}, see above"
            print(f"bench net: {problem}", file=sys.stderr)
            return status
        results += _rows(args, rate, measured)
        if args.json:  # now, in case that a later rate fails
            args.json.write_text(json.dumps({**summary, "results": results}, indent=1) + "\n")
    _print_table(results, load)
    if args.plot:
        _draw(results, args.plot)
    return 0


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, before minutes are spent."""
    if unknown := [m for m in args.methods if m not in METHODS]:
        return f"no methods {', '.join(unknown)}: choose from {', '.join(METHODS)}"
    if not args.methods or not args.rates:
        return "name at least one of --methods and one of --rates"
    try:
        limits = [rates.bits_per_second_or_none(r) for r in args.rates]
    except argparse.ArgumentTypeError as error:
        return f"--rates: {error}"
    if args.n < 1 or args.steps < 1:
        return f"needs -n and --steps of 1 or more, found {args.n} and {args.steps}"
    if args.n == 1 and any(limits):
        return "one process sends nothing: use --rates none, or -n of 2 or more"
    for path in filter(None, (args.json, args.plot)):
        if not path.absolute().parent.is_dir():
            return f"no folder {path.absolute().parent} to write {path.name} into: make it first"
    needed = ["rich", *(["matplotlib"] if args.plot else [])]
    if lacking := [m for m in needed if not find_spec(m)]:
        return f"needs {' and '.join(lacking)}: pip install 'onebit_jax[cli]'"
    return None


def _measure(args: argparse.Namespace, rate: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what each process has measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "onebit_jax.cli.bench_net_worker", "--model", args.model,
            "--methods", *args.methods, "--steps", str(args.steps), "--out", folder,
        ]
        if status := launch.launch(command, args.n, rate):
            return status, []
        files = [pathlib.Path(folder) / f"{rank}.json" for rank in range(args.n)]
        return 0, [json.loads(file.read_text()) for file in files]


def _rows(
    args: argparse.Namespace, rate: str, measured: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per method, of all processes together."""
    # Loopback is one interface and counts what all processes send.
    senders = args.n if rate == "none" else 1
    rows = []
    limit = rates.bits_per_second_or_none(rate)
    for method in measured[0]:
        of_all = [process[method] for process in measured]
        # A step takes as long as it takes the slowest.
        times = np.max([one["ms"] for one in of_all], axis=0)
        q1, median, q3 = np.percentile(times, [25, 50, 75])
        counted, payload = (
            float(np.mean([np.median(one[kind]) for one in of_all])) / senders
            for kind in ("bytes", "payload")
        )
        predicted = of_all[0]["predicted"]
        rows.append({
            "model": args.model, "method": method, "rate": rate, "workers": args.n,
            "step_ms": float(median), "q1_ms": float(q1), "q3_ms": float(q3),
            "bytes_per_step": counted, "payload_per_step": payload,
            "predicted_bytes": predicted,
            "payload_over_predicted": payload / predicted if predicted else None,
            # Above what the bytes take at the rate of the link.
            "time_over_wire": median / (8e3 * predicted / limit) if limit else None,
        })
    adam = {row["method"]: row["step_ms"] for row in rows}.get("adam")
    for row in rows:
        is_step = row["method"] != EXCHANGE
        row["speedup_over_adam"] = adam / row["step_ms"] if adam and is_step else None
    return rows


def _print_table(results: Sequence[dict[str, Any]], load: Sequence[float]) -> None:
    from rich.table import Table

    table = Table(title=f"{results[0]['model']}, {results[0]['workers']} workers")
    for heading in ("rate", "method", "step ms", "quartiles", "speedup", "MB sent",
                    "payload / predicted", "time / wire"):
        table.add_column(heading, justify="left" if heading in ("rate", "method") else "right")
    for row in results:
        ratio, speedup = row["payload_over_predicted"], row["speedup_over_adam"]
        wire = row["time_over_wire"]
        table.add_row(
            row["rate"], row["method"], f"{row['step_ms']:.1f}",
            f"{row['q1_ms']:.1f}-{row['q3_ms']:.1f}", f"{speedup:.2f}" if speedup else "",
            f"{row['bytes_per_step'] / 1e6:.3f}", f"{ratio:.3f}{_mark(ratio)}" if ratio else "",
            f"{wire:.2f}" if wire else "",
        )
    console = terminal.console()
    console.print(table)
    console.print("MB sent: by each worker and step. time / wire: over what the bytes predicted "
                  f"take at the rate of the link. Load average before: {load[0]:.2f}")
    if any(_mark(row["payload_over_predicted"]) for row in results):
        console.print(f"! more than {TOLERANCE:.0%} from the predicted bytes", markup=False)


def _mark(ratio: float | None) -> str:
    return " !" if ratio and abs(ratio - 1) > TOLERANCE else ""


def _draw(results: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: needs no display

    speed = lambda rate: rates.bits_per_second_or_none(rate) or float("inf")
    order = sorted({row["rate"] for row in results}, key=speed)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in results):
        rows = {row["rate"]: row for row in results if row["method"] == method}
        medians = np.array([rows[rate]["step_ms"] for rate in order])
        low = medians - [rows[rate]["q1_ms"] for rate in order]
        high = [rows[rate]["q3_ms"] for rate in order] - medians
        axes.errorbar(order, medians, [low, high], marker="o", capsize=3, label=method)
    axes.set_yscale("log")
    axes.set_xlabel("rate of each worker's link (none: loopback)")
    axes.set_ylabel("step time in ms, median and quartiles")
    axes.set_title(f"{results[0]['model']}, {results[0]['workers']} workers")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
