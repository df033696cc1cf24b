"""The report of a program's collectives, against numbers worked out by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import AXIS, mesh

import onebit_jax


def compiled(fn, w=4, dtype=jnp.float32, on=None):
    """``fn`` of an array of 8 entries on each device."""
    on = on or mesh(w)
    spec = P(on.axis_names)
    mapped = jax.shard_map(fn, mesh=on, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8 * on.size,), dtype)).compile()


def only(report):
    assert len(report.collectives) == 1
    return report.collectives[0]


def psum(x):
    return lax.psum(x, AXIS)


# Each device holds 8 entries of 4 bytes: S = 32. Ring formulas, on 4 devices:
@pytest.mark.parametrize(
    ("fn", "w", "dtype", "operation", "sent"),
    [
        (psum, 2, "float32", "all-reduce", 32),  # 2 * 1/2 * 32
        (psum, 4, "float32", "all-reduce", 48),  # 2 * 3/4 * 32
        (lambda x: lax.all_gather(x, AXIS), 4, "float32", "all-gather", 96),  # 3 * 32
        (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), 4, "uint32", "all-to-all", 24),
        (lambda x: lax.psum_scatter(x, AXIS, tiled=True), 4, "float32", "reduce-scatter", 24),
        (lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), 4, "int32", "collective-permute", 32),
        (lambda x: lax.ppermute(x, AXIS, [(0, 0)]), 4, "int32", "collective-permute", 0),
        (lambda x: lax.all_gather(x, AXIS), 4, "bool", "all-gather", 24),  # 3 * 8 * 1 byte
        (psum, 1, "float32", "all-reduce", 0),
    ],
)
def test_the_ring_formulas(fn, w, dtype, operation, sent):
    report = onebit_jax.wire_report(compiled(fn, w, jnp.dtype(dtype)))
    c = only(report)
    assert (c.operation, c.dtype, c.bytes, c.trips, c.branch) == (operation, dtype, sent, 1, None)
    assert sum(c.shape) - len(c.shape) + 1 == 8, "the operand, perhaps as a row"
    assert report.total_bytes == sent
    assert report.bytes_by_dtype() == {dtype: sent}
    if operation != "collective-permute":
        assert c.groups == (tuple(range(w)),)


def test_several_arrays_in_one_all_reduce():
    c = only(onebit_jax.wire_report(compiled(lambda x: lax.psum((x, x[:3] * 2), AXIS))))
    assert (c.shape, c.operands, c.bytes) == ((11,), 2, 66)  # 2 * 3/4 * 44


def test_the_report_shows_what_goes_and_not_what_was_asked_for():
    """The CPU widens a bfloat16 sum to float32."""
    c = only(onebit_jax.wire_report(compiled(psum, dtype=jnp.bfloat16)))
    assert (c.dtype, c.bytes) == ("float32", 48)


@pytest.mark.parametrize(
    ("axis", "groups", "sent"),
    [("a", ((0, 4), (1, 5), (2, 6), (3, 7)), 32), ("b", ((0, 1, 2, 3), (4, 5, 6, 7)), 48)],
)
def test_one_axis_of_two(axis, groups, sent):
    on = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    c = only(onebit_jax.wire_report(compiled(lambda x: lax.psum(x, axis), on=on)))
    assert (c.groups, c.group_size, c.bytes) == (groups, len(groups[0]), sent)


def gathers(x, turns):
    return lax.scan(lambda i, _: (i + 1, lax.all_gather(x * i, AXIS)), 1.0, None, length=turns)[1]


def nested(x):
    inner = lambda c, _: (lax.scan(lambda d, _: (psum(d), None), c, None, length=3)[0], None)
    return lax.scan(inner, x, None, length=5)[0]


def counted(x, start, by):
    """Up to 11."""
    turn = lambda c: (c[0] + by, psum(c[1]))
    return lax.while_loop(lambda c: c[0] < 11, turn, (start, x))[1]


def without_notes(text):
    return re.sub(r", backend_config=\{.*", "", text)


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(
    ("fn", "trips", "sent"),
    [
        (lambda x: gathers(x, 5), 5, 480),  # 5 * 96
        (nested, 15, 720),  # 5 * 3 * 48
        (lambda x: counted(x, 2, 3), 3, 144),  # at 2, 5 and 8: 3 * 48
    ],
)
def test_loops_of_known_length_multiply(fn, trips, sent, noted):
    """Also where the compiler has not written the length down."""
    text = compiled(fn).as_text()
    assert "known_trip_count" in text
    if not noted:
        text = without_notes(text)
    c = only(onebit_jax.wire_report(text))
    assert (c.trips, c.bytes, c.bytes_each * trips, c.branch) == (trips, sent, sent, None)


def until_small(x):
    return lax.while_loop(lambda x: x.sum() > 3, psum, x)


def from_the_data(x):
    """Counts to a constant, but from who knows where."""
    return counted(x, x[0].astype(jnp.int32), 1)


def two_numbers(x):
    """Neither of them simply counts."""
    turn = lambda c: (c[1] + 1, c[0] + 2, psum(c[2]))
    return lax.while_loop(lambda c: c[0] < 9, turn, (0, 5, x))[2]


@pytest.mark.parametrize("fn", [until_small, from_the_data, two_numbers])
def test_loops_of_unknown_length_count_once(fn):
    report = onebit_jax.wire_report(without_notes(compiled(fn).as_text()))
    c = only(report)
    assert (c.trips, c.bytes) == (None, 48)
    assert re.fullmatch(r"while[.\w]* \(unknown turns\)", c.branch)
    assert "unknown length, counted as one turn" in str(report)


def test_branches_of_a_conditional():
    def step(x):
        x = psum(x)
        gathered = lambda x: lax.all_gather(x, AXIS).sum(0)
        return lax.cond(x[0] > 0, lambda x: gathers(x, 2)[0, 0], gathered, x)

    report = onebit_jax.wire_report(compiled(step))
    by_branch = report.bytes_by_branch()
    assert by_branch.pop(None) == 48
    labels = sorted(by_branch)
    assert [re.sub(r"^conditional\S* ", "", label) for label in labels] == ["branch 0", "branch 1"]
    # The last operand of lax.cond, false, is branch 0: one gather; branch 1 has two.
    assert [by_branch[label] for label in labels] == [96, 192]
    assert report.total_bytes == 48 + 96 + 192
    assert "it is not known which of them run" in str(report)
    assert "cond/branch_0_fun/all_gather" in str(report)


def test_agrees_with_the_bytes_counted_by_the_state():
    params = {"w": jnp.zeros((16, 4)), "b": jnp.zeros(8)}  # 72 entries, a multiple of 4
    tx = onebit_jax.exact_mean(AXIS)
    with jax.set_mesh(mesh(4)):
        state = tx.init(params)
    specs = onebit_jax.state_specs(state, AXIS)
    one = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh(4), in_specs=(P(AXIS), specs), out_specs=(P(), specs),
    )
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)
    program = jax.jit(one).lower(grads, state).compile()
    # 2 * 3/4 * 72 * 4
    assert onebit_jax.wire_report(program).total_bytes == 432
    assert onebit_jax.bytes_sent(program(grads, state)[1]) == 432


def test_a_1bit_step_has_full_precision_for_the_loss_only():
    params = {"w": jnp.zeros((64, 64))}
    policy = onebit_jax.VariancePolicy(
        lambda b2: (), lambda s, t, signals: (onebit_jax.Decision(False, jnp.int32(1)), s)
    )
    tx = onebit_jax.onebit_adam(1e-3, AXIS, variance=policy)
    step = onebit_jax.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh(4))
    with jax.set_mesh(mesh(4)):
        state = (params, tx.init(params))
    report = onebit_jax.wire_report(step.lower(state, jnp.ones((8, 64))).compile())
    # A chunk is 1024 entries: 32 words of signs and 2 scales. Twice 3/4 of 4 chunks.
    assert report.bytes_by_dtype()["uint32"] == 2 * 3 * (32 + 2) * 4
    assert report.bytes_by_dtype()["float32"] <= 2 * 3 * 4


#: As other backends write it.
OTHER = """\
HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8

%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

%yes (t: f32[8]) -> f32[8] {
  %t = f32[8]{0:T(1024)} parameter(0)
  ROOT %y = f32[8]{0} all-reduce(%t), channel_id=4, replica_groups={}, to_apply=%add
}

%no (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}

ENTRY %main (a: f32[8], b: bf16[2,4], q: pred[]) -> f32[8] {
  %a = f32[8]{0:T(1024)} parameter(0)
  %b = bf16[2,4]{1,0} parameter(1)
  %q = pred[] parameter(2)
  %s = ((f32[8]{0:T(1024)}, bf16[2,4]{1,0}), /*index=1*/(f32[32]{0}, bf16[8,4]{1,0})) \
all-gather-start(%a, %b), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %d = (f32[32]{0}, bf16[8,4]{1,0}) all-gather-done(%s)
  %u = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%a), calls=%wrapped
  %v = f32[4]{0} async-done(%u), calls=%wrapped
  ROOT %c = f32[8]{0} conditional(%q, %a, %a), true_computation=%yes, false_computation=%no
}
"""


def test_other_spellings():
    gather, half, scatter, reduce = onebit_jax.wire_report(OTHER).collectives
    by_rows = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gather[:5] == ("all-gather", "float32", (8,), 1, by_rows)
    assert half[:5] == ("all-gather", "bfloat16", (2, 4), 1, by_rows)
    assert (gather.bytes, half.bytes) == (3 * 32, 3 * 16)
    assert scatter.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert scatter.bytes == 16
    assert (reduce.groups, reduce.branch) == ((tuple(range(8)),), "c true")
    assert reduce.bytes == 2 * 7 * 32 // 8


def test_no_collectives():
    report = onebit_jax.wire_report(jax.jit(jnp.sin).lower(1.0).compile())
    assert (report.total_bytes, report.bytes_by_dtype()) == (0, {})
    assert str(report) == "0 collectives, a device sends 0 bytes"


def test_what_is_not_a_compiled_program():
    with pytest.raises(ValueError, match=r"HloModule, found 'module @jit_sin.*\.compile\(\)"):
        onebit_jax.wire_report(jax.jit(jnp.sin).lower(1.0))
    with pytest.raises(ValueError, match="found 'nothing'"):
        onebit_jax.wire_report("")
    with pytest.raises(TypeError, match="found int"):
        onebit_jax.wire_report(3)
    with pytest.raises(ValueError, match="expected lists such as"):
        onebit_jax.wire_report(OTHER.replace("[2,4]<=[8]", "@mesh{a}"))
