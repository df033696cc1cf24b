"""Starting real processes from tests."""

import os
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_all(commands, devices=1, timeout=300):
    """Runs Python with each list of arguments at once; fails with their output."""
    env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu")
    started = [
        subprocess.Popen([sys.executable, *map(str, c)], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for c in commands
    ]
    try:
        outputs = [p.communicate(timeout=timeout)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    for p, output in zip(started, outputs, strict=True):
        assert p.returncode == 0, output
    return outputs
