"""Real processes that die and go on from their checkpoint."""

import pytest
import resumable

STEPS = 60


def start(folder, *args, **kwargs):
    folder.mkdir(exist_ok=True)
    return resumable.start(folder, STEPS, *args, **kwargs)


def same_end(got, expected):
    """But for where it started; floats went through JSON, which keeps all their bits."""
    return {**got, "first": 0} == {**expected, "first": 0}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert start(folder) == 0
    found = resumable.results(folder)
    assert found["exact_rounds"] >= 25
    assert found["onebit_rounds"] > 10
    return found


def test_a_killed_worker_and_a_restart_from_the_checkpoint_change_nothing(
    tmp_path, unbroken, capfd
):
    """One dies between checkpoints, and again in the middle of writing one."""
    assert start(tmp_path, "--die", 37, "--die-saving", 50, max_restarts=2) == 0
    assert capfd.readouterr().err.count("was ended by signal 9") == 2
    found = resumable.results(tmp_path)
    assert found["first"] in (30, 40), "the checkpoint of step 50 is not complete"
    assert same_end(found, unbroken)


@pytest.mark.slow
def test_a_fresh_start_goes_on_from_a_checkpoint(tmp_path, unbroken):
    """Saved after step 37 of 25 exact ones."""
    assert start(tmp_path, "--stop", 37) == 0
    assert start(tmp_path) == 0
    found = resumable.results(tmp_path)
    assert found["first"] == 37
    assert same_end(found, unbroken)


@pytest.mark.slow
def test_another_number_of_processes_is_refused_or_resized(tmp_path, unbroken, capfd):
    assert start(tmp_path, "--stop", 40) == 0
    assert start(tmp_path, n=1) != 0
    assert "Convert it with onebit_jax.resize_workers" in capfd.readouterr().out
    for n in (4, 1):
        assert start(tmp_path, "--resize", "--stop", 40 + 2 * n, n=n) == 0
    found = resumable.results(tmp_path, 1)
    assert found["workers"] == 1
    assert start(tmp_path, "--resize") == 0
    found = resumable.results(tmp_path)
    assert found["first"] == 42 or found["first"] == 48
    assert abs(found["loss"] - unbroken["loss"]) < 0.05 * unbroken["loss"]
