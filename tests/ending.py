"""How long one of two workers goes on when the other is killed or hangs.

    python tests/ending.py RANK SIGNAL [HEARTBEAT SHUTDOWN COLLECTIVE]

Sends the SIGNAL (KILL, STOP, or USR1: sleep in Python) to a worker in training and waits
for the other one. The last three are timeouts in seconds; by default JAX's and XLA's.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import processes

PROGRAM = pathlib.Path(__file__).parent / "endless_training.py"


def other_ends(folder, rank, number, within, heartbeat=100, shutdown=300, collective=None):
    """The other one's status, what it printed, and the seconds it took."""
    address = f"127.0.0.1:{processes.free_port()}"
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1",
               JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    if collective is not None:
        env["XLA_FLAGS"] = f"--xla_cpu_collective_timeout_seconds={collective}"
    command = [sys.executable, PROGRAM, folder, str(heartbeat), str(shutdown)]
    outputs = [folder / f"output{i}" for i in range(2)]
    started = []
    try:
        for i, output in enumerate(outputs):
            with output.open("w") as out:
                started.append(subprocess.Popen(
                    command, env={**env, "JAX_PROCESS_ID": str(i)}, stdout=out, stderr=out))
        deadline = time.monotonic() + 120
        while not all((folder / str(i)).exists() for i in range(2)):
            assert time.monotonic() < deadline
            assert all(p.poll() is None for p in started), outputs[0].read_text()
            time.sleep(0.05)
        started[rank].send_signal(number)
        begin = time.monotonic()
        status = started[1 - rank].wait(timeout=within)
        return status, outputs[1 - rank].read_text(), time.monotonic() - begin
    finally:
        for p in started:
            p.kill()
            p.wait()


def main(rank, name, *timeouts):
    with tempfile.TemporaryDirectory() as folder:
        status, text, seconds = other_ends(
            pathlib.Path(folder), int(rank), signal.Signals[f"SIG{name}"], 900, *timeouts)
    print(text)
    print(f"rank {1 - int(rank)} ended with status {status} after {seconds:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
