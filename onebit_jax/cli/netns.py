"""Hosts on slow links, simulated by network namespaces; needs root, ``ip`` and ``tc``.

Every simulated host is a namespace with one link to a bridge, which is in a namespace
of its own: nothing is added to the machine's own network.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

#: The network interface of every simulated host.
INTERFACE = "eth0"

_CONFIG = pathlib.Path("/etc/netns")


class NetworkError(RuntimeError):
    """The simulated network could not be made."""


class Host(NamedTuple):
    """A simulated host.

    Attributes:
      namespace: its name; ``ip netns exec NAMESPACE`` runs a program on it.
      address: its IP address.
    """

    namespace: str
    address: str


def missing() -> list[str]:
    """What this machine lacks to simulate hosts; empty if nothing."""
    found = [f"the command {c!r} (of iproute2)" for c in ("ip", "tc") if not shutil.which(c)]
    return found if os.geteuid() == 0 else ["root", *found]


@contextlib.contextmanager
def network(n: int, rate: str) -> Iterator[list[Host]]:
    """Hosts joined by links of a limited rate, removed at the end.

    A link has the rate in each direction. Of a process that is killed itself
    (SIGKILL) namespaces called ``onebit-PID-...`` remain.

    Args:
      n: number of hosts.
      rate: of each link, as ``tc`` takes it: ``"100mbit"``, ``"1gbit"``.

    Yields:
      The hosts.

    Raises:
      NetworkError: if something is missing, or ``ip`` or ``tc`` fails.
    """
    if lacking := missing():
        raise NetworkError(
            f"links limited to {rate} need {' and '.join(lacking)}. Provide it, or leave the "
            "rate at none for the loopback interface"
        )
    prefix = f"onebit-{os.getpid()}-{secrets.token_hex(3)}"
    bridge = f"{prefix}-bridge"
    hosts = [Host(f"{prefix}-{i}", f"10.77.{i // 250}.{i % 250 + 1}") for i in range(n)]
    try:
        _add_namespace(bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            _add_host(host, bridge, f"port{i}", rate)
        yield hosts
    finally:
        for name in (*(host.namespace for host in hosts), bridge):
            _remove_namespace(name)


def _add_namespace(name: str) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _add_host(host: Host, bridge: str, port: str, rate: str) -> None:
    name = host.namespace
    # Gloo binds the address of the machine's name. ip netns exec mounts this file.
    (_CONFIG / name).mkdir(parents=True)
    (_CONFIG / name / "hosts").write_text(
        f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
    )
    _add_namespace(name)
    _ip(
        "-n", bridge, "link", "add", port, "type", "veth",
        "peer", "name", INTERFACE, "netns", name,
    )
    _ip("-n", bridge, "link", "set", port, "master", "bridge")
    _ip("-n", name, "address", "add", f"{host.address}/16", "dev", INTERFACE)
    # Both ends, as a queue limits only what leaves.
    for namespace, device in ((name, INTERFACE), (bridge, port)):
        # No IPv6 address, so that nothing but the program's traffic is counted.
        _ip("-n", namespace, "link", "set", device, "addrgenmode", "none", "up")
        _command(
            "tc", "-n", namespace, "qdisc", "add", "dev", device, "root",
            "tbf", "rate", rate, "burst", "32kb", "latency", "400ms",
        )


def _remove_namespace(name: str) -> None:
    """Removes what there is of a namespace, and ends the processes left in it."""
    for pid in _ip("netns", "pids", name, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name, check=False)
    shutil.rmtree(_CONFIG / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _CONFIG.rmdir()  # if empty


def _ip(*args: str, check: bool = True) -> str:
    return _command("ip", *args, check=check)


def _command(*command: str, check: bool = True) -> str:
    # In a session of its own: a Ctrl-C shall not stop the cleaning up.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise NetworkError(
            f"{' '.join(command)!r} failed with {(done.stderr or done.stdout).strip()!r}. Check "
            "the rate (such as 100mbit or 1gbit) and that this kernel has namespaces, veth, "
            "bridge and tbf"
        )
    return done.stdout
