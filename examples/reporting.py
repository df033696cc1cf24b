"""What a run looks like while it trains: on a terminal, in a log, in TensorBoard."""

import argparse
import contextlib
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class Report:
    """Shows one run: a live line on a terminal, else a line for each evaluation.

    With ``--tensorboard DIR`` it writes scalars as well, to a folder for the optimizer.
    """

    def __init__(self, args: argparse.Namespace, optimizer: str, first: int, console: Console):
        self._console, self._name, self._steps = console, optimizer, args.steps
        self._status = "compiling"
        self._open = contextlib.ExitStack()
        # The status gives way where the terminal is narrow; nothing wraps.
        status = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._progress = Progress(
            TextColumn("{task.description:>12}"), BarColumn(bar_width=12),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}", table_column=status),
            TimeRemainingColumn(), console=console, expand=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(
            optimizer, total=args.steps, completed=first, status=self._status
        )
        self._writer: Any = None
        if args.tensorboard is not None and jax.process_index() == 0:
            purge = first + 1 if first else None  # what a killed run wrote after its checkpoint
            self._writer = self._open.enter_context(
                summary_writer()(str(args.tensorboard / optimizer), purge_step=purge)
            )

    def __enter__(self) -> "Report":
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()

    def trained(self, step: int, loss: float, done: dict[str, Any]) -> None:
        """After so many steps: the loss and ``onebit_jax.metrics``."""
        parts = [f"loss {loss:.3f}", done["stage"], f"{done['bytes_sent'] / 1e6:.1f} MB sent"]
        errors = [done["worker_error"], done["server_error"]]
        if errors[0] is not None:
            parts.append("error " + " / ".join(f"{e:.2f}" for e in errors if e is not None))
        if done["variance_age"] is not None:
            parts.append(f"age {done['variance_age']}")
        self._status = "  ".join(parts)
        self._progress.update(self._bar, completed=step, status=self._status)
        self._write(step, {"loss": loss, **done})

    def evaluated(self, step: int, result: dict[str, float]) -> None:
        """After an evaluation on held-out data."""
        if not self._console.is_terminal:
            line = f"{self._name}  {step}/{self._steps}  {self._status}"
            self._console.print(f"{line}  held-out loss {result['loss']:.3f}", soft_wrap=True)
        self._write(step, {f"held-out_{name}": value for name, value in result.items()})

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(name, value, step)


def summary_writer() -> Any:
    """The class ``tensorboardX.SummaryWriter``, where it is installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise SystemExit(
            "--tensorboard needs the package tensorboardX: pip install 'onebit_jax[examples]'"
        ) from error
    return SummaryWriter
