"""Processes on this machine, on loopback and on links of a limited rate."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from links import needs_links

from onebit_jax import cli
from onebit_jax.cli import launch, netns

WAIT = "import time; time.sleep(600)"
RANK = "import os, sys; rank = int(os.environ['JAX_PROCESS_ID']); "
PSUM = """
import jax
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
spec = jax.sharding.PartitionSpec()
index_sum = lambda: jax.lax.psum(1 + jax.lax.axis_index("data"), "data")
out = jax.jit(jax.shard_map(index_sum, mesh=mesh, in_specs=(), out_specs=spec))()
assert jax.process_count() == 2 and int(out) == 3, (jax.process_count(), out)
"""
#: Rank 1 sends 2 MB to rank 0 or the other way, and waits until they are read.
TRANSFER = """
import os, socket, sys, time
rank, sender = int(os.environ["JAX_PROCESS_ID"]), int(sys.argv[1])
host = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")[0]
if rank == 0:
    connection, _ = socket.create_server((host, 5000)).accept()
else:
    for _ in range(200):
        try:
            connection = socket.create_connection((host, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
start = time.perf_counter()
if rank == sender:
    connection.sendall(bytes(2_000_000))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"!"
    took = time.perf_counter() - start
    lines = dict(x.split(":") for x in open("/proc/net/dev") if ":" in x)
    sent = int({k.strip(): v for k, v in lines.items()}[os.environ["ONEBIT_INTERFACE"]].split()[8])
    print(took, sent)
else:
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")
"""


def start(code, *args, n=2, options=()):
    """The status of ``n`` processes of some Python code."""
    return launch.launch([sys.executable, "-c", code, *map(str, args)], n, *options)


def is_alive(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def namespaces(pid):
    """What a launcher has left, of namespaces and of their files."""
    folders = [pathlib.Path("/run/netns"), pathlib.Path("/var/run/netns"),
               pathlib.Path("/etc/netns")]
    return [p for folder in folders if folder.is_dir() for p in folder.glob(f"onebit-{pid}-*")]


def test_all_run_with_rank_core_and_prefix(capfd):
    code = RANK + ("print('one', rank, len(os.sched_getaffinity(0))); "
                   "sys.stdout.write(os.environ['ONEBIT_INTERFACE']); sys.stderr.write('')")
    assert start(code, n=3) == 0
    lines = capfd.readouterr().out.splitlines()
    expected = [[f"[{rank}] one {rank} 1", f"[{rank}] lo"] for rank in range(3)]
    assert [[x for x in lines if x.startswith(f"[{r}] ")] for r in range(3)] == expected
    assert len(lines) == 6


def test_without_prefix_output_is_not_touched(capfd):
    assert start("print('plain')", n=1, options=(None, 1, None, False)) == 0
    assert capfd.readouterr().out == "plain\n"


def test_a_file_runs_with_this_python_and_gets_the_environment(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(sys.argv[1:], os.environ['EXTRA'])")
    assert launch.launch([str(program), "--x", "1"], 1, env={"EXTRA": "yes"}) == 0
    assert capfd.readouterr().out == "[0] ['--x', '1'] yes\n"


def test_the_first_failure_gives_the_status_and_ends_the_others(tmp_path):
    code = RANK + f"""
open(sys.argv[1] + str(rank), "w").write(str(os.getpid()))
if rank == 0:
    {WAIT}
import time
time.sleep(0.5 if rank == 1 else 3.0)
sys.exit(10 + rank)
"""
    begin = time.monotonic()
    assert start(code, tmp_path / "pid", n=3) == 11
    assert time.monotonic() - begin < 3
    assert not any(is_alive(int(p.read_text())) for p in tmp_path.iterdir())


def test_a_process_that_a_signal_ended_counts_as_failed():
    assert start("import os; os.kill(os.getpid(), 9)", n=1) == 128 + signal.SIGKILL


def test_one_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    code = RANK + f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(0.5)
if rank: sys.exit(3)
{WAIT}
"""
    assert start(code) == 3


#: Says which start this is and on which port; rank 1 ends as argument ``[start]`` says.
STARTS = RANK + f"""
start = int(os.environ["ONEBIT_RESTARTS"])
# In one write, as this process may be ended between two.
print(f"{{start}} {{os.environ['JAX_COORDINATOR_ADDRESS']}}", flush=True)
how = sys.argv[1:][start]
if rank == 1 and how == "kill":
    os.kill(os.getpid(), 9)
if rank == 0 and how not in ("0", "kill"):
    {WAIT}
sys.exit(int(how) if rank == 1 and how != "kill" else 0)
"""


def starts(capfd, *how, max_restarts):
    """The status, the lines on stderr, and the addresses of each start."""
    command = ["launch", "-n", "2", "--max-restarts", str(max_restarts), "--",
               sys.executable, "-c", STARTS, *how]
    status = cli.main(command)
    out, err = capfd.readouterr()
    addresses = {}
    for line in out.splitlines():
        _, start, address = line.split()
        addresses.setdefault(start, set()).add(address)
    return status, err.splitlines(), addresses


def test_a_failed_job_is_started_again(capfd):
    status, err, addresses = starts(capfd, "kill", "7", "0", max_restarts=3)
    assert status == 0
    assert err == ["launch: rank 1 was ended by signal 9 (Killed): restart 1 of 3",
                   "launch: rank 1 ended with status 7: restart 2 of 3"]
    assert sorted(addresses) == ["0", "1", "2"]
    assert all(len(both) == 1 for both in addresses.values())
    assert len(set.union(*addresses.values())) > 1, "a port of its own for each start"


@pytest.mark.parametrize(("how", "expected"), [(["5", "6"], 6), (["5", "kill"], 137)])
def test_the_last_failure_gives_the_status(capfd, how, expected):
    status, err, addresses = starts(capfd, *how, max_restarts=1)
    assert status == expected
    assert len(err) == 1
    assert len(addresses) == 2


def test_by_default_nothing_is_started_again(capfd):
    assert start(STARTS, "5", "0") == 5
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("failing", [False, True])
def test_a_signal_to_the_launcher_ends_it_without_a_restart(tmp_path, failing):
    """Also a signal that comes while what is left of a failed start is being ended."""
    code = RANK + f"""
import signal, time
if rank == 0:
    ending = lambda *_: (open(sys.argv[1] + "/ending", "w"), time.sleep(0.6), os._exit(0))
    signal.signal(signal.SIGTERM, ending)
    open(sys.argv[1] + "/ready" + os.environ["ONEBIT_RESTARTS"], "w")
    {WAIT}
while {failing} and not os.path.exists(sys.argv[1] + "/ready0"): time.sleep(0.02)
if {failing}: sys.exit(3)
{WAIT}
"""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "onebit_jax", "launch", "-n", "2", "--max-restarts", "1", "--",
         sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        awaited = tmp_path / ("ending" if failing else "ready0")
        deadline = time.monotonic() + 60
        while not awaited.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher.terminate()
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert err == ""
    assert not (tmp_path / "ready1").exists()


@needs_links
def test_each_start_has_limited_links_of_its_own(capfd):
    code = RANK + """
import subprocess
start = int(os.environ["ONEBIT_RESTARTS"])
print(subprocess.check_output(["ip", "netns", "identify"], text=True).strip())
sys.exit(4 if start == 0 else 0)
"""
    command = [sys.executable, "-c", code]
    assert launch.launch(command, 1, "1gbit", max_restarts=1) == 0
    first, second = capfd.readouterr().out.split()[1::2]
    assert first != second
    assert not namespaces(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("rate", ["none", pytest.param("1gbit", marks=needs_links)])
def test_signals_leave_nothing(tmp_path, number, rate):
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "{WAIT}"])
open(sys.argv[1] + os.environ["JAX_PROCESS_ID"], "w").write(f"{{os.getpid()}} {{child.pid}} ")
{WAIT}
"""
    # Under nohup the tests ignore SIGHUP, and what they start would as well.
    heeding = ("import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
               "from onebit_jax import cli; sys.exit(cli.main(sys.argv[1:]))")
    command = [sys.executable, "-c", heeding, "launch", "-n", "2", "--rate", rate, "--",
               sys.executable, "-c", code, str(tmp_path / "pids")]
    launcher = subprocess.Popen(command)
    pids = []
    try:
        deadline = time.monotonic() + 60
        while len(pids) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
            pids = [int(x) for p in tmp_path.iterdir() for x in p.read_text().split()]
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        assert bool(namespaces(launcher.pid)) == (rate != "none")
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == 128 + number
        time.sleep(0.2)
        assert not any(map(is_alive, pids))
        assert not namespaces(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_jax_needs_no_arguments(tmp_path, capfd):
    (tmp_path / "psum.py").write_text(PSUM)
    status = cli.main(["launch", "-n", "2", "--", str(tmp_path / "psum.py")])
    assert status == 0, capfd.readouterr().out


@needs_links
def test_jax_over_limited_links(capfd):
    status = start(PSUM, options=("100mbit",))
    assert status == 0, capfd.readouterr().out
    assert not namespaces(os.getpid())


@needs_links
@pytest.mark.parametrize("sender", [0, 1])
def test_the_limit_is_real(sender, capfd):
    assert start(TRANSFER, sender, options=("100mbit",)) == 0
    seconds, sent = map(float, capfd.readouterr().out.split()[1:])
    # 0.16 s at the rate; the first 32 kB pass at once.
    assert 0.13 <= seconds < 5
    assert 2e6 < sent < 2.3e6


@needs_links
def test_a_failure_over_limited_links_leaves_nothing():
    assert start("import sys; sys.exit(7)", options=("1gbit",)) == 7
    assert not namespaces(os.getpid())


@needs_links
def test_a_rate_that_tc_refuses(capsys):
    assert cli.main(["launch", "-n", "2", "--rate", "fast", "--", sys.executable]) == 2
    assert "fast" in capsys.readouterr().err
    assert not namespaces(os.getpid())


@pytest.mark.parametrize(("euid", "commands", "message"), [
    (1000, "/usr/bin/{}", "need root."),
    (0, None, r"need the command 'ip' \(of iproute2\) and the command 'tc'"),
])
def test_limited_links_say_what_is_missing(monkeypatch, euid, commands, message):
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(netns.shutil, "which", lambda c: commands and commands.format(c))
    with pytest.raises(netns.NetworkError, match=message), netns.network(2, "1gbit"):
        pass


@pytest.mark.parametrize(("args", "message"), [
    (["-n", "2", "--", "no-such-program"], "no program 'no-such-program'"),
    (["-n", "2"], "no program to run"),
    (["-n", "0", "--", "true"], "-n 0"),
    (["-n", "1", "--devices", "0", "--", "true"], "--devices 0"),
    (["-n", "1", "--max-restarts", "-1", "--", "true"], "--max-restarts must be at least 0"),
])
def test_bad_arguments_are_explained(args, message, capsys):
    assert cli.main(["launch", *args]) == 2
    assert message in capsys.readouterr().err
