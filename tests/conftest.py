"""Eight simulated devices, strict promotion, warnings are errors (pyproject)."""

import os

import jax

# Compiling is most of what these tests do, and unoptimised machine code computes the same.
# Of this process alone: the programs that tests start are compiled as a user's are.
_flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_flags} --xla_backend_optimization_level=0"

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # reads the flags
os.environ["XLA_FLAGS"] = _flags
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
