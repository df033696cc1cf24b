"""Real processes under jax.distributed on loopback."""

import json
import pathlib

import numpy as np
import processes
import pytest

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parent / "examples"


def train(tmp_path, count, devices):
    coordinator = f"127.0.0.1:{processes.free_port()}"
    outs = [tmp_path / f"{count}x{devices}-{rank}.npz" for rank in range(count)]
    script = HERE / "two_processes.py"
    processes.run_all(
        [[script, coordinator, count, rank, out] for rank, out in enumerate(outs)], devices
    )
    return [np.load(out) for out in outs]


def two_equal_one(tmp_path, devices):
    """Two processes agree to the bit, and with one process of all their devices."""
    (alone,) = train(tmp_path, 1, 2 * devices)
    first, second = train(tmp_path, 2, devices)
    for name in ("w", "b", "losses", "sent", "rounds"):
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-5, atol=1e-6)
    # Each process sees its own workers' errors, one sees them all.
    each = [first["errors"], second["errors"]]
    assert each[0][0] != each[1][0]
    np.testing.assert_allclose(
        np.sqrt(np.mean(np.square(each), axis=0)), alone["errors"], rtol=1e-3
    )
    return first


def test_two_processes_equal_one_with_two_devices(tmp_path):
    first = two_equal_one(tmp_path, devices=1)
    exact, onebit, skipped = first["rounds"]
    assert exact > 5
    assert onebit > 10
    assert skipped == 1, "the NaN of the last process"
    assert first["losses"][-1] < 0.8 * first["losses"][0]


@pytest.mark.slow
def test_four_devices_in_two_processes(tmp_path):
    two_equal_one(tmp_path, devices=2)


@pytest.mark.slow
def test_the_language_model_with_one_worker_per_process(tmp_path):
    coordinator = f"127.0.0.1:{processes.free_port()}"
    common = [EXAMPLES / "lm.py", "--distributed", "--coordinator", coordinator,
              "--num-processes", 2, "--steps", 4, "--optimizer", "frozen",
              "--out", tmp_path, "--json", tmp_path / "r.json"]
    outputs = processes.run_all([[*common, "--process-id", rank] for rank in range(2)])
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert (run["exact_rounds"], run["onebit_rounds"]) == (1, 3)
    assert "frozen" in outputs[0]
    assert "frozen" not in outputs[1], "only the first process prints"
