import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import AXIS, COUNTS, mesh, run

import onebit_jax
from onebit_jax.training import replicas

RNG = np.random.default_rng(0)
DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool", "complex64",
          "float8_e4m3fn")


def leaf(dtype, shape=(3, 70)):
    return jnp.asarray(RNG.integers(0, 2, shape) if dtype == "bool" else RNG.normal(size=shape),
                       dtype)


def flipped(x, bit):
    """``x`` with one bit of its bytes flipped."""
    raw = np.frombuffer(np.asarray(x).tobytes(), np.uint8).copy()
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(raw.tobytes(), np.asarray(x).dtype).reshape(x.shape)


def on_mesh(held, spec=P(), over=None):
    """A replicated array of which each device holds its own one of ``held``."""
    over = mesh(len(held)) if over is None else over
    parts = [jax.device_put(x, d) for x, d in zip(held, over.devices.flat, strict=True)]
    shape = np.shape(held[0])
    if spec != P():
        shape = (shape[0] * over.shape["model"], *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(over, spec), parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_flipped_bit_changes_the_checksum(dtype):
    x = np.asarray(leaf(dtype, (2, 5)))
    bits = range(0, 8 * x.nbytes, 8) if dtype == "bool" else range(8 * x.nbytes)
    both = jnp.asarray(np.stack([x, *(flipped(x, bit) for bit in bits)]))
    sums = np.asarray(jax.vmap(replicas.checksum)(both))
    assert (sums[1:] != sums[0]).all()


def test_places_and_keys_count():
    x = leaf("float32")
    assert replicas.checksum(x) != replicas.checksum(x[::-1])
    assert replicas.checksum(jnp.float32(0.0)) != replicas.checksum(jnp.float32(-0.0))
    keys = jax.random.key(0), jax.random.key(1)
    assert replicas.checksum(keys[0]) != replicas.checksum(keys[1])
    assert replicas.checksum(jnp.zeros((0, 3))) == 0
    tiny = jnp.arange(16) - 8
    assert len({int(replicas.checksum(x)) for x in tiny.astype(jnp.int4)}) == 16


@pytest.mark.parametrize("w", [n for n in COUNTS if n > 1])
def test_finds_one_flipped_bit_in_any_leaf_of_any_worker(w):
    values = {dtype: leaf(dtype) for dtype in DTYPES}
    good = {name: on_mesh([x] * w) for name, x in values.items()}
    onebit_jax.assert_replicas_equal(good, AXIS)
    for i, (name, x) in enumerate(values.items()):
        held = [x] * w
        held[i % w] = flipped(x, 8 * (37 * i % x.size))
        with pytest.raises(AssertionError, match=f"'{name}'. on worker") as error:
            onebit_jax.assert_replicas_equal({**good, name: on_mesh(held)}, AXIS)
        assert f"the {w} workers on axis 'data' hold different bits" in str(error.value)
        if w > 2:
            assert f"['{name}'] on worker {i % w}." in str(error.value)


def test_model_shards_are_compared_over_the_data_axis_only():
    four = jax.make_mesh((2, 2), (AXIS, "model"), devices=jax.devices()[:4],
                         axis_types=(AxisType.Auto,) * 2)
    a, b = leaf("float32"), leaf("float32")
    spec = P("model")
    onebit_jax.assert_replicas_equal(on_mesh([a, b, a, b], spec, four), AXIS)
    with pytest.raises(AssertionError, match="on worker 1"):
        onebit_jax.assert_replicas_equal(on_mesh([a, b, a, flipped(b, 5)], spec, four), AXIS)


@pytest.mark.parametrize("mode", ["vma", "no_vma", "pmap", "vmap"])
def test_fingerprints_inside(mode):
    x = np.stack([np.asarray(leaf("float32"))] * 4)
    x[3] = flipped(x[3], 1000)
    y = np.ones((4, 7), np.float32)
    rows = run(mode, 4, lambda *tree: onebit_jax.replica_fingerprint(tree, AXIS), x, y)
    assert rows.shape == (4, 4, 2)
    first = np.asarray(rows)[0]
    assert (np.asarray(rows) == first).all(), "the same on all workers"
    assert (first[:, 1] == first[0, 1]).all()
    assert len(set(first[:3, 0].tolist())) == 1
    assert first[3, 0] != first[0, 0]


def test_of_one_worker_and_of_nothing():
    assert onebit_jax.replica_fingerprint([jnp.ones(3), jnp.ones(2)], None).shape == (1, 2)
    assert onebit_jax.replica_fingerprint([], None).shape == (1, 0)
    onebit_jax.assert_replicas_equal({}, AXIS)


def test_what_is_each_workers_own_is_left_out():
    tx = onebit_jax.compressed_mean(AXIS)
    with jax.set_mesh(mesh(2)):
        state = tx.init(jnp.zeros(40))
    placed = jax.device_put(state, NamedSharding(mesh(2), P()))
    own = on_mesh([jnp.zeros((2, 40)), jnp.ones((2, 40))])
    errors = placed.errors._replace(worker_error=own)
    onebit_jax.assert_replicas_equal(placed._replace(errors=errors), AXIS)


def test_an_array_without_a_mesh_is_refused():
    with pytest.raises(ValueError, match=r"\['a'\] is not on a mesh with axis 'data'"):
        onebit_jax.assert_replicas_equal({"a": jnp.ones(3)}, AXIS)
