"""1-bit Adam for data-parallel JAX over slow networks, in the manner of Optax."""

import importlib
import types
import typing

from onebit_jax.audit.wire import (
    Collective as Collective,
    WireReport as WireReport,
    wire_report as wire_report,
)
from onebit_jax.compression.feedback import (
    ErrorFeedback as ErrorFeedback,
    resize_workers as resize_workers,
    state_specs as state_specs,
)
from onebit_jax.compression.packing import pack_signs as pack_signs, unpack_signs as unpack_signs
from onebit_jax.compression.quantize import SignQuantizer as SignQuantizer
from onebit_jax.deepspeed.conversion import from_deepspeed_config as from_deepspeed_config
from onebit_jax.optimizers.adam import (
    onebit_adam as onebit_adam,
    onebit_adamw as onebit_adamw,
    paper_1bit_adam as paper_1bit_adam,
)
from onebit_jax.optimizers.means import (
    clip_by_global_norm as clip_by_global_norm,
    compressed_mean as compressed_mean,
    exact_mean as exact_mean,
)
from onebit_jax.optimizers.rounds import Rounds as Rounds
from onebit_jax.optimizers.scaling import (
    ScaleByOnebitAdamState as ScaleByOnebitAdamState,
    scale_by_onebit_adam as scale_by_onebit_adam,
)
from onebit_jax.optimizers.variance import (
    Decision as Decision,
    Signals as Signals,
    VariancePolicy as VariancePolicy,
    freeze_after as freeze_after,
    freeze_when_stable as freeze_when_stable,
    refresh as refresh,
)
from onebit_jax.optimizers.wrappers import accumulate as accumulate
from onebit_jax.training.progress import (
    EarlyFreezeWarning as EarlyFreezeWarning,
    bytes_sent as bytes_sent,
    metrics as metrics,
)
from onebit_jax.training.replicas import (
    assert_replicas_equal as assert_replicas_equal,
    replica_fingerprint as replica_fingerprint,
)
from onebit_jax.training.train_step import make_train_step as make_train_step
from onebit_jax.workers import per_worker as per_worker

if typing.TYPE_CHECKING:
    from onebit_jax.training import checkpoints as checkpoints

__version__ = "0.1.0"


def __getattr__(name: str) -> types.ModuleType:
    # Needs Orbax, which not everybody has.
    if name == "checkpoints":
        return importlib.import_module("onebit_jax.training.checkpoints")
    raise AttributeError(f"module 'onebit_jax' has no attribute {name!r}")
