"""What the compiled program sends, read from its text and not from the package."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import AXIS, mesh
from programs import always

import onebit_jax
from onebit_jax.compression import allreduce

WIDTHS = {"u32": 4, "u16": 2, "f32": 4, "s32": 4, "u8": 1, "pred": 1, "bf16": 2}
COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>all-to-all|all-gather|all-reduce|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)


def collectives(compiled):
    """(operation, dtypes, bytes of the result) of each in the program."""
    found = []
    for line in compiled.as_text().splitlines():
        match = COLLECTIVE.search(line)
        if match:
            parts = re.findall(r"(\w+)\[([\d,]*)\]", match["type"])
            size = sum(
                WIDTHS[t] * math.prod(int(d) for d in dims.split(",") if d) for t, dims in parts
            )
            found.append((match["op"], {t for t, _ in parts}, size))
    return found


def compiled_step(w, params, variance):
    tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=variance)
    with jax.set_mesh(mesh(w)):
        state = jax.eval_shape(tx.init, params)
    specs = onebit_jax.state_specs(state, AXIS)

    def step(params, state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh(w), in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs)
    )
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((w, *p.shape), jnp.float32), params)
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(shapes, state, grads).compile()


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
def test_the_train_step_sends_what_the_optimizer_sends(axis_type):
    """One exchange of bits, and one all-reduce for the loss; also accumulated."""
    params = {"w": jnp.zeros((64, 64))}
    loss_fn = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
    on = mesh(4, axis_type)
    for every_k in (1, 4):
        tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=always(False))
        tx = onebit_jax.accumulate(tx, every_k) if every_k > 1 else tx
        step = onebit_jax.make_train_step(loss_fn, tx, on)
        with jax.set_mesh(on):
            state = (params, tx.init(params))
        compiled = step.lower(state, jnp.ones((8, 64))).compile()
        found = collectives(compiled)
        assert sorted(op for op, types, _ in found if types == {"u32"}) == [
            "all-gather", "all-to-all",
        ]
        assert sum(size for _, types, size in found if types == {"f32"}) == 4
        entry = compiled.as_text().split("\nENTRY ")[1].split("\n}")[0]
        in_every_step = "all-to-all(" in entry
        assert in_every_step == (every_k == 1), "else only when the sum is complete"


def leaves(shapes):
    return {f"p{i}": np.zeros(s, np.float32) for i, s in enumerate(shapes)}


TREES = {
    "one large leaf": [(1024, 1024)],
    "16 leaves": [(64, 64), (8,)] * 8,
    "300 leaves": [(64, 64), (8,)] * 150,
    "one leaf smaller than the mesh": [(2,)],
}


@pytest.mark.parametrize(
    ("w", "tree"),
    [(2, "one large leaf"), (4, "one large leaf"), (8, "one large leaf"), (4, "16 leaves"),
     pytest.param(4, "300 leaves", marks=pytest.mark.slow), (8, "one leaf smaller than the mesh")],
)
def test_a_1bit_round_is_two_integer_collectives(w, tree):
    found = collectives(compiled_step(w, leaves(TREES[tree]), always(False)))
    assert sorted(op for op, _, _ in found) == ["all-gather", "all-to-all"][: 1 if w == 2 else 2]
    assert all(types == {"u32"} for _, types, _ in found)
    n = sum(math.prod(s) for s in TREES[tree])
    if tree == "one large leaf":
        # Two hold the whole payload: (w - 1) / w of it crosses the wire. Alone, the
        # all_gather of two workers holds that of both.
        for _, _, size in found:
            assert abs(size * len(found) / (2 * n / 8 * (1 + 32 / 512)) - 1) < 0.02
    expected = allreduce.onebit_round_bytes(leaves(TREES[tree]), w, onebit_jax.SignQuantizer())
    assert sum(size for _, _, size in found) * (w - 1) // w == expected


def test_the_whole_step_has_full_precision_in_one_branch_only():
    compiled = compiled_step(4, leaves([(256, 256), (256,)]), onebit_jax.refresh())
    large = [c for c in collectives(compiled) if "f32" in c[1] and c[2] > 4096]
    assert len(large) == 1, "the one all-reduce of the exact round"
    text = compiled.as_text()
    computations = re.split(r"\n(?=\S.*\{\n)", text)
    for computation in computations:
        ops = {m["op"] for m in COLLECTIVE.finditer(computation)}
        assert not {"all-to-all", "all-reduce"} <= ops, "never both kinds in one branch"


def test_the_exact_round_is_one_all_reduce():
    params = leaves(TREES["16 leaves"])
    found = collectives(compiled_step(4, params, always(True)))
    assert [op for op, _, _ in found] == ["all-reduce"]
    assert found[0][2] * 2 * 3 // 4 == allreduce.exact_round_bytes(params, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("w", "phases"), [(2, ["all-gather"]), (4, ["all-gather", "all-to-all"])])
def test_half_precision_is_two_bytes_on_the_wire(w, phases, dtype):
    def step(g):
        return allreduce.exact_allreduce(g[0], AXIS, dtype)[0]

    mapped = jax.shard_map(step, mesh=mesh(w), in_specs=P(AXIS), out_specs=P())
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((w, 100_001), jnp.float32)).compile()
    found = collectives(compiled)
    assert sorted(op for op, _, _ in found) == phases
    assert all(types == {"u16"} for _, types, _ in found)
    sent = sum(size for _, _, size in found) * (w - 1) // w
    assert sent == allreduce.exact_round_bytes(np.zeros(100_001), w, dtype)
    assert sent < 0.51 * allreduce.exact_round_bytes(np.zeros(100_001), w)


def test_model_parallel_shards_exchange_over_the_data_axis_only():
    two_by_two = jax.make_mesh((2, 2), (AXIS, "model"), devices=jax.devices()[:4],
                               axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=always(False))

    def step(params, g):
        return tx.update(g[0], tx.init(params))[0]

    mapped = jax.shard_map(step, mesh=two_by_two, in_specs=(P("model"), P(AXIS, "model")),
                           out_specs=P("model"))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096,), (2, 4096))]
    text = jax.jit(mapped).lower(*shapes).compile().as_text()
    groups = set()
    for line in text.splitlines():
        if COLLECTIVE.search(line) and "u32" in line:
            groups.add(re.search(r"replica_groups=(\S+?),? ", line + " ")[1].rstrip(","))
    assert groups <= {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)"}
    assert groups


@pytest.mark.slow
def test_a_tree_like_gpt2_small_works():
    """49 leaves, among them an embedding whose rows do not divide into words."""
    shapes = [(5025, 76), (102, 76)]
    for _ in range(5):
        shapes += [(76,), (76,), (76, 228), (228,), (76, 76), (76,), (76, 304), (304,), (304, 76)]
    shapes += [(76,), (76,)]
    assert len(shapes) == 49
    w, params = 4, leaves(shapes)
    found = collectives(compiled_step(w, params, always(False)))
    assert sorted(op for op, _, _ in found) == ["all-gather", "all-to-all"]
    n = sum(math.prod(s) for s in shapes)
    assert sum(size for _, _, size in found) / 2 < 1.1 * n / 8 * (1 + 32 / 512)
