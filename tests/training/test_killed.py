"""What is left of a job ends by itself when a worker dies or hangs."""

import os
import re
import signal
import subprocess
import sys

import ending
import processes
import pytest

from onebit_jax.cli import launch

TIMEOUTS = HEARTBEAT, SHUTDOWN = 5, 10  # seconds
SLACK = 10  # for a busy machine


def other_ends(folder, rank, number, within, *timeouts):
    status, text, seconds = ending.other_ends(folder, rank, number, within, *timeouts)
    assert status != 0, text
    print(f"status {status} after {seconds:.1f} s")
    return text


def test_a_killed_worker_ends_the_other(tmp_path):
    text = other_ends(tmp_path, 1, signal.SIGKILL, HEARTBEAT + SLACK, *TIMEOUTS)
    assert re.search("Gloo .* failed", text), text


def test_a_killed_coordinator_ends_the_other(tmp_path):
    """At once, whatever the timeouts."""
    text = other_ends(tmp_path, 0, signal.SIGKILL, SLACK)
    assert "Failed to send RPC to coordination service" in text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_ends_the_other(tmp_path, rank):
    text = other_ends(tmp_path, rank, signal.SIGSTOP, HEARTBEAT + SLACK, *TIMEOUTS)
    assert "Terminating process because the JAX distributed service" in text


@pytest.mark.slow
def test_a_worker_that_hangs_in_python_ends_the_other(tmp_path):
    """Its heartbeats go on: the collective fails, and then the shutdown has its timeout."""
    text = other_ends(tmp_path, 1, signal.SIGUSR1, 3 + SHUTDOWN + SLACK, *TIMEOUTS, 3)
    assert "Timed out waiting 3000ms" in text


@pytest.mark.slow
@pytest.mark.parametrize(("number", "first"), [
    (signal.SIGKILL, "rank 1 was ended by signal 9"),
    (signal.SIGSTOP, "rank 0 was ended by signal 6"),  # for want of heartbeats of rank 1
])
def test_launch_starts_again_after_a_killed_or_stopped_worker(tmp_path, number, first, capfd):
    command = [ending.PROGRAM, tmp_path, *TIMEOUTS, int(number)]
    assert launch.launch([*map(str, command)], 2, max_restarts=1) == 0
    assert capfd.readouterr().err.startswith(f"launch: {first}")


@pytest.mark.slow
def test_a_loop_on_each_host_starts_again(tmp_path):
    """And soon: a worker that comes back ends the old job before its timeout."""
    heartbeat = 20
    program = f"{sys.executable} {ending.PROGRAM} {tmp_path} {heartbeat} 300 9"
    loop = (f"export ONEBIT_RESTARTS=0; until {program} > {tmp_path}/output; do "  # Gloo prints
            "date +%s; ONEBIT_RESTARTS=$((ONEBIT_RESTARTS + 1)); done; date +%s")
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", JAX_NUM_PROCESSES="2",
               JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{processes.free_port()}")
    loops = [
        subprocess.Popen(["timeout", "120", "sh", "-c", loop], text=True,
                         env={**env, "JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL)
        for i in range(2)
    ]
    ends = [[int(x) for x in p.communicate()[0].split()] for p in loops]
    assert [p.returncode for p in loops] == [0, 0]
    assert all(len(times) >= 2 for times in ends), "failed, then done"
    killed, done = ends[1][0], ends[1][-1]
    print(f"done {done - killed} s later")
    assert done - killed < heartbeat
