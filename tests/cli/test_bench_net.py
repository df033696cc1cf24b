"""The network benchmark, in its short form."""

import json
import math

import jax
import numpy as np
import pytest
from links import needs_links

from onebit_jax import cli
from onebit_jax.cli import bench_net
from onebit_jax.cli.bench_models import METHODS, MODELS

FIELDS = {
    "model", "method", "rate", "workers", "step_ms", "q1_ms", "q3_ms", "bytes_per_step",
    "payload_per_step", "predicted_bytes", "payload_over_predicted", "speedup_over_adam",
    "time_over_wire",
}


def parameters(name):
    return jax.tree.leaves(jax.eval_shape(MODELS[name].init, jax.random.key(0)))


def entries(name):
    return sum(math.prod(leaf.shape) for leaf in parameters(name))


@pytest.mark.parametrize(("name", "leaves", "size", "tolerance"), [
    ("mlp", 14, 25.2e6, 0.005), ("transformer", 170, 25e6, 0.02), ("tiny", 6, 0.2e6, 0.02),
])
def test_sizes_of_the_models(name, leaves, size, tolerance):
    assert len(parameters(name)) == leaves
    assert entries(name) == pytest.approx(size, rel=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_a_scalar_loss_and_a_gradient_for_every_leaf(name):
    model = MODELS[name]
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = model.batch(np.random.default_rng(0))
    loss, grads = jax.eval_shape(jax.value_and_grad(model.loss), params, batch)
    assert loss.shape == ()
    assert jax.tree.map(lambda g: g.shape, grads) == jax.tree.map(lambda p: p.shape, params)


def test_a_transformer_starts_near_the_loss_of_a_guess():
    model = MODELS["transformer"]
    loss = model.loss(model.init(jax.random.key(0)), model.batch(np.random.default_rng(0)))
    assert float(loss) == pytest.approx(math.log(256), abs=1.0)


def test_a_short_run(tmp_path, capfd):
    out, plot = tmp_path / "net.json", tmp_path / "net.png"
    status = cli.main(["bench", "net", "--model", "tiny", "--steps", "2", "--rates", "none",
                       "--json", str(out), "--plot", str(plot)])
    printed = capfd.readouterr().out
    assert status == 0, printed
    summary = json.loads(out.read_text())
    rows = {row["method"]: row for row in summary["results"]}
    assert len(summary["load_average"]) == 3
    assert list(rows) == [*METHODS, "exchange"]
    for row in rows.values():
        assert set(row) == FIELDS
        assert (row["model"], row["rate"], row["workers"]) == ("tiny", "none", 2)
        assert 0 < row["q1_ms"] <= row["step_ms"] <= row["q3_ms"]
        assert row["method"] in printed
    n, w = entries("tiny"), 2
    assert rows["adam"]["predicted_bytes"] == 2 * (w - 1) / w * 4 * n
    assert rows["adam_bf16"]["predicted_bytes"] == 2 * (w - 1) / w * 2 * n
    # A bit per entry and a scale per 512, and a few more where a leaf ends.
    for method, scales in (("onebit_adam", 1 / 16), ("paper", 0.0)):
        bits = 2 * (w - 1) / w * n / 8 * (1 + scales)
        assert bits <= rows[method]["predicted_bytes"] < 1.02 * bits
    for method, most in (("adam", 1.15), ("adam_bf16", 1.15), ("onebit_adam", 1.5),
                         ("paper", 1.5)):
        counted = rows[method]["bytes_per_step"] / rows[method]["predicted_bytes"]
        assert 1 <= counted < most, (method, counted)
    assert rows["adam"]["speedup_over_adam"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@needs_links
def test_counted_bytes_are_those_predicted_and_the_link_takes_its_time(tmp_path, capfd):
    out = tmp_path / "net.json"
    status = cli.main(["bench", "net", "--model", "tiny", "--steps", "3", "--rates", "20mbit",
                       "--methods", "adam,onebit_adam", "--json", str(out)])
    assert status == 0, capfd.readouterr().out
    adam, onebit, exchange = json.loads(out.read_text())["results"]
    assert exchange["method"] == "exchange"
    assert exchange["speedup_over_adam"] is None
    assert exchange["predicted_bytes"] == onebit["predicted_bytes"]
    # 27 kB, of which the burst lets 32 kB pass at once.
    assert exchange["step_ms"] < onebit["step_ms"]
    assert adam["payload_over_predicted"] == pytest.approx(1, abs=0.02)
    # The loss and the agreement that all is finite are not predicted.
    assert onebit["payload_over_predicted"] == pytest.approx(1, abs=0.1)
    at_the_rate = 1e3 * (adam["predicted_bytes"] - 32e3) * 8 / 20e6
    assert at_the_rate <= adam["step_ms"] < 5 * at_the_rate
    assert onebit["speedup_over_adam"] > 1.5


def test_rows_take_the_slowest_process_and_share_loopback():
    args = bench_net.argparse.Namespace(model="tiny", n=2, methods=["adam", "paper"])

    def process(ms):
        adam = {"ms": ms, "bytes": [220, 240, 230], "payload": [200, 210, 205], "predicted": 100}
        return {"adam": adam, "paper": dict(adam, ms=[1.0] * 3)}

    measured = [process([1.0, 5.0, 3.0]), process([4.0, 2.0, 3.0])]
    adam, paper = bench_net._rows(args, "none", measured)
    assert (adam["q1_ms"], adam["step_ms"], adam["q3_ms"]) == (3.5, 4, 4.5)
    assert (adam["bytes_per_step"], adam["payload_over_predicted"]) == (115, 1.025)
    assert paper["speedup_over_adam"] == 4
    limited, _ = bench_net._rows(args, "1gbit", measured)
    assert limited["bytes_per_step"] == 230


def test_bytes_far_from_the_predicted_are_marked(capsys):
    row = {"model": "tiny", "workers": 2, "rate": "1gbit", "method": "adam", "step_ms": 1.0,
           "q1_ms": 1.0, "q3_ms": 1.0, "bytes_per_step": 1e6, "speedup_over_adam": None,
           "time_over_wire": None}
    bench_net._print_table([dict(row, payload_over_predicted=1.049)], (0, 0, 0))
    assert "!" not in capsys.readouterr().out
    bench_net._print_table([dict(row, payload_over_predicted=0.94)], (0, 0, 0))
    printed = capsys.readouterr().out
    assert "0.940 !" in printed
    assert "more than 5% from the predicted bytes" in printed


@pytest.mark.parametrize(("args", "message"), [
    (["--methods", "adam,sgd"], "no methods sgd: choose from adam, adam_bf16"),
    (["--rates", "none,fast"], "--rates: expected a rate above 0 in bits per second"),
    (["--rates", ""], "at least one"),
    (["-n", "0"], "found 0 and 12"),
    (["-n", "1"], "one process sends nothing"),
    (["--json", "/nowhere/at/all.json"], "no folder /nowhere/at"),
])
def test_bad_arguments_are_explained(args, message, capsys):
    assert cli.main(["bench", "net", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench_net, "find_spec", lambda name: None)
    assert cli.main(["bench", "net", "--plot", "x.png"]) == 2
    message = capsys.readouterr().err
    assert "needs rich and matplotlib: pip install 'onebit_jax[cli]'" in message


def test_a_failed_process_ends_the_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(bench_net.launch, "launch", lambda *args: 3)
    assert cli.main(["bench", "net", "--rates", "1gbit"]) == 3
    assert "stopped with status 3 at rate 1gbit" in capsys.readouterr().err
