"""Optimizer step without a network, against optax.adam and a memory copy, on one core.

The 1-bit steps run on simulated workers that share the core and are counted per
worker. All programs are interleaved in one process; medians and quartiles.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax
from onebit_jax.compression import packing, tiles

AXIS = "data"


class Program(NamedTuple):
    """Something to time.

    Attributes:
      turn: runs it once on its own last result and waits.
      workers: how many workers' work that is.
      entry_bytes: bytes that have to cross the memory bus for each parameter.
    """

    turn: Callable[[], None]
    workers: int
    entry_bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line."""
    parser.add_argument("--params", type=float, default=25e6, help="parameters (default 25e6)")
    parser.add_argument("--leaves", type=int, default=1, help="leaves of equal size (default 1)")
    parser.add_argument("--workers", type=int, default=2, help="simulated workers (default 2)")
    parser.add_argument("--block", type=int, default=512, help="entries per scale (default 512)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each (default 15)")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table and writes the JSON file."""
    load = os.getloadavg()[0]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.workers)
    rows = max(1, round(args.params / args.leaves / packing.TILE))
    shapes = [(rows, packing.TILE)] * args.leaves
    quantizer = onebit_jax.SignQuantizer(args.block)
    programs = {
        "copy": _copy(shapes),
        "adam": _adam(shapes),
        "onebit": _onebit(shapes, args.workers, quantizer, None),
        "onebit_static": _onebit(shapes, args.workers, quantizer, False),
        **_pieces(shapes, args.workers, quantizer),
    }
    milliseconds = _interleaved(programs, args.steps)
    n = rows * packing.TILE * args.leaves
    adam = float(np.median(milliseconds["adam"]))
    results = []
    for name, program in programs.items():
        q1, median, q3 = np.percentile(milliseconds[name], [25, 50, 75]) / program.workers
        results.append({
            "name": name, "ms": median, "q1_ms": q1, "q3_ms": q3,
            "gb_per_s": program.entry_bytes * n / median / 1e6, "ratio_to_adam": median / adam,
        })
    print(f"{n} parameters in {args.leaves} leaves, {args.workers} workers, one core")
    print(f"load average before: {load:.2f}")
    print(f"{'':14}{'ms':>8}{'quartiles':>16}{'GB/s':>8}{'x adam':>8}")
    for r in results:
        quartiles = f"{r['q1_ms']:.1f}-{r['q3_ms']:.1f}"
        print(f"{r['name']:14}{r['ms']:8.1f}{quartiles:>16}{r['gb_per_s']:8.1f}"
              f"{r['ratio_to_adam']:8.2f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"load": load, "results": results}, file, indent=1)
    return 0


def _interleaved(programs: dict[str, Program], steps: int) -> dict[str, list[float]]:
    """Milliseconds of each program's turns, one turn of each at a time."""
    milliseconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(steps + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            program.turn()
            if i >= 2:  # the first turns compile and fault pages in
                milliseconds[name].append((time.perf_counter() - start) * 1e3)
    return milliseconds


def _repeated(fn: Callable[..., tuple], state: tuple, *fixed: Any) -> Callable[[], None]:
    """Calls ``fn(*state, *fixed) -> state`` on its own last state, which is donated."""
    jitted = jax.jit(fn, donate_argnums=tuple(range(len(state))))
    held = [state]

    def turn() -> None:
        held[0] = jax.block_until_ready(jitted(*held[0], *fixed))

    return turn


def _normal(shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def _copy(shapes: Sequence[tuple[int, int]]) -> Program:
    move = lambda *leaves: tuple(x * jnp.float32(1.0001) for x in leaves)
    return Program(_repeated(move, tuple(_normal(shapes))), 1, 8)


def _adam(shapes: Sequence[tuple[int, int]]) -> Program:
    tx = optax.adam(1e-3)
    params = _normal(shapes)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # Reads the gradient, reads and writes the parameter and both moments.
    return Program(_repeated(step, (params, tx.init(params)), _normal(shapes)), 1, 28)


def _onebit(
    shapes: Sequence[tuple[int, int]],
    w: int,
    quantizer: onebit_jax.SignQuantizer,
    exact: bool | None,
) -> Program:
    tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=1, quantizer=quantizer)
    mesh = jax.make_mesh((w,), (AXIS,), axis_types=(AxisType.Auto,))
    everywhere, apart = PartitionSpec(), PartitionSpec(AXIS)
    params = jax.device_put(_normal(shapes), NamedSharding(mesh, everywhere))
    grads = jax.device_put(
        _normal([(w, *shape) for shape in shapes]), NamedSharding(mesh, apart)
    )
    with jax.set_mesh(mesh):
        specs = onebit_jax.state_specs(jax.eval_shape(tx.init, params), AXIS)
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=everywhere, out_specs=specs))(params)

    def step(params: Any, state: Any, grads: Any, exact: bool | None) -> tuple[Any, Any]:
        local = [g[0] for g in grads]
        updates, state = tx.update(local, state, params, exact=exact)
        return optax.apply_updates(params, updates), state

    def on_mesh(exact: bool | None) -> Callable[..., tuple]:
        return jax.shard_map(
            functools.partial(step, exact=exact), mesh=mesh,
            in_specs=(everywhere, specs, apart), out_specs=(everywhere, specs),
        )

    # One exact round gives the second moment that is frozen then.
    params, state = jax.jit(on_mesh(True), donate_argnums=(0, 1))(params, state, grads)
    # Signs 16 (momentum, gradient, error, second moment), error 20, momentum 8,
    # parameter 16; more workers than two also serve: two passes over 1/w of it.
    entry_bytes = 60 + (0 if w <= 2 else 20 / w)
    return Program(_repeated(on_mesh(exact), (params, state), grads), w, entry_bytes)


def _pieces(
    shapes: Sequence[tuple[int, int]], w: int, quantizer: onebit_jax.SignQuantizer
) -> dict[str, Program]:
    """The parts of the compression, each alone, on all entries in one array."""
    n = sum(rows * width for rows, width in shapes)
    served = max(n // w // packing.TILE, 1)  # tiles
    planes = packing.to_planes(_normal([(n,)])[0])
    half = planes[:served]

    def encode(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return packing.pack_planes(part), quantizer.sizes(part)

    words, sizes = jax.jit(functools.partial(tiles.compute, encode))(planes)
    pairs = [(words[:served], sizes[:served])] * w

    def serve(error: jax.Array, pairs: Any) -> tuple[jax.Array, ...]:
        total = lambda into, pairs: sum((packing.signed_planes(*p) for p in pairs), start=into)
        fn = lambda args: encode(total(*args))
        answer = tiles.compute(fn, (error, pairs))
        rest = lambda into, args: total(into, args[0]) - packing.signed_planes(*args[1])
        return tiles.update(rest, error, (pairs, answer), jnp.bool_(True))[0], answer

    def reading(fn: Callable[[jax.Array], Any]) -> Callable[[], None]:
        jitted = jax.jit(fn)

        def turn() -> None:
            jax.block_until_ready(jitted(planes))

        return turn

    def with_scales(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        words, sizes = tiles.compute(encode, x)
        return words, quantizer.scales(sizes.reshape(-1), np.float32(quantizer.block_size or n))

    # Added to an array that is donated: a fresh one of this size costs page faults.
    decode = lambda into, words, sizes: (into + packing.signed_planes(words, sizes),)
    return {
        "pack": Program(reading(packing.pack_planes), 1, 4.125),
        "encode": Program(reading(with_scales), 1, 4.25),
        "server": Program(_repeated(lambda e, p: serve(e, p)[:1], (half + 0,), pairs), 1, 12 / w),
        "decode": Program(_repeated(decode, (planes + 0,), words, sizes), 1, 8.25),
    }
