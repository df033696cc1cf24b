import json
import pathlib
import pickle
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import processes
import pytest
from jax.sharding import AxisType
from meshes import AXIS, mesh
from saved import assert_same, build, load, save, train

import onebit_jax
from onebit_jax import checkpoints


@pytest.mark.parametrize(("w", "options"), [
    (2, {}), (3, {"every_k": 2}),
    (4, {"axis_type": AxisType.Explicit, "mu_dtype": "bfloat16", "error_dtype": "bfloat16"}),
])
def test_what_is_restored_is_the_same_to_the_last_bit_and_goes_on_so(tmp_path, w, options):
    step, state = build(w, **options)
    state, _ = train(step, state, 0, 37)
    save(tmp_path, 37, state)
    kept = jax.tree.map(jnp.copy, state)
    unbroken, _ = train(step, state, 37, 60)
    again, fresh = build(w, **options)
    restored = load(tmp_path, fresh)
    assert_same(restored, kept)
    assert_same(train(again, restored, 37, 60)[0], unbroken)


def test_saving_goes_on_behind_the_training_that_donates_the_state(tmp_path):
    step, state = build(4)
    kept = {}
    with ocp.CheckpointManager(tmp_path) as manager:
        for t in range(3):
            state, _ = train(step, state, t, t + 1)
            kept[t] = jax.device_get(state)
            manager.save(t, args=ocp.args.Composite(**checkpoints.items(state)))
        manager.wait_until_finished()
        for t in range(3):
            restored = checkpoints.restore(manager, build(4)[1], t)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), kept[t])


def test_plain_orbax_saves_and_restores_a_state_of_two_workers(tmp_path):
    """As users do who know nothing of this module; no array of ours is empty."""
    tx = onebit_jax.onebit_adam(1e-2, AXIS)
    with jax.set_mesh(mesh(2)):
        state = tx.init({"w": jnp.ones((3, 70))})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "plain", state)
    assert_same(restored, state)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A checkpoint of 4 workers after 60 steps, its state, and the loss 200 steps later."""
    folder = tmp_path_factory.mktemp("four")
    step, state = build(4)
    state, _ = train(step, state, 0, 60)
    save(folder, 60, state)
    held = jax.device_get(state)
    _, loss = train(step, state, 60, 260)
    return folder, held, loss


def total_error(state):
    """What is still owed: the mean worker error and the server error of each leaf."""
    errors = state[1][0].errors
    owed = {}
    for name, worker in errors.worker_error.items():
        if worker is not None:
            owed[name] = np.asarray(worker).mean(axis=0)
            server = errors.server_error[name]
            if server is not None:
                flat = np.asarray(server).reshape(-1)[: owed[name].size]
                owed[name] = owed[name] + flat.reshape(owed[name].shape)
    return owed


@pytest.mark.parametrize("w", [1, 2, 3, 8])
def test_another_number_of_workers_keeps_the_errors_and_the_loss(four, w):
    folder, held, loss = four
    step, fresh = build(w)
    with pytest.raises(checkpoints.CheckpointError, match="of 4 workers.*jax.resize_workers"):
        load(folder, fresh)
    restored = load(folder, fresh, resize=True)
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, fresh)
    before, after = total_error(held), total_error(jax.device_get(restored))
    for name in before:
        assert name == "empty" or before[name].any()
        np.testing.assert_allclose(after[name], before[name], rtol=1e-6, atol=1e-7)
    for got, old in ((restored[0], held[0]), (restored[1][0].mu, held[1][0].mu)):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), old)
    _, now = train(step, restored, 60, 260)
    assert abs(now - loss) <= 0.02 * loss


def test_two_workers_become_four(tmp_path):
    step, state = build(2)
    state, _ = train(step, state, 0, 40)
    save(tmp_path, 40, state)
    held = jax.device_get(state)
    restored = load(tmp_path, build(4)[1], resize=True)
    before, after = total_error(held), total_error(jax.device_get(restored))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), after, before)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no complete checkpoint in {tmp_path}"):
        load(tmp_path, build(2)[1])
    step, state = build(2)
    save(tmp_path, 3, state)
    with pytest.raises(FileNotFoundError, match=r"of step 4 in .*found those of steps \[3\]"):
        load(tmp_path, state, step=4)


def copy_of(four, tmp_path):
    return pathlib.Path(shutil.copytree(four[0], tmp_path / "copy"))


def edit(folder, change):
    """Rewrites the list of contents."""
    path = folder / "60" / "contents" / "metadata"
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


NAME = "[1][0].mu['w']"


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(format=2), "has format 2, this version of onebit_jax reads up to 1"),
    (lambda c: c.update(format=0), "says no version of its format, found 0"),
    (lambda c: c.pop("format"), "says no version of its format, found None"),
    (lambda c: c.update(leaves=[]), "does not list the leaves of a state"),
    (lambda c: c.update(workers="4"), "does not list the leaves of a state"),
    (lambda c: c["leaves"].update({NAME: [[-1], "float32", 0]}), "does not list the leaves"),
    (lambda c: c["leaves"].update({NAME: [[12, 5], "float32", 0]}), r"mu\['w'\] has checksum"),
    (lambda c: c["leaves"].update({NAME: [[12, 6], "float32", 0]}), r"'w'\] is float32\[12, 6\]"),
    (lambda c: c["leaves"].update({NAME: [[12, 5], "int32", 0]}), r"mu\['w'\] is int32\[12, 5\]"),
    (lambda c: c["leaves"].pop(NAME), r"lacks \[.*mu\['w'\]"),
])
def test_a_list_of_contents_of_another_format_or_tampered_with(four, tmp_path, change, message):
    folder = copy_of(four, tmp_path)
    edit(folder, change)
    with pytest.raises(checkpoints.CheckpointError, match=message) as error:
        load(folder, build(4)[1])
    assert str(folder / "60") in str(error.value)


def test_a_damaged_file_is_noticed_or_does_not_matter(four, tmp_path):
    """Every file in turn; what is not an error must restore the very same state."""
    program = pathlib.Path(__file__).parents[1] / "damaged_checkpoints.py"
    (output,) = processes.run_all([[program, copy_of(four, tmp_path), 60]], devices=4)
    found = re.findall(r"(\d+) of (\d+) files refused", output)
    assert len(found) == 2, output
    assert all(5 <= int(refused) < int(files) for refused, files in found), output


def test_nothing_is_unpickled(four, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    load(four[0], build(4)[1])


def test_another_optimizer_or_model_is_told_by_its_leaves(four):
    with pytest.raises(checkpoints.CheckpointError, match=r"lacks \[.*worker_sum"):
        load(four[0], build(4, every_k=2)[1])
    with pytest.raises(checkpoints.CheckpointError, match=r"worker_error.* is float32\[4"):
        load(four[0], build(4, error_dtype="bfloat16")[1])


def test_a_checkpoint_of_something_else(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": jnp.ones(3)})))
    with pytest.raises(checkpoints.CheckpointError, match=r"contents: cannot be read.*items"):
        load(tmp_path, build(2)[1])
