"""Eight simulated devices, strict promotion, warnings are errors (pyproject)."""

import os

# Compiling is most of what these tests do, here and in the programs that they start, and
# unoptimised machine code computes the same.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
