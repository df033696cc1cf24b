"""The predictions of ``python -m onebit_jax plan``, against numbers worked out by hand."""

import argparse
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

import onebit_jax
from onebit_jax import cli
from onebit_jax.cli import measuring, prediction as model, rates
from onebit_jax.compression import allreduce

SETTING = model.Setting(
    params=8000, workers=4, bandwidth=1e6, compute=0.1, adam_update=0.01, onebit_update=0.02
)


@pytest.fixture(autouse=True)
def round_constants(monkeypatch):
    """The real ones are measured, and may change."""
    constants = {
        "EFFICIENCY_F32": 0.9, "EFFICIENCY_BF16": 0.8, "EFFICIENCY_ONEBIT": 0.85,
        "ADAM_MEMORY_BYTES": 25, "ONEBIT_MEMORY_BYTES": 50, "MEMORY_SPEED": 20e6,
    }
    for name, value in constants.items():
        monkeypatch.setattr(model, name, value)


def test_four_predictions():
    adam, bf16, frozen, refreshed = model.predict(SETTING, 200, 0.25)
    # 2 * 3/4 * 8000 * 4 = 48,000 bytes; 48,000 * 8 / (1e6 * 0.9) = 0.426667 s;
    # with 0.1 of computation and 0.01 of update 0.536667 s a step.
    assert adam[:3] == (model.ADAM, 200, 0)
    assert adam[3:] == pytest.approx((0.536667, 107.3333, 48_000, 9_600_000), rel=1e-5)
    # Half the bytes: 24,000 * 8 / (1e6 * 0.8) = 0.24 s.
    assert bf16[:3] == (model.ADAM_BF16, 200, 0)
    assert bf16[3:] == pytest.approx((0.35, 70, 24_000, 4_800_000))
    # 1000 bytes of signs and 1/16 of that in scales: 2 * 3/4 * 1062.5 = 1593.75 bytes;
    # 12,750 bits / (1e6 * 0.85) = 0.015 s; 0.1 + 0.02 + 0.015 = 0.135 s a step.
    # 50 exact: 26.83333 + 150 * 0.135 = 47.08333 s; 2,400,000 + 239,062.5 bytes.
    assert frozen[:3] == (model.FROZEN, 50, 150)
    assert frozen[3:] == pytest.approx((0.2354167, 47.08333, 13_195.3125, 2_639_062.5), rel=1e-5)
    # 100, and then 105 111 117 124 131 139 147 156 165 175 185 196: 112 exact.
    # 112 * 0.5366667 + 88 * 0.135 = 71.98667 s; 5,376,000 + 140,250 bytes.
    assert refreshed[:3] == (model.REFRESHED, 112, 88)
    assert refreshed[3:] == pytest.approx((0.3599333, 71.98667, 27_581.25, 5_516_250), rel=1e-5)


def test_bytes_are_those_that_the_optimizer_counts():
    setting, params = SETTING._replace(params=2**20, workers=8), np.zeros(2**20)
    exact = allreduce.exact_round_bytes(params, 8)
    assert model.round_bytes(setting, model.F32_BYTES) == exact
    half = allreduce.exact_round_bytes(params, 8, "bfloat16")
    assert model.round_bytes(setting, model.BF16_BYTES) == half
    onebit = allreduce.onebit_round_bytes(params, 8, onebit_jax.SignQuantizer())
    assert model.round_bytes(setting, model.ONEBIT_BYTES) == onebit


def test_break_even():
    f32 = (model.F32_BYTES, 0.9)
    # 8 * (48,000 / 0.9 - 1593.75 / 0.85) = 411,666.7 bits saved for 0.01 s.
    rate = model.break_even(SETTING, *f32)
    assert rate == pytest.approx(41_166_667)
    # There, and only there, both take as long.
    for factor, faster in ((0.99, True), (1.01, False)):
        adam, _, onebit, _ = model.predict(SETTING._replace(bandwidth=rate * factor), 10, 0.0)
        assert (onebit.seconds < adam.seconds) == faster
    assert model.break_even(SETTING._replace(onebit_update=0.01), *f32) == math.inf
    alone = SETTING._replace(workers=1)
    assert model.break_even(alone, *f32) == 0
    assert model.break_even(alone._replace(onebit_update=0.001), *f32) == math.inf


def exact_steps_of_the_policy(steps):
    policy = onebit_jax.refresh()
    signals = onebit_jax.Signals(norm=lambda: jnp.float32(0), cut=jnp.bool_(False))

    def one(state, step):
        decision, state = policy.update(state, step, signals)
        return state, decision.exact

    return jax.jit(lambda: jax.lax.scan(one, policy.init(0.999), jnp.arange(steps))[1])()


def test_refresh_rounds_are_those_of_the_policy():
    counts = np.cumsum(exact_steps_of_the_policy(1000))
    for steps in (1, 50, 99, 100, 101, 105, 106, 500, 999, 1000):
        assert model.refresh_rounds(steps) == counts[steps - 1]


COMMAND = ["plan", "--params", "8e3", "--workers", "4", "--compute-ms", "100", "--steps", "200"]


def test_the_command(tmp_path, capsys):
    out = tmp_path / "plan.json"
    given = ["--bandwidth", "1mbit", "--exact-fraction", "0.25", "--json", str(out)]
    assert cli.main(COMMAND + given) == 0
    report = json.loads(out.read_text())
    # Updates by memory: 8000 * 25 / 20e6 = 0.01 s and 8000 * 50 / 20e6 = 0.02 s.
    assert report["setting"] == pytest.approx(SETTING._asdict())
    assert report["bandwidth_from"] == "--bandwidth"
    methods = {m["method"]: m for m in report["methods"]}
    assert list(methods) == [model.ADAM, model.ADAM_BF16, model.FROZEN, model.REFRESHED]
    assert methods[model.FROZEN]["seconds"] == pytest.approx(47.08333, rel=1e-5)
    assert methods[model.FROZEN]["speedup"] == pytest.approx(107.3333 / 47.08333, rel=1e-5)
    assert methods[model.FROZEN]["traffic_ratio"] == pytest.approx(9_600_000 / 2_639_062.5)
    # 8 * (24,000 / 0.8 - 1593.75 / 0.85) / 0.01
    assert report["break_even"] == pytest.approx(
        {model.ADAM: 41_166_667, model.ADAM_BF16: 22_500_000}
    )
    shown = capsys.readouterr().out
    assert "8,000 parameters, 4 workers, 1mbit, 200 steps" in shown
    assert "a 1-bit step is faster below 41.2mbit" in shown
    assert "…" not in shown, "no column is cut"


def test_no_network_or_no_slower_update(tmp_path):
    out = tmp_path / "plan.json"
    quick = ["--update-ms-adam", "3", "--update-ms-onebit", "3", "--bandwidth", "1gbit"]
    assert cli.main([*COMMAND, *quick, "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["break_even"].values()) == {"any"}
    assert cli.main([*COMMAND, *quick, "--workers", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["break_even"].values()) == {"none"}
    assert {m["traffic_ratio"] for m in report["methods"]} == {None}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--params", "0", "a whole number of at least 1, such as 340e6, found '0'"),
        ("--workers", "2.5", "a whole number of at least 1"),
        ("--workers", "inf", "a whole number of at least 1"),
        ("--exact-fraction", "1.1", "a number from 0 to 1, found '1.1'"),
        ("--compute-ms", "nan", "milliseconds, at least 0, found 'nan'"),
        ("--update-ms-adam", "-1", "milliseconds, at least 0"),
        ("--bandwidth", "1gb", "100mbit, 1gbit or 2.5gbit, found '1gb'"),
    ],
)
def test_bad_arguments(option, value, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*COMMAND, f"{option}={value}"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_of_the_run(monkeypatch, capsys):
    assert cli.main(COMMAND) == 2
    assert "error: no bandwidth: give --bandwidth" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main([*COMMAND, "--bandwidth", "1gbit"]) == 2
    assert "pip install 'onebit_jax[cli]'" in capsys.readouterr().err


def test_measured_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "LARGEST_UPDATE", 2048)
    monkeypatch.setattr(measuring, "LEAF", 1500)
    out = tmp_path / "plan.json"
    assert cli.main([*COMMAND, "--bandwidth", "1gbit", "--measure", "--json", str(out)]) == 0
    setting = json.loads(out.read_text())["setting"]
    assert 0 < setting["adam_update"] < 1
    assert 0 < setting["onebit_update"] < 1


#: In one of two processes: coordinator, rank, file.
LINK = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from onebit_jax import cli
sys.exit(cli.main(["plan", "--params", "1000", "--workers", "8", "--compute-ms", "1",
                   "--measure", "--json", sys.argv[3]]))
"""


@pytest.mark.slow
def test_measured_link(tmp_path):
    address = f"127.0.0.1:{processes.free_port()}"
    first, second = processes.run_all(
        [["-c", LINK, address, rank, tmp_path / f"{rank}.json"] for rank in range(2)]
    )
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["bandwidth_from"] == "measurement"
    assert 1e7 < report["setting"]["bandwidth"] < 1e12
    assert "(measured)" in first
    assert "parameters" not in second, "one of them speaks"
    assert not (tmp_path / "1.json").exists()


def test_rates():
    words = {
        "100mbit": 1e8, "1gbit": 1e9, "2.5gbit": 2.5e9, "25 Gbit/s": 25e9, ".5tbit": 5e11,
        "9600bit": 9600, "64kbit": 64e3,
    }
    assert {text: rates.bits_per_second(text) for text in words} == words
    for text in ("none", "1", "1gb", "1mbps", "0gbit", "-1gbit", "fast", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="in bits per second"):
            rates.bits_per_second(text)
    assert rates.bits_per_second_or_none("None") is None
    assert rates.bits_per_second_or_none("1gbit") == 1e9
    written = [rates.rate_text(r) for r in (999.9e6, 1e3, 0.5, 123_456, 2.5e9, 4e13)]
    assert written == ["1gbit", "1kbit", "0.5bit", "123kbit", "2.5gbit", "40tbit"]
