"""Start several processes of one program here, as jax.distributed workers.

Each gets a core of its own, and with --rate a network namespace of its own (needs root)
whose link has that rate in each direction. The program calls
jax.distributed.initialize() without arguments. Exit status: that of the first process
that failed, after which the others are ended. With --max-restarts all are then started
again, and the status is that of the last start. A stuck process counts as failed only
when jax.distributed's timeouts end another one. Needs Linux.
"""

import argparse
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from onebit_jax.cli import netns

#: Seconds between asking a process to end and killing it.
PATIENCE = 5.0

_PORT = 9477  # in a namespace of its own every port is free

#: ``(rank, status)`` of a process that has ended, or ``(None, -number)`` of a signal to
#: this one. A status is as in ``subprocess``: minus the signal that ended the process.
_Events = queue.SimpleQueue[tuple[int | None, int]]


class LaunchError(RuntimeError):
    """The processes could not be started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line."""
    parser.add_argument("-n", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--rate", default="none",
        help="of every process's link, such as 100mbit or 1gbit; none (default): loopback",
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="simulated CPU devices per process (default 1)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="when a process fails, start all again, up to N times (default 0)",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGS",
        help="an executable, or a file that ends in .py",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    try:
        return launch(
            program, args.n, args.rate, args.devices, max_restarts=args.max_restarts
        )
    except (LaunchError, netns.NetworkError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2


def launch(
    argv: Sequence[str],
    n: int,
    rate: str | None = None,
    devices: int = 1,
    env: dict[str, str] | None = None,
    prefix: bool = True,
    max_restarts: int = 0,
) -> int:
    """Runs ``n`` processes of one program and waits for them.

    Process i gets core i modulo the cores. Besides what JAX reads, its environment
    has ``ONEBIT_INTERFACE``, the network interface over which the processes talk, and
    ``ONEBIT_RESTARTS``, how often all have been started again: 0 at first. On SIGINT,
    SIGTERM or SIGHUP all processes are ended, and not started again.

    Args:
      argv: the program and its arguments; a program that ends in ``.py`` is run with
        this Python.
      n: number of processes.
      rate: of each link, as ``tc`` takes it; None or ``"none"`` for loopback.
      devices: simulated CPU devices per process.
      env: variables to add to the environment.
      prefix: whether to print the output through this process, each line with
        ``[rank]`` in front; else the processes write to the same output as this one.
      max_restarts: how often to start all processes again after one has failed. What
        they had reached is theirs to restore.

    Returns:
      0 if all processes returned 0, else the status of the first that did not, in the
      last start; as in a shell, 128 plus the signal for a process that a signal ended,
      or for this one.

    Raises:
      LaunchError: if the program is not found, for less than one process or device, or
        for a negative number of restarts.
      NetworkError: if the links cannot be made.
    """
    command = _command(argv)
    if n < 1 or devices < 1:
        raise LaunchError(
            f"-n and --devices must be at least 1, found -n {n} and --devices {devices}"
        )
    if max_restarts < 0:
        raise LaunchError(f"--max-restarts must be at least 0, found {max_restarts}")
    common = {**os.environ, **_settings(n, devices), **(env or {})}
    events: _Events = queue.SimpleQueue()
    with _signals_to(events):
        for restarts in range(max_restarts + 1):
            common["ONEBIT_RESTARTS"] = str(restarts)
            rank, status = _start_once([command] * n, rate, common, prefix, events)
            if rank is None or restarts == max_restarts:
                break
            if asked := _signal_among(events):  # while the others were ended
                status = asked
                break
            print(
                f"launch: rank {rank} {_ending(status)}: restart {restarts + 1} of {max_restarts}",
                file=sys.stderr, flush=True,
            )
    return status if status >= 0 else 128 - status


def _start_once(
    commands: list[list[str]], rate: str | None, env: dict[str, str], prefix: bool,
    events: _Events,
) -> tuple[int | None, int]:
    """Runs all processes, on a port or a network that no earlier start has used."""
    if rate is None or rate == "none":
        address = f"127.0.0.1:{_free_port()}"
        env = {**env, **_rendezvous(address), "ONEBIT_INTERFACE": "lo"}
        return _run_all(commands, env, prefix, events)
    with netns.network(len(commands), rate) as hosts:
        address = f"{hosts[0].address}:{_PORT}"
        env = {**env, **_rendezvous(address), "ONEBIT_INTERFACE": netns.INTERFACE}
        inside = [
            ["ip", "netns", "exec", host.namespace, *command]
            for host, command in zip(hosts, commands, strict=True)
        ]
        return _run_all(inside, env, prefix, events)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _command(argv: Sequence[str]) -> list[str]:
    if not argv:
        raise LaunchError("no program to run: put it and its arguments behind --")
    if argv[0].endswith(".py") and os.path.isfile(argv[0]):
        return [sys.executable, *argv]
    if not shutil.which(argv[0]):
        raise LaunchError(
            f"found no program {argv[0]!r}: expected an executable, or a file that ends in .py"
        )
    return list(argv)


def _settings(n: int, devices: int) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_NUM_PROCESSES": str(n),
        # JAX reads the address itself, but number and rank only from a cluster it
        # knows. Open MPI's is the first that it looks for.
        "OMPI_COMM_WORLD_SIZE": str(n),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "PYTHONUNBUFFERED": "1",
    }


def _rendezvous(address: str) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Turns the signals that ask to end into events, so that none interrupts cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    old = {s: signal.signal(s, lambda number, _: events.put((None, -number))) for s in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _run_all(
    commands: list[list[str]], env: dict[str, str], prefix: bool, events: _Events
) -> tuple[int | None, int]:
    started: list[subprocess.Popen] = []
    waiters: list[threading.Thread] = []
    readers: list[threading.Thread] = []
    cores = sorted(os.sched_getaffinity(0))
    try:
        for rank, command in enumerate(commands):
            ids = {"JAX_PROCESS_ID": str(rank), "OMPI_COMM_WORLD_RANK": str(rank)}
            core = cores[rank % len(cores)]
            started.append(_start(command, {**env, **ids}, prefix, core))
            waiters.append(_thread(_report_end, started[-1].pid, rank, events))
            if prefix:
                readers.append(_thread(_print_lines, started[-1], rank))
        return _first_failure(len(started), events)
    finally:
        _end(started)
        for waiter in waiters:
            waiter.join()  # before its process is reaped
        for process in started:
            process.wait()
        for reader in readers:
            reader.join(timeout=PATIENCE)


def _start(
    command: list[str], env: dict[str, str], prefix: bool, core: int
) -> subprocess.Popen:
    """Starts a process in a session, and so a process group, of its own."""
    out = subprocess.PIPE if prefix else None
    with _on_core(core):
        return subprocess.Popen(
            command, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT if prefix else None, text=True, errors="replace",
        )


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Binds this thread for a while: a process inherits it from its first moment."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _thread(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _report_end(pid: int, rank: int, events: _Events) -> None:
    # Does not reap it, so that the group keeps its number until all of it is ended.
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    exited = end.si_code == os.CLD_EXITED
    events.put((rank, end.si_status if exited else -end.si_status))


def _print_lines(process: subprocess.Popen, rank: int) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            # Goes on reading when nobody reads ours, or the process would block.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
                sys.stdout.flush()


def _first_failure(running: int, events: _Events) -> tuple[int | None, int]:
    while running:
        rank, status = events.get()
        if status:
            return rank, status
        running -= 1
    return None, 0


def _signal_among(events: _Events) -> int:
    """Empties the events of processes that are gone; minus the first signal to this one, or 0."""
    found = 0
    while not events.empty():
        rank, status = events.get()
        if rank is None and not found:
            found = status
    return found


def _end(started: list[subprocess.Popen]) -> None:
    """Ends what is left of the processes and their children."""
    _signal_groups(started, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not all(map(_has_ended, started)):
        time.sleep(0.02)
    _signal_groups(started, signal.SIGKILL)


def _has_ended(process: subprocess.Popen) -> bool:
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return os.waitid(os.P_PID, process.pid, flags) is not None


def _signal_groups(started: list[subprocess.Popen], number: int) -> None:
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
