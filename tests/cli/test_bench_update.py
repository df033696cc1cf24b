"""The benchmark of the update, in its short form; it pins its process, so in one of its own."""

import json

import processes
import pytest


@pytest.mark.parametrize(("workers", "leaves", "block"), [
    (2, 1, 512), pytest.param(3, 2, 1024, marks=pytest.mark.slow),
])
def test_a_short_run(tmp_path, workers, leaves, block):
    out = tmp_path / "update.json"
    command = ["-m", "onebit_jax", "bench", "update", "--params", "3e5", "--leaves", leaves,
               "--workers", workers, "--block", block, "--steps", "2", "--json", out]
    (printed,) = processes.run_all([command])
    rows = {row["name"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == [
        "copy", "adam", "onebit", "onebit_static", "pack", "encode", "server", "decode"
    ]
    for name, row in rows.items():
        assert set(row) == {"name", "ms", "q1_ms", "q3_ms", "gb_per_s", "ratio_to_adam"}
        assert 0 < row["q1_ms"] <= row["ms"] <= row["q3_ms"]
        assert row["ratio_to_adam"] == pytest.approx(row["ms"] / rows["adam"]["ms"])
        assert name in printed
    entries = leaves * round(3e5 / leaves / 1024) * 1024
    assert f"{entries} parameters" in printed
    # Adam reads and writes parameter and both moments, and reads the gradient.
    moved = 28 * entries / (rows["adam"]["ms"] / 1e3)
    assert rows["adam"]["gb_per_s"] == pytest.approx(moved / 1e9)
