"""Running a per-worker function in every way that users do."""

import functools

import jax
from jax.sharding import AxisType, PartitionSpec as P

from onebit_jax import workers

AXIS = "data"
#: How the axis is bound: shard_map with types that track it, without, and pmap.
MODES = ("vma", "no_vma", "pmap", "vmap")
COUNTS = (1, 2, 3, 4, 8)


def mesh(w, axis_type=AxisType.Auto):
    return jax.make_mesh((w,), (AXIS,), devices=jax.devices()[:w], axis_types=(axis_type,))


def run(mode, w, fn, *args):
    """Calls ``fn`` on each worker with its row of every argument; stacks the results.

    Arguments and results have a leading axis of ``w``.
    """
    if mode == "pmap":
        return jax.pmap(fn, axis_name=AXIS, devices=jax.devices()[:w])(*args)
    if mode == "vmap":
        return jax.jit(jax.vmap(fn, axis_name=AXIS))(*args)

    def local(*rows):
        results = fn(*jax.tree.map(lambda x: x[0], rows))
        vary = functools.partial(workers.per_worker, axis_name=AXIS)
        return jax.tree.map(lambda x: x[None], vary(results))

    mapped = jax.shard_map(
        local, mesh=mesh(w), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=mode == "vma"
    )
    return jax.jit(mapped)(*args)
