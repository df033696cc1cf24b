"""Predict step time, run time and traffic of Adam and of 1-bit Adam.

A step takes its computation, its update and its exchange, one after another; what a
real step overlaps makes all of them faster. Bytes are what each worker sends, by the
usual ring formulas.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from onebit_jax.cli import prediction as model, rates, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line."""
    parser.add_argument(
        "--params", type=_count, required=True, help="parameters of the model, such as 340e6"
    )
    parser.add_argument("--workers", type=_count, required=True, help="that exchange")
    parser.add_argument(
        "--bandwidth", type=rates.bits_per_second, metavar="RATE",
        help="of each worker's link, such as 100mbit or 1gbit; measured if --measure runs "
        "under several processes, else needed",
    )
    parser.add_argument(
        "--compute-ms", type=_milliseconds, required=True, metavar="MS",
        help="forward and backward pass of a step",
    )
    parser.add_argument("--steps", type=_count, default=10_000, help="of the run (10000)")
    parser.add_argument(
        "--exact-fraction", type=_fraction, default=0.15, metavar="SHARE",
        help="of the steps before the frozen 1-bit Adam freezes, from 0 to 1 (0.15)",
    )
    by_memory = f"of memory for each parameter at {model.MEMORY_SPEED / 1e9:g} GB/s"
    parser.add_argument(
        "--update-ms-adam", type=_milliseconds, metavar="MS",
        help=f"Adam's update, and what else its step takes but the wire, such as a CPU's part in "
        f"the exchange; default: {model.ADAM_MEMORY_BYTES} bytes {by_memory}",
    )
    parser.add_argument(
        "--update-ms-onebit", type=_milliseconds, metavar="MS",
        help=f"that of a 1-bit round; default: {model.ONEBIT_MEMORY_BYTES} bytes {by_memory}",
    )
    parser.add_argument(
        "--measure", action="store_true",
        help="time the updates on this machine, and under several processes their link",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write it there")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    try:
        _plan(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> None:
    show = _printer()  # first, so that nothing is measured in vain
    speaks, origin = True, "--bandwidth"
    bandwidth, adam, onebit = args.bandwidth, args.update_ms_adam, args.update_ms_onebit
    if args.measure:
        from onebit_jax.cli import measuring

        processes = measuring.join_processes()
        if processes > 1:
            import jax

            speaks = jax.process_index() == 0
            # The model takes the efficiency off again.
            bandwidth, origin = measuring.link_rate() / model.EFFICIENCY_F32, "measurement"
    if bandwidth is None:
        raise ValueError(
            "no bandwidth: give --bandwidth, such as 1gbit, or run with --measure under several "
            "processes (python -m onebit_jax launch) to measure their link"
        )
    if args.measure:
        adam = measuring.adam_seconds(args.params) if adam is None else adam
        onebit = measuring.onebit_seconds(args.params) if onebit is None else onebit
    if adam is None:
        adam = model.memory_bound_update(args.params, model.ADAM_MEMORY_BYTES)
    if onebit is None:
        onebit = model.memory_bound_update(args.params, model.ONEBIT_MEMORY_BYTES)
    setting = model.Setting(args.params, args.workers, bandwidth, args.compute_ms, adam, onebit)
    report = summary(setting, args.steps, args.exact_fraction)
    report["bandwidth_from"] = origin
    if speaks:
        show(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")


def summary(setting: model.Setting, steps: int, exact_fraction: float) -> dict[str, Any]:
    """The predictions and what follows from them, as JSON has it.

    Args:
      setting: model, machines and network.
      steps: length of the run.
      exact_fraction: share of exact steps of the frozen 1-bit Adam.

    Returns:
      A dict of ``setting``, ``steps``, ``exact_fraction``; ``methods``, a list of
      dicts, each a prediction with ``speedup`` and ``traffic_ratio`` over plain
      Adam (None where nothing is sent); and ``break_even``, the bits per second
      below which a 1-bit step is faster than one of Adam with either wire: a
      number, ``"any"`` or ``"none"``.
    """
    predictions = model.predict(setting, steps, exact_fraction)
    adam = predictions[0]
    methods = [
        p._asdict() | {
            "speedup": adam.seconds / p.seconds if p.seconds else None,
            "traffic_ratio": adam.bytes / p.bytes if p.bytes else None,
        }
        for p in predictions
    ]
    rivals = {
        model.ADAM: (model.F32_BYTES, model.EFFICIENCY_F32),
        model.ADAM_BF16: (model.BF16_BYTES, model.EFFICIENCY_BF16),
    }
    names = {math.inf: "any", 0.0: "none"}
    points = {name: model.break_even(setting, *wire) for name, wire in rivals.items()}
    return {
        "setting": setting._asdict(),
        "steps": steps,
        "exact_fraction": exact_fraction,
        "methods": methods,
        "break_even": {name: names.get(point, point) for name, point in points.items()},
    }


def _printer() -> Callable[[dict[str, Any]], None]:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        console = terminal.console()
    except ImportError as error:
        raise ValueError(
            "the table needs rich, which is not installed: pip install 'onebit_jax[cli]'"
        ) from error

    def show(report: dict[str, Any]) -> None:
        s = report["setting"]
        origin = " (measured)" if report["bandwidth_from"] == "measurement" else ""
        table = Table(
            title=f"{s['params']:,} parameters, {s['workers']} workers, "
            f"{rates.rate_text(s['bandwidth'])}{origin}, {report['steps']:,} steps",
            box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False,
        )
        table.add_column("method", no_wrap=True)
        for column in ("exact\nrounds", "a step\ntakes", "the run\ntakes", "sent in\na step",
                       "in the\nrun", "times\nfaster", "times\nless sent"):
            table.add_column(column, justify="right", no_wrap=True)
        for m in report["methods"]:
            table.add_row(*_cells(m))
        console.print(table)
        console.print(
            f"of a step: computation {_time(s['compute'])}, update of Adam "
            f"{_time(s['adam_update'])}, of 1-bit Adam {_time(s['onebit_update'])}",
            highlight=False,
        )
        for rival, point in report["break_even"].items():
            console.print(f"against {rival}: {_verdict(point)}", highlight=False)

    return show


def _cells(m: dict[str, Any]) -> tuple[str, ...]:
    times = lambda ratio: "-" if ratio is None else f"{ratio:.3g}"
    return (
        m["method"],
        f"{m['exact_rounds']:,}",
        _time(m["seconds_per_step"]),
        _time(m["seconds"]),
        _size(m["bytes_per_step"]),
        _size(m["bytes"]),
        times(m["speedup"]),
        times(m["traffic_ratio"]),
    )


def _verdict(point: float | str) -> str:
    if point == "any":
        return "a 1-bit step is faster at any bandwidth"
    if point == "none":
        return "a 1-bit step is not faster at any bandwidth"
    return f"a 1-bit step is faster below {rates.rate_text(float(point))}"


def _time(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e3:.1f} ms"


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} PB"


def _number(text: str, expected: str, good: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not good(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return value


def _count(text: str) -> int:
    whole = lambda n: n >= 1 and n == int(n)
    return int(_number(text, "a whole number of at least 1, such as 340e6", whole))


def _fraction(text: str) -> float:
    return _number(text, "a number from 0 to 1", lambda x: 0 <= x <= 1)


def _milliseconds(text: str) -> float:
    """In seconds, as all of the model is."""
    return _number(text, "milliseconds, at least 0", lambda x: x >= 0) / 1e3
