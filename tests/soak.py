"""A long run with everything that can happen to one, against an undisturbed one.

    python tests/soak.py [--steps 5000]

Two processes train a small model. In the disturbed run a gradient is NaN every 50 steps,
a worker is killed (SIGKILL) every fifth of the run, and the workers become four and two
again at thirds of it. Prints both; ends with status 1 if the losses differ by 2 % or more.
All workers compare all bits of what they share every 100 steps and at the end.
"""

import argparse
import pathlib
import sys
import tempfile
import time

import resumable


def start(folder, steps, n, *args, restarts=0):
    options = ("--every", 100, *args)
    if status := resumable.start(folder, steps, *options, n=n, max_restarts=restarts):
        raise SystemExit(f"soak: a run ended with status {status}")
    return resumable.results(folder, n)


def disturbed(folder, steps):
    kills = [steps * i // 5 for i in range(1, 5)]
    common = ["--nan-every", 50, "--resize", "--die", *kills]
    for stop, n in ((steps // 3, 2), (2 * steps // 3, 4), (steps, 2)):
        result = start(folder, steps, n, *common, "--stop", stop, restarts=len(kills))
    died = len(list(folder.glob("died-*")))
    return result, died


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000, help="default: 5000")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folders = [pathlib.Path(name) / kind for kind in ("undisturbed", "disturbed")]
        for folder in folders:
            folder.mkdir()
        began = time.monotonic()
        calm = start(folders[0], steps, 2)
        calm_seconds, began = time.monotonic() - began, time.monotonic()
        rough, died = disturbed(folders[1], steps)
        rough_seconds = time.monotonic() - began
    off = rough["loss"] / calm["loss"] - 1
    print(f"undisturbed: 2 workers, {steps} steps: loss {calm['loss']:.5f}, "
          f"{calm['exact_rounds']} exact and {calm['onebit_rounds']} 1-bit rounds, "
          f"{calm_seconds:.0f} s")
    print(f"disturbed: 2, 4, 2 workers, {died} killed and restarted, {rough['skipped_rounds']} bad "
          f"steps skipped: loss {rough['loss']:.5f}, {rough['exact_rounds']} exact and "
          f"{rough['onebit_rounds']} 1-bit rounds, {rough_seconds:.0f} s")
    print(f"difference of the losses: {100 * off:+.2f} %; replicas equal at every check")
    if died != 4 or rough["skipped_rounds"] != steps // 50:
        sys.exit("soak: not everything happened that should have")
    if abs(off) >= 0.02:
        sys.exit("soak: the losses differ by 2 % or more")


if __name__ == "__main__":
    main()
