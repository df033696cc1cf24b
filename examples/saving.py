"""Checkpoints of a run of an example: the state, and what it has printed and plotted so far."""

import argparse
from typing import Any

import orbax.checkpoint as ocp
from rich.console import Console

from onebit_jax import checkpoints


class Saved:
    """The checkpoints of one run; does nothing without ``--checkpoint``."""

    def __init__(self, args: argparse.Namespace, name: str):
        self._manager = None
        if args.checkpoint is None:
            return
        folder = (args.checkpoint / name).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=3)
        self._manager = ocp.CheckpointManager(folder, options=options)
        if self._manager.all_steps() and not args.resume:
            raise SystemExit(
                f"{folder} holds checkpoints of steps {list(self._manager.all_steps())}: go on "
                "from the last with --resume, or name another folder"
            )

    def resume(self, state: Any, console: Console) -> tuple[Any, int, dict[str, Any]]:
        """The latest state, its step and notes; or those given and none, if there is none."""
        if self._manager is None or self._manager.latest_step() is None:
            return state, 0, {}
        step = self._manager.latest_step()
        state = checkpoints.restore(self._manager, state, step, resize=True)
        args = ocp.args.Composite(notes=ocp.args.JsonRestore())
        notes = self._manager.restore(step, args=args)["notes"]
        console.print(f"going on after step {step} of {self._manager.directory}")
        return state, step, notes

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Saves behind the training's back."""
        if self._manager is not None:
            items = checkpoints.items(state)
            args = ocp.args.Composite(**items, notes=ocp.args.JsonSave(notes))
            self._manager.save(step, args=args)

    def close(self) -> None:
        """Waits until all is written."""
        if self._manager is not None:
            self._manager.close()
