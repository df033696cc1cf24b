import gzip
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import processes
import pytest
import rich.console

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(script, *args):
    return processes.run_all([[EXAMPLES / script, *args]])[0]


def check(data, names, steps, workers, accuracy):
    assert data["arguments"]["steps"] == steps
    assert data["arguments"]["workers"] == workers
    assert [r["optimizer"] for r in data["runs"]] == names
    for r in data["runs"]:
        assert r["exact_rounds"] + r["onebit_rounds"] == steps
        assert ("accuracy" in r) == accuracy
        assert np.isfinite(r["eval_loss"])
        last = r["curve"][-1]
        assert last[0] == steps
        assert last[1] == r["bytes_sent"]
        assert last[3] == r["eval_loss"]


def test_language_model(tmp_path):
    common = ["lm.py", "--steps", 2, "--workers", 2, "--optimizer", "paper", "--out", tmp_path,
              "--checkpoint", tmp_path / "saved", "--checkpoint-every", 1]
    output = run(*common, "--json", tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    check(data, ["paper"], 2, 2, accuracy=False)
    assert (tmp_path / "lm.png").stat().st_size > 1000
    assert "held-out loss" in output
    assert data["runs"][0]["exact_rounds"] == 1

    shutil.rmtree(tmp_path / "saved" / "paper" / "2")
    output = run(*common, "--json", tmp_path / "again.json", "--resume")
    assert "going on after step 1" in output
    (resumed,) = json.loads((tmp_path / "again.json").read_text())["runs"]
    assert resumed["eval_loss"] == data["runs"][0]["eval_loss"]
    assert [p[0] for p in resumed["curve"]] == [1, 2]


def test_cnn_on_digits_by_default_and_both_optimizers(tmp_path):
    run("cnn.py", "--steps", 2, "--workers", 2, "--out", tmp_path, "--json", tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    check(data, ["adam", "onebit_adam"], 2, 2, accuracy=True)
    # Still exact: the same numbers but for rounding.
    assert abs(data["runs"][0]["eval_loss"] - data["runs"][1]["eval_loss"]) < 1e-2


@pytest.mark.parametrize("compress", [True, False])
def test_cnn_reads_idx_files(tmp_path, compress):
    import cnn

    rng = np.random.default_rng(0)
    for name, n in (("train", 300), ("t10k", 50)):
        for kind, shape in (("images-idx3", (n, 12, 12)), ("labels-idx1", (n,))):
            content = rng.integers(0, 10, shape).astype(np.uint8)
            header = bytes([0, 0, 8, len(shape)]) + np.asarray(shape, ">u4").tobytes()
            path = tmp_path / f"{name}-{kind}-ubyte{'.gz' if compress else ''}"
            with (gzip.open if compress else open)(path, "wb") as file:
                file.write(header + content.tobytes())
            if name == "t10k" and shape == (n,):
                labels = content
    images, _, held, held_labels = cnn.load(tmp_path)
    assert images.shape == (300, 12, 12, 1)
    assert held.shape == (50, 12, 12, 1)
    assert abs(images.mean()) < 1e-4
    np.testing.assert_array_equal(held_labels, labels)


def test_cnn_says_what_is_wrong_with_a_folder(tmp_path):
    import cnn

    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"junk")
    with pytest.raises(SystemExit, match="not an IDX file of unsigned bytes"):
        cnn.load(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(SystemExit, match=r"no file train-images\*ubyte"):
        cnn.load(tmp_path)


def test_checkpoints_are_not_overwritten_by_a_new_run(tmp_path):
    import comparison
    import saving

    (tmp_path / "frozen" / "2").mkdir(parents=True)
    parse = comparison.arguments("", steps=2).parse_args
    with pytest.raises(SystemExit, match=r"holds checkpoints of steps \[2\].*--resume"):
        saving.Saved(parse(["--checkpoint", str(tmp_path)]), "frozen")
    with pytest.raises(SystemExit, match="--resume needs --checkpoint DIR"):
        comparison.start(parse(["--resume"]))


DONE = {"stage": "1-bit", "exact_rounds": 100, "onebit_rounds": 20, "skipped_rounds": 0,
        "bytes_sent": 12_345_678, "worker_error": 0.954, "server_error": 0.65, "variance_age": 3}


def report(console, *args):
    import comparison
    import reporting

    args = comparison.arguments("", steps=200).parse_args(args)
    with reporting.Report(args, "onebit_adam", 0, console) as shown:
        shown.trained(120, 2.5, DONE)
        shown.evaluated(120, {"loss": 2.75})


def test_a_log_has_a_line_for_each_evaluation():
    file = io.StringIO()
    report(rich.console.Console(file=file, width=40))
    # Rich before 15 ends a progress that is not shown with an empty line.
    assert file.getvalue().rstrip("\n") == (
        "onebit_adam  120/200  loss 2.500  1-bit  12.3 MB sent  error 0.95 / 0.65  age 3  "
        "held-out loss 2.750"
    )


@pytest.mark.parametrize(("width", "whole"), [(40, False), (100, True)])
def test_a_narrow_terminal_has_one_line_for_a_run(width, whole):
    file = io.StringIO()
    report(rich.console.Console(file=file, width=width, force_terminal=True, no_color=True))
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "\n", file.getvalue()).split("\n")
    shown = [line.rstrip() for line in lines if "120/200" in line]
    assert shown
    assert all(len(line) <= width for line in shown)
    assert not [line for line in lines if line.strip() and "/200" not in line]
    assert ("error 0.95 / 0.65  age 3" in shown[-1]) == whole


def test_tensorboard_reads_back_what_was_written(tmp_path, monkeypatch):
    from tensorboardX.proto.event_pb2 import Event

    report(rich.console.Console(quiet=True), "--tensorboard", str(tmp_path))
    (path,) = (tmp_path / "onebit_adam").iterdir()
    content, found = path.read_bytes(), {}
    while content:  # a record: its length, a checksum of that, itself, its checksum
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        content = content[16 + length :]
    expected = {"loss": 2.5, "held-out_loss": 2.75, **DONE}
    del expected["stage"]
    assert found == {tag: (120, pytest.approx(value)) for tag, value in expected.items()}


def test_without_tensorboardx_it_says_what_to_install(monkeypatch):
    import comparison

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    args = comparison.arguments("", steps=2).parse_args(["--tensorboard", "there"])
    with pytest.raises(SystemExit, match=r"needs the package tensorboardX: pip install"):
        comparison.start(args)


def test_workers_must_divide_the_batch():
    failed = subprocess.run(
        [sys.executable, EXAMPLES / "lm.py", "--workers", "3"], capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert "--workers must divide the batch of 16, found 3" in failed.stderr


def test_results_table_means_over_seeds(tmp_path):
    paths = []
    for seed, loss in ((0, 1.0), (1, 2.0)):
        runs = [
            {"optimizer": name, "seed": seed, "eval_loss": loss, "exact_rounds": 10,
             "onebit_rounds": 0, "bytes_sent": sent}
            for name, sent in (("adam", 8e6), ("onebit_adam", 1e6))
        ]
        paths.append(tmp_path / f"{seed}.json")
        paths[-1].write_text(json.dumps({"runs": runs}))
    (output,) = processes.run_all([[EXAMPLES / "results_table.py", *paths]])
    assert "| onebit_adam | mean | 1.5000 | 10 | 0 | 1 | 8.0x |" in output


def test_study_tells_time_to_the_same_loss(tmp_path):
    import study

    # (step, bytes, seconds, loss): the target 1.01 lies halfway between two evaluations.
    adam = {"curve": [[1, 5, 10.0, 3.0], [2, 6, 20.0, 1.02], [3, 7, 40.0, 1.0]],
            "eval_loss": 1.0, "seconds": 40.0, "bytes_sent": 2_000_000_000}
    quick = {**adam, "curve": [[1, 5, 4.0, 1.0]], "seconds": 5.0, "bytes_sent": 125_000_000}
    worse = {**adam, "curve": [[1, 5, 4.0, 3.0], [2, 6, 9.0, 2.0]], "eval_loss": 2.0}
    assert study.seconds_to(adam["curve"], 1.01) == pytest.approx(30.0)
    runs = {"adam": adam, "quick": quick, "worse": worse}
    alone = {name: {"seconds": 2.0} for name in runs}
    _, _, *rows = study.table("1gbit", runs, alone)
    assert rows[0][3:] == ["1/1.0", "30", "1.0x", "40", "2", "16", "22"]
    assert rows[1] == ["quick", "1.0000", "+0.00%", "1/16.0", "4", "7.5x", "5", "2", "1", "2"]
    assert rows[2][2:6] == ["+100.00%", "1/1.0", "never", ""]
    study.draw(runs, tmp_path / "plot.svg", "a title")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


@pytest.mark.slow
def test_study_and_hazards_run_in_small(tmp_path, monkeypatch):
    import study

    monkeypatch.setattr(study, "FULL", (study.Part("ngram_lm", 40, ("none",), study.OPTIMIZERS),))
    monkeypatch.setattr(study.rates, "bits_per_second", lambda rate: 1e9)
    monkeypatch.setattr(sys, "argv", ["study.py", "--optimizer", "paper", "--out", str(tmp_path)])
    study.main()
    assert len(list(tmp_path.glob("ngram_lm-40-*.json"))) == 4  # two optimizers, alone and not
    output = run("hazards.py", "--steps", 2)
    assert output.count("| adam |") == 4


def test_by_hand_is_short_and_trains():
    text = (EXAMPLES / "shard_map_by_hand.py").read_text()
    assert len(text.splitlines()) < 60
    output = run("shard_map_by_hand.py")
    losses = [float(line.split("loss ")[1]) for line in output.splitlines() if "loss" in line]
    assert losses[-1] < 0.01 * losses[0]
    assert "'exact_rounds': 50, 'onebit_rounds': 250" in output
