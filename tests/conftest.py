"""Eight simulated devices, strict promotion, warnings are errors (pyproject)."""

import math
import os

# Compiling is most of what these tests do, here and in the programs that they start, and
# unoptimised machine code computes the same.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)

import jax  # noqa: E402
import pytest  # noqa: E402

from onebit_jax.training import progress  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _new_run(monkeypatch):
    """Each test is a run of its own, in which metrics may warn once."""
    monkeypatch.setattr(progress, "_warned_after", math.inf)
