"""One process of ``bench net``, which starts it: times the steps of all methods in turn."""

import abc
import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import onebit_jax
from onebit_jax.cli.bench_models import EXCHANGE, METHODS, MODELS, Model, adam_by_hand
from onebit_jax.compression import allreduce
from onebit_jax.compression.chunks import is_direct

#: Steps of every method before the timed ones: compilation and the exact round.
UNTIMED = 2

#: Headers of a packet in bytes: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12. A
#: large packet that the kernel cuts up after the counter has them once, as it counts once.
HEADERS = 66


class Sent(NamedTuple):
    """What a network interface has sent since it was made."""

    bytes: int
    packets: int


class Timed(abc.ABC):
    """Something that all processes do in steps, and what is on record of it."""

    def __init__(self) -> None:
        self.predicted = 0
        self.milliseconds = 0.0
        self.record: dict[str, list[float]] = {"ms": [], "bytes": [], "payload": []}

    @abc.abstractmethod
    def step(self, batch: Any) -> None:
        """One step, done when all of its results are there; sets ``milliseconds``."""

    def timed_step(self, batch: Any, idle: Sent) -> None:
        """One step on the record, with what the interface sent in it."""
        sent = _sent_by(lambda: self.step(batch))
        n_bytes = sent.bytes - idle.bytes
        self.record["ms"].append(self.milliseconds)
        self.record["bytes"].append(n_bytes)
        self.record["payload"].append(n_bytes - HEADERS * (sent.packets - idle.packets))


class Runner(Timed):
    """A method with its own state, stepped in turn with the others."""

    def __init__(self, name: str, model: Model, mesh: Mesh):
        super().__init__()
        tx = METHODS[name]()
        made = onebit_jax.make_train_step(model.loss, tx, mesh)
        self._step: Any = adam_by_hand(model.loss, mesh) if name == "adam" else made
        params = jax.jit(model.init)(jax.random.key(0))
        self._counts = name != "adam"
        if not self._counts:
            self.predicted = allreduce.exact_round_bytes(params, mesh.size)
        with jax.set_mesh(mesh):
            self._state = made.place((params, tx.init(params)))

    def step(self, batch: Any) -> None:
        before = onebit_jax.bytes_sent(self._state) if self._counts else 0
        start = time.perf_counter()
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        self.milliseconds = 1e3 * (time.perf_counter() - start)
        if self._counts:
            self.predicted = onebit_jax.bytes_sent(self._state) - before


class Exchange(Timed):
    """The exchange of a 1-bit round alone: as many words as it sends, on the same way."""

    def __init__(self, n_bytes: int, mesh: Mesh):
        super().__init__()
        w = mesh.size
        direct = is_direct(w)
        self.predicted = n_bytes
        row = n_bytes // 4 // max(w - 1, 1) // (1 if direct else 2)

        def exchange(payload: jax.Array) -> jax.Array:
            if not direct:
                payload = allreduce.swap_payload(payload, "data")[:1]
            return allreduce.gather_payload(payload, "data")

        data, everywhere = PartitionSpec("data"), PartitionSpec()
        self._exchange = jax.jit(
            jax.shard_map(exchange, mesh=mesh, in_specs=data, out_specs=everywhere)
        )
        shape = (w if direct else w * w, row)
        self._payload = jax.jit(
            lambda: jnp.ones(shape, jnp.uint32), out_shardings=NamedSharding(mesh, data)
        )()

    def step(self, batch: Any) -> None:
        start = time.perf_counter()
        jax.block_until_ready(self._exchange(self._payload))
        self.milliseconds = 1e3 * (time.perf_counter() - start)


def _read_sent() -> Sent:
    interface = os.environ["ONEBIT_INTERFACE"]
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, colon, columns = line.partition(":")
        if colon and name.strip() == interface:
            return Sent(*map(int, columns.split()[8:10]))
    raise ValueError(f"no network interface {interface!r} in /proc/net/dev")


def _sent_by(work: Callable[[], None]) -> Sent:
    """What the interface sends while all processes do some work."""
    # What one process waits for another has sent: behind the second barrier all of it
    # is counted. The barriers' own bytes are in an idle measurement too.
    _barrier()
    before = _read_sent()
    work()
    _barrier()
    after = _read_sent()
    return Sent(after.bytes - before.bytes, after.packets - before.packets)


def _barrier() -> None:
    multihost_utils.sync_global_devices("bench net")


def _idle() -> Sent:
    samples = [_sent_by(lambda: None) for _ in range(5)]
    return Sent(*(int(statistics.median(column)) for column in zip(*samples, strict=True)))


def _measure(model: Model, methods: Sequence[str], steps: int) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    local = model.batch(np.random.default_rng(jax.process_index()))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    put = lambda x: jax.make_array_from_process_local_data(sharding, x)
    batch = jax.tree.map(put, local)
    runners: dict[str, Timed] = {name: Runner(name, model, mesh) for name in methods}
    for runner in runners.values():
        for _ in range(UNTIMED):
            runner.step(batch)
    if "onebit_adam" in runners:
        runners[EXCHANGE] = Exchange(runners["onebit_adam"].predicted, mesh)
        runners[EXCHANGE].step(batch)
    idle = _idle()
    # Round robin, so that a change of the machine's load meets all methods.
    for _ in range(steps):
        for runner in runners.values():
            runner.timed_step(batch, idle)
    return {name: {**r.record, "predicted": r.predicted} for name, r in runners.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes what this process measured to ``DIR/RANK.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    jax.distributed.initialize()
    measured = _measure(MODELS[args.model], args.methods, args.steps)
    (args.out / f"{jax.process_index()}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
