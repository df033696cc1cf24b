"""1-bit Adam in a train step written with jax.shard_map, without make_train_step."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec as P

import onebit_jax

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(1e-2, "data", variance=50)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def step(params, state, batch):
    # Local gradients: of parameters marked as this worker's own. Those of the
    # replicated parameters would be summed over the mesh in full precision.
    own = onebit_jax.per_worker(params, "data")
    loss, grads = jax.value_and_grad(loss_fn)(own, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")


keys = jax.random.split(jax.random.key(0), 4)
params = {
    "w1": 0.3 * jax.random.normal(keys[0], (16, 128)),
    "w2": 0.1 * jax.random.normal(keys[1], (128, 1)),
}
x = jax.random.normal(keys[2], (256, 16))
batch = {"x": x, "y": jnp.sin(x @ jax.random.normal(keys[3], (16, 1)))}

with jax.set_mesh(mesh):
    state = tx.init(params)
specs = onebit_jax.state_specs(state, "data")  # errors are sharded, all else replicated
train_step = jax.jit(
    jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
    )
)
for i in range(300):
    params, state, loss = train_step(params, state, batch)
    if i % 50 == 49:
        print(f"step {i + 1}: loss {loss:.4f}")
print(onebit_jax.metrics(state))
