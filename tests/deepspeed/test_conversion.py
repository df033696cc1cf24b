"""DeepSpeed's configuration of 1-bit Adam: what it becomes, and what is refused."""

import copy
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import AXIS, run

import onebit_jax
from onebit_jax import from_deepspeed_config
from onebit_jax.deepspeed import conversion, options
from onebit_jax.optimizers.variance import RefreshState

BLOCK = {
    "type": "OneBitAdam",
    "params": {
        "lr": 2e-3, "freeze_step": 7, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1,
        "comm_backend_name": "nccl", "cuda_aware": False,
    },
}


def block(**params):
    return {"type": "OneBitAdam", "params": params}


def trained(tx, grads, start):
    """The parameters of every worker after each step: ``(w, steps, n)``."""
    w, _, n = grads.shape

    def worker(grads):
        def step(carry, g):
            x, state = carry
            updates, state = tx.update(g, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), x

        x = jnp.full(n, start, jnp.float32)
        return jax.lax.scan(step, (x, tx.init(x)), grads)[1]

    return np.asarray(run("vma", w, worker, grads))


def noise(w=4, steps=6, n=40):
    return np.random.default_rng(0).normal(0.3, 1, size=(w, steps, n)).astype(np.float32)


def deepspeed_warmup(grads, start, lr, b1, b2, eps, weight_decay):
    """What DeepSpeed computes before the freeze: never a bias correction."""
    mean = grads.mean(axis=0, dtype=np.float64)
    x, m, v = np.full(mean.shape[1], start), 0.0, 0.0
    path = []
    for g, rate in zip(mean, np.broadcast_to(lr, len(mean)), strict=True):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        x = x - rate * (m / (np.sqrt(v) + eps) + weight_decay * x)
        path.append(x)
    return np.stack(path)


def same_as_its_call(converted, grads):
    """The path of the optimizer, which the expression builds too."""
    again = eval(converted.call, {"onebit_jax": onebit_jax, "optax": optax, "jnp": jnp})
    with jax.numpy_dtype_promotion("standard"):
        paths = [trained(tx, grads, 1.0) for tx in (converted.tx, again)]
    np.testing.assert_array_equal(*paths)
    return paths[0]


def test_one_configuration_block():
    converted = from_deepspeed_config(BLOCK, AXIS)
    assert converted.call == (
        "onebit_jax.onebit_adamw(\n    0.002,\n    'data',\n    b1=0.8,\n    b2=0.99,\n"
        "    eps=1e-06,\n    weight_decay=0.1,\n    variance=6,\n    bias_correction=False,\n)"
    )
    notes = dict(converted.notes)
    assert set(notes) == {*BLOCK["params"], "bias_correction"}
    for name in ("comm_backend_name", "cuda_aware"):
        assert "no meaning here" in notes[name]
        assert name in str(converted)
    assert "learning_rate=0.002" in notes["lr"]
    assert "variance=6" in notes["freeze_step"]
    assert "never corrects" in notes["bias_correction"]
    assert converted.call.splitlines()[0] in str(converted)

    misspelt = copy.deepcopy(BLOCK)
    misspelt["params"]["freeze_steps"] = misspelt["params"].pop("freeze_step")
    with pytest.raises(ValueError, match="params has an unknown option 'freeze_steps'. Did you "
                                         "mean 'freeze_step'\\? Known are amsgrad, betas"):
        from_deepspeed_config(misspelt, AXIS)

    # Six exact updates, and the seventh is not.
    path = same_as_its_call(converted, noise(steps=7))
    expected = deepspeed_warmup(noise(steps=7), 1.0, 2e-3, 0.8, 0.99, 1e-6, 0.1)
    for replica in path:
        np.testing.assert_allclose(replica[:6], expected[:6], rtol=2e-6)
    assert np.abs(path[0, 6] - expected[6]).max() > 1e-4


@pytest.mark.parametrize("w", [1, 4])
def test_the_numbers_of_a_deepspeed_run(w):
    """Two exact and two 1-bit updates of DeepSpeed; equal entries lose nothing in one bit."""
    tx = from_deepspeed_config(block(lr=0.1, freeze_step=3), AXIS).tx
    path = trained(tx, np.ones((w, 4, 32), np.float32), 1.0)
    expected = np.asarray([0.683772, 0.258813, -0.347313, -1.116489])
    np.testing.assert_allclose(path, np.broadcast_to(expected[:, None], path.shape), rtol=3e-6)


@pytest.mark.parametrize(("freeze_step", "exact"), [(0, 1), (1, 1), (2, 1), (3, 2), (10, 9)])
def test_as_many_exact_updates_as_deepspeed_makes(freeze_step, exact):
    converted = from_deepspeed_config(block(freeze_step=freeze_step), None)
    assert f"variance={exact},\n" in converted.call
    assert f"variance={exact}, the number" in dict(converted.notes)["freeze_step"]


def test_entries_without_gradient_need_no_mask():
    """DeepSpeed moves them by the scale over eps in its first 1-bit round."""
    grads = noise(1, 60, 1024)
    grads[:, :, ::2] = 0
    path = trained(from_deepspeed_config(block(freeze_step=31), AXIS).tx, grads, 0.0)
    updates = np.abs(np.diff(path[0], axis=0))
    without, others = updates[:, ::2], updates[:, 1::2]
    assert (without[:29] == 0).all()
    assert 0 < without.max() < others.max()
    assert np.abs(path[0, -1, ::2]).max() < others.max()


def test_defaults_are_those_of_deepspeed():
    call = from_deepspeed_config({"type": "onebitadam"}, None).call
    assert "onebit_adam(\n    0.001,\n    None,\n    b1=0.9,\n    b2=0.999,\n" in call
    assert "variance=99999" in call
    notes = dict(from_deepspeed_config({"type": "OneBitAdam"}, None).notes)
    assert "default being 100000" in notes["freeze_step"]


def test_adams_bias_correction_on_request():
    converted = from_deepspeed_config(BLOCK, AXIS, bias_correction=True)
    path = trained(converted.tx, noise(), 1.0)
    adamw = optax.adamw(2e-3, 0.8, 0.99, 1e-6, weight_decay=0.1)
    x = jnp.ones(40)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32
        state = adamw.init(x)
        for t, g in enumerate(noise().mean(axis=0)):
            updates, state = adamw.update(g, state, x)
            x = optax.apply_updates(x, updates)
            np.testing.assert_allclose(path[0, t], x, rtol=2e-6)
    assert "bias_correction=True" in dict(converted.notes)["bias_correction"]


def test_another_variance_and_learning_rate():
    variance, learning_rate = onebit_jax.refresh(exact_steps=2), optax.constant_schedule(0.1)
    config = {"optimizer": BLOCK, "scheduler": {"type": "OneCycle", "params": {}}}
    converted = from_deepspeed_config(
        config, None, variance=variance, learning_rate=learning_rate
    )
    assert "variance=variance" in converted.call
    notes = dict(converted.notes)
    for name in ("freeze_step", "lr", "scheduler"):
        assert "not used" in notes[name]
    x = jnp.zeros(3)
    state = converted.tx.init(x)
    assert isinstance(state[0].variance, RefreshState)
    # Without correction, and with the decays of the configuration.
    first = jax.jit(converted.tx.update)(jnp.ones(3), state, x)[0]
    np.testing.assert_allclose(first, -0.1 * 0.2 / np.sqrt(0.01), rtol=1e-4)
    assert "variance=5,\n" in from_deepspeed_config(BLOCK, AXIS, variance=5).call
    assert "(\n    0.5,\n" in from_deepspeed_config(BLOCK, AXIS, learning_rate=0.5).call


def test_a_whole_configuration():
    config = {
        "train_batch_size": 64, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "steps_per_print": 10, "fp16": {"enabled": True, "loss_scale": 0},
        "zero_optimization": {"stage": 0}, "communication_data_type": "fp16",
        "activation_checkpointing": {}, "optimizer": block(lr=9.0, freeze_step=7),
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 4,
            "warmup_type": "linear"}},
    }
    converted = from_deepspeed_config(config, AXIS)
    assert {*config} - {"optimizer"} <= dict(converted.notes).keys()
    assert "the scheduler sets the rate" in dict(converted.notes)["lr"]
    # The same gradient on all workers: there is no question of whose norm it is.
    grads = np.repeat(noise(1, 12), 4, axis=0)
    path = same_as_its_call(converted, grads)
    np.testing.assert_array_equal(path[:, 2::2], path[:, 1:-1:2])  # no update in between
    pairs = grads[0].reshape(6, 2, -1).mean(axis=1)
    norms = np.linalg.norm(pairs, axis=1, keepdims=True)
    clipped = pairs * np.minimum(0.5 / norms, 1)
    rates = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
    expected = deepspeed_warmup(clipped[None], 1.0, rates, 0.9, 0.999, 1e-8, 0.0)
    np.testing.assert_allclose(path[0, 1::2], expected, rtol=1e-5, atol=1e-6)


def test_zeros_are_no_clipping_and_no_accumulation():
    config = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "optimizer": BLOCK}
    converted = from_deepspeed_config(config, AXIS)
    assert converted.call == from_deepspeed_config(BLOCK, AXIS).call
    assert "no clipping" in dict(converted.notes)["gradient_clipping"]


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("total", [None, 30])
def test_schedulers(kind, total):
    low, high, steps = 0.01, 0.5, 10
    params = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": steps,
              "warmup_type": kind}
    name = "WarmupLR"
    if total:
        name, params["total_num_steps"] = "WarmupDecayLR", total
    rate = conversion._schedule({"type": name, "params": params})

    def share(i):
        if i < steps:
            return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps
        return max(0.0, (total - i) / (total - steps)) if total else 1.0

    counts = jnp.arange(40)
    expected = [low + (high - low) * share(i) for i in range(40)]
    with jax.numpy_dtype_promotion("standard"):
        again = eval(rate.text, {"optax": optax, "jnp": jnp})
        np.testing.assert_allclose(jax.vmap(rate.value)(counts), expected, rtol=1e-5)
        np.testing.assert_array_equal(jax.vmap(rate.value)(counts), jax.vmap(again)(counts))


WRONG = {
    "lr": [-1e-3, "1e-3", "auto", None, True, math.nan, math.inf, 10**400],
    "freeze_step": [-1, 2.5, "100", True, 2**31],
    "betas": [[0.9], [0.9, 1.0], [-0.1, 0.9], 0.9, [0.9, 0.99, 0.999], ["0.9", 0.99]],
    "eps": [-1e-8], "weight_decay": [-0.1], "bias_correction": [1], "amsgrad": [True, "no"],
    "max_grad_norm": [1.0, -1], "non_freeze": [True], "cuda_aware": ["yes"],
    "comm_backend_name": [3],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in WRONG.items() for v in vs])
def test_a_wrong_value_names_the_option_and_itself(name, value):
    with pytest.raises(ValueError, match=rf"optimizer\.params\.{name}") as error:
        from_deepspeed_config({"optimizer": block(**{name: value})}, AXIS)
    assert repr(value)[:200] in str(error.value)
    assert "must be" in str(error.value) or "cannot be kept" in str(error.value)


def test_all_options_of_the_optimizer_are_known():
    ignored = {"eps_inside_sqrt": True, "max_grad_norm": 0, "amsgrad": False,
               "exp_avg_mask": [1, 0], "non_freeze": False, "cuda_aware": True,
               "comm_backend_name": "mpi"}
    notes = dict(from_deepspeed_config(block(bias_correction=True, **ignored), AXIS).notes)
    for name in ignored:
        assert notes[name].startswith("no meaning here: ")
    assert "bias_correction=False" in notes["bias_correction"]


def with_scheduler(kind, **params):
    return {"optimizer": BLOCK, "scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "there is no optimizer among the options"),
        ({"fp16": {}}, r"there is no optimizer among the options \['fp16'\]: expected"),
        ({"optimiser": BLOCK}, "'optimiser'. Did you mean 'optimizer'"),
        ({"optimizer": [BLOCK]}, "optimizer must be an object of options, found"),
        ({"optimizer": {}}, 'optimizer.type is missing: expected "OneBitAdam"'),
        ({"params": {}}, 'type is missing: expected "OneBitAdam"'),
        ({"type": None}, "type must be a string, found None"),
        ({"type": "Adam"}, "type must be \"OneBitAdam\", found 'Adam'"),
        ({"type": "OneBitAdam", "params": [1]}, "params must be an object of options, found"),
        ({"type": "OneBitAdam", "param": {}}, "'param'. Did you mean 'params'"),
        (block(**{"cuda-aware": True}), "'cuda-aware'. Did you mean 'cuda_aware'"),
        ({"type": "ZeroOneAdam"}, 'ZeroOneAdam".*refresh.*doubling.*var_freeze_step'),
        ({"type": "OneBitLamb"}, 'OneBitLamb".*exact_mean.*optax.lamb'),
        ({"optimizer": BLOCK, "zero_optimization": {"stage": 1}},
         "zero_optimization.stage must be 0, found 1"),
        ({"optimizer": BLOCK, "zero_optimization": True}, "must be an object of options"),
        ({"optimizer": BLOCK, "sparse_gradients": True}, "gradients must be dense"),
        ({"optimizer": BLOCK, "gradient_clipping": -1}, "gradient_clipping must be a finite"),
        ({"optimizer": BLOCK, "gradient_accumulation_steps": 0}, "int from 1 .* found 0"),
        ({"optimizer": BLOCK, "gradient_acumulation_steps": 2}, "'gradient_accumulation_steps'"),
        (with_scheduler("WarmupCosineLR"), "one of WarmupLR, WarmupDecayLR, found 'WarmupCosineLR'"
                                           ".*learning_rate="),
        (with_scheduler(["WarmupLR"]), "scheduler.type must be a string"),
        (with_scheduler("WarmupLR"), "warmup_max_lr is missing"),
        (with_scheduler("WarmupLR", warmup_max_lr=[1.0]), "warmup_max_lr must be a finite number"),
        (with_scheduler("WarmupLR", warmup_type="cosine"), '"log" or "linear", found'),
        (with_scheduler("WarmupLR", warmup_steps=3), "'warmup_steps'. Did you mean"),
        (with_scheduler("WarmupDecayLR", warmup_max_lr=1.0), "total_num_steps is missing"),
        (with_scheduler("WarmupDecayLR", warmup_max_lr=1.0, total_num_steps=1000),
         "above the 1000 steps of warm-up, found 1000"),
    ],
)
def test_what_cannot_be_converted(config, message):
    with pytest.raises(ValueError, match=message):
        from_deepspeed_config(config, AXIS)


def test_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": BLOCK}), encoding="utf-8-sig")
    expected = from_deepspeed_config(BLOCK, AXIS).call
    assert from_deepspeed_config(path, AXIS).call == expected
    assert from_deepspeed_config(str(path), AXIS).call == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "in plain JSON, found none: Expecting value: line 1 column 1"),
        (json.dumps({"optimizer": BLOCK}).encode()[:-9], "in plain JSON, found none: .*line 1"),
        (b"optimizer: OneBitAdam", "in plain JSON, found none"),
        (b"\xff\xfe\x00\xd8\x80", "in plain JSON, found none"),
        (b"[" * 100_000, "in plain JSON, found none"),
        (b"[1]", r"must be an object of options, found \[1\]"),
        (b'{"optimizer": {"type": "OneBitAdam", "params": {"lr": 1, "lr": 2}}}',
         "the option 'lr' is there twice"),
        (b'{"type": "OneBitAdam", "params": {"lr": NaN}}', "params.lr must be .* found nan"),
        (b'{"type": "OneBitAdam", "params": {"lr": "__import__(\'os\').abort()"}}',
         "params.lr must be a finite number"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s)ds\.json: .*{message}"):
        from_deepspeed_config(path, AXIS)


def test_no_file_and_no_configuration(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a DeepSpeed configuration.*none\.json"):
        from_deepspeed_config(tmp_path / "none.json", AXIS)
    with pytest.raises(IsADirectoryError, match="expected a DeepSpeed configuration"):
        from_deepspeed_config(tmp_path, AXIS)
    with pytest.raises(TypeError, match="config must be a dict or a path, found list"):
        from_deepspeed_config([BLOCK], AXIS)


def test_the_guide_shows_what_the_converter_says(tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs/from_deepspeed.md").read_text()
    path = tmp_path / "ds.json"
    path.write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    scope = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], scope)
    call = from_deepspeed_config(path, AXIS).call
    assert scope["converted"].call == call
    # As a linter has it: the quotes.
    assert "tx = " + call.replace("'", '"') in page
    for name in options.OPTIMIZER:
        assert f"`{name}`" in page
