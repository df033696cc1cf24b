"""``python -m onebit_jax bench update | bench net | launch | plan``."""

import argparse
import importlib.metadata
from collections.abc import Sequence

import onebit_jax
from onebit_jax.cli import bench_net, bench_update, launch, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m onebit_jax", description=__doc__)
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure the optimizer, alone or on a network")
    benches = bench.add_subparsers(dest="bench", required=True)
    for group, name, module in (
        (benches, "update", bench_update),
        (benches, "net", bench_net),
        (commands, "launch", launch),
        (commands, "plan", plan),
    ):
        summary = (module.__doc__ or "").splitlines()[0]
        command = group.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


def _versions() -> str:
    others = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax"))
    return f"onebit_jax {onebit_jax.__version__} ({', '.join(others)})"
