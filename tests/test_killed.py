"""What is left of a job ends by itself when a worker dies or hangs."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import processes
import pytest

from onebit_jax.cli import launch

PROGRAM = pathlib.Path(__file__).parent / "endless_training.py"
HEARTBEAT = 5  # seconds without a heartbeat until a worker counts as dead
SLACK = 10  # seconds for a busy machine


def others_end(folder, victim, number, heartbeat=HEARTBEAT, flags=""):
    """After signal ``number`` to rank ``victim`` of 2, the other's output and seconds."""
    address = f"127.0.0.1:{processes.free_port()}"
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", XLA_FLAGS=flags,
               JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    command = [sys.executable, str(PROGRAM), str(folder), str(heartbeat)]
    started = []
    with open(folder / "output", "w+") as output:
        try:
            for rank in range(2):
                out = subprocess.DEVNULL if rank == victim else output
                started.append(subprocess.Popen(
                    command, env={**env, "JAX_PROCESS_ID": str(rank)}, stdout=out, stderr=out))
            deadline = time.monotonic() + 120
            while not all((folder / str(rank)).exists() for rank in range(2)):
                assert time.monotonic() < deadline
                assert all(p.poll() is None for p in started), output.read()
                time.sleep(0.05)
            started[victim].send_signal(number)
            begin = time.monotonic()
            status = started[1 - victim].wait(timeout=200)
            seconds = time.monotonic() - begin
        finally:
            for p in started:
                p.kill()
                p.wait()
        output.seek(0)
        text = output.read()
    print(f"rank {1 - victim} ended with {status} after {seconds:.1f} s")
    assert status not in (0, -signal.SIGKILL), text
    return text, seconds


def test_a_killed_worker_ends_the_other(tmp_path):
    text, seconds = others_end(tmp_path, 1, signal.SIGKILL)
    assert "Gloo" in text, "the error of the collective"
    assert seconds < HEARTBEAT + SLACK


def test_a_killed_coordinator_ends_the_other(tmp_path):
    _, seconds = others_end(tmp_path, 0, signal.SIGKILL, heartbeat=100)
    assert seconds < SLACK


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_ends_the_other(tmp_path, victim):
    text, seconds = others_end(tmp_path, victim, signal.SIGSTOP)
    assert "Terminating process because the JAX distributed service" in text
    assert seconds < HEARTBEAT + SLACK


@pytest.mark.slow
def test_a_worker_that_hangs_in_python_ends_the_other(tmp_path):
    """It still sends heartbeats; then the program's shutdown timeout, 10 s, counts."""
    flags = "--xla_cpu_collective_timeout_seconds=3"
    text, seconds = others_end(tmp_path, 1, signal.SIGUSR1, flags=flags)
    assert "Timed out waiting 3000ms" in text
    assert seconds < 3 + 10 + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_launch_starts_again_after_a_killed_or_stopped_worker(tmp_path, number, capfd):
    command = [str(PROGRAM), str(tmp_path), str(HEARTBEAT), str(int(number))]
    assert launch.launch(command, 2, max_restarts=1) == 0
    # Of a stopped worker the other one dies first.
    first = "rank 1 was ended by signal 9" if number == signal.SIGKILL else "rank 0 was ended"
    assert f"launch: {first}" in capfd.readouterr().err
    command[-1] = str(int(number))
    begin = time.monotonic()
    assert launch.launch(command, 2) >= 128
    print(f"ended after {time.monotonic() - begin:.1f} s")
