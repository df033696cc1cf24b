"""A user's own field of any name is just a field."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import AXIS, mesh

import onebit_jax
from onebit_jax.compression import marks
from onebit_jax.compression.feedback import ErrorFeedback


class Params(NamedTuple):
    sent: Any
    worker_error: Any
    nu_spans: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    sent: Any
    server_error: Any
    worker_sum: Any


@pytest.mark.parametrize("kind", [Params, Model])
def test_parameters_called_like_fields_of_a_state_train(kind):
    params = kind(jnp.ones(3), jnp.ones((2, 40)), jnp.ones(5))
    tx = onebit_jax.accumulate(onebit_jax.onebit_adam(1e-2, AXIS, variance=2), 2)
    loss_fn = lambda p, x: sum(jnp.sum(v**2) for v in jax.tree.leaves(p)) * jnp.mean(x)
    step = onebit_jax.make_train_step(loss_fn, tx, mesh(4))
    with jax.set_mesh(mesh(4)):
        state = (params, tx.init(params))
    for _ in range(12):
        state, metrics = step(state, jnp.ones(8))
    assert metrics["loss"] < 88 * 0.95
    assert isinstance(state[0], kind)
    specs = onebit_jax.state_specs(state[0], AXIS)
    is_spec = lambda x: isinstance(x, P)
    assert set(jax.tree.leaves(specs, is_leaf=is_spec)) == {P()}
    resized = onebit_jax.resize_workers(jax.device_get(state), 2)
    for old, new in zip(jax.tree.leaves(state[0]), jax.tree.leaves(resized[0]), strict=True):
        assert np.shape(old) == np.shape(new)
    param_specs = kind(P("model"), P(None, "model"), P())
    specs = onebit_jax.state_specs(state[1].inner_state, AXIS, param_specs)
    flat = [P(("model",)), P(("model",)), P(None)]
    assert jax.tree.leaves(specs[0].nu_spans, is_leaf=is_spec) == flat
    assert isinstance(specs[0].nu_spans, kind)


def test_states_stay_tuples_with_their_names():
    errors = ErrorFeedback(1, {"a": 2})
    assert errors == (1, {"a": 2})
    assert errors._replace(worker_error=3).worker_error == 3
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(errors)]
    assert paths == [".worker_error", ".server_error['a']"]
    assert jax.tree.map(lambda x: x + 1, errors) == ErrorFeedback(2, {"a": 3})


def test_a_dictionary_with_some_of_the_names_is_no_state():
    assert marks.class_of({"worker_error": 1, "server_error": 2}) is None
    assert marks.class_of({"worker_error (per worker)": 1}) is None
    assert marks.class_of({"exact": 1, "onebit": 2, "skipped": 0, "sent": 3}) is None
    assert marks.typed({"a": (1, {"b": 2})}) == {"a": (1, {"b": 2})}


def test_an_ordinary_tuple_has_ordinary_keys():
    with jax.set_mesh(mesh(2)):
        state = onebit_jax.onebit_adam(1e-2, AXIS).init(jnp.zeros(3))
    plain = marks.plain(state)
    names = {
        getattr(key, "name", "") for path, _ in jax.tree_util.tree_leaves_with_path(plain)
        for key in path
    }
    assert {"worker_error", "nu_spans", "sent", "mu"} <= names
    assert not any(" " in name for name in names)
    np.testing.assert_array_equal(optax.tree.get(state, "nu_age"), 0)
