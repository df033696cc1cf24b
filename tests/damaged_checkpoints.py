"""Restores a checkpoint of 4 workers with each of its files damaged; see test_checkpoints.py.

    python damaged_checkpoints.py FOLDER STEP

A process of its own, as Orbax leaves other reads going when one has failed. Prints in how
many cases the checkpoint was refused; in all others the state must be the saved one.
"""

import pathlib
import shutil
import sys

import jax
import numpy as np
import saved as run

from onebit_jax import checkpoints


def truncated(raw):
    return raw[: len(raw) // 2]


def flipped(raw):
    changed = bytearray(raw)
    for quarter in (1, 2, 3):  # in several places, as some bytes of a file are never read
        changed[quarter * len(raw) // 4] ^= 16
    return bytes(changed)


def main(folder, step):
    folder = pathlib.Path(folder)
    _, fresh = run.build(4)
    saved = jax.device_get(run.load(folder, fresh))
    files = [p for p in sorted((folder / step).rglob("*")) if p.is_file() and p.stat().st_size]
    copy = folder.with_name("damaged")
    for damage in (truncated, flipped):
        refused = 0
        for path in files:
            shutil.copytree(folder, copy)
            (copy / path.relative_to(folder)).write_bytes(damage(path.read_bytes()))
            message = None
            try:
                restored = run.load(copy, fresh)
            except checkpoints.CheckpointError as error:
                message = str(error)
            if message is None:
                jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), saved)
            else:
                assert str(copy / step) in message, path
                refused += 1
            shutil.rmtree(copy)
        print(f"{damage.__name__}: {refused} of {len(files)} files refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
