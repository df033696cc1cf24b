"""Placeholder of bench_net."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line."""


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    raise NotImplementedError
