"""The options of a DeepSpeed configuration: what they may be, what becomes of them here."""

import difflib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from onebit_jax import workers


class Kind(NamedTuple):
    """Which values an option may have, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


class Option(NamedTuple):
    """An option of the optimizer or of a scheduler.

    Attributes:
      kind: which values it may have.
      default: DeepSpeed's.
      note: what becomes of it, where that does not depend on its value.
      refused: why a value other than 0 or false cannot be kept, where it cannot.
    """

    kind: Kind
    default: Any = None
    note: str = ""
    refused: str = ""


def _is_number(x: Any) -> bool:
    # A bound instead of isfinite, which cannot take an int of hundreds of digits.
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300


def _is_int(x: Any, low: int) -> bool:
    return workers.is_count(x, low) and x < 2**31


def _are_decays(x: Any) -> bool:
    is_list = isinstance(x, list | tuple) and len(x) == 2
    return is_list and all(_is_number(b) and 0 <= b < 1 for b in x)


BLOCK = Kind("an object of options", lambda x: isinstance(x, dict))
TEXT = Kind("a string", lambda x: isinstance(x, str))
_ANY = Kind("anything", lambda x: True)
_BOOL = Kind("true or false", lambda x: isinstance(x, bool))
_NUMBER = Kind("a finite number of at least 0", lambda x: _is_number(x) and x >= 0)
_STEPS = Kind("an int from 0 to 2**31 - 1", lambda x: _is_int(x, 0))
_COUNT = Kind("an int from 1 to 2**31 - 1", lambda x: _is_int(x, 1))
_BETAS = Kind("a list of two numbers in [0, 1)", _are_decays)
_WARMUP_TYPE = Kind('"log" or "linear"', lambda x: x in ("log", "linear"))

NO = "no meaning here: "
_WIRE = NO + "exact rounds travel in float32 and give the mean"
_LOGS = NO + "it is about logs and profiles"
_ELSEWHERE = NO + "it is not about the optimizer, and is not converted"
_DTYPE = (
    NO + "the dtype is the model's, and the state is float32. A step with a NaN or Inf is "
    "skipped on all workers in every dtype; a loss scale, if you need one, is yours to apply"
)
_BATCH = (
    NO + "the batch is what you feed the step. If DeepSpeed worked out "
    "gradient_accumulation_steps from the batch sizes, write it into the configuration"
)

#: Options without a note are converted.
OPTIMIZER = {
    "lr": Option(_NUMBER, 1e-3),
    "freeze_step": Option(_STEPS, 100000),
    "betas": Option(_BETAS, (0.9, 0.999)),
    "eps": Option(_NUMBER, 1e-8),
    "weight_decay": Option(_NUMBER, 0.0),
    "bias_correction": Option(_BOOL, True),
    "eps_inside_sqrt": Option(
        _BOOL, False, NO + "DeepSpeed ignores it; in both, eps is added to the root"
    ),
    "cuda_aware": Option(_BOOL, False, NO + "there is no MPI"),
    "comm_backend_name": Option(
        TEXT, "nccl", NO + "XLA does the exchange, over whatever joins the devices"
    ),
    "exp_avg_mask": Option(
        _ANY, None, NO + "where no exact round saw a gradient, variance_floor keeps the updates "
        "in bounds. If they must be exactly 0, multiply the updates by the mask",
    ),
    "max_grad_norm": Option(
        _NUMBER, 0.0, NO + "0 is no clipping",
        "DeepSpeed refuses it too. Write gradient_clipping into the whole configuration, or "
        "chain onebit_jax.clip_by_global_norm in front",
    ),
    "amsgrad": Option(
        _BOOL, False, NO + "false is all there is", "there is no AMSGrad, as in DeepSpeed"
    ),
    "non_freeze": Option(
        _BOOL, False, NO + "false is the default",
        "leaves that shall stay in full precision get a group of their own: optax.partition "
        "with optax.chain(onebit_jax.exact_mean(axis_name), optax.adam(lr)) for them",
    ),
}

_WARMUP = {
    "warmup_min_lr": Option(_NUMBER, 0.0),
    "warmup_max_lr": Option(_NUMBER),
    "warmup_num_steps": Option(_COUNT, 1000),
    "warmup_type": Option(_WARMUP_TYPE, "log"),
}
SCHEDULERS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"total_num_steps": Option(_COUNT)},
}

TOP = {
    "optimizer": Option(BLOCK),
    "scheduler": Option(BLOCK),
    "gradient_clipping": Option(_NUMBER, 0.0),
    "gradient_accumulation_steps": Option(_COUNT, 1),
    "zero_optimization": Option(BLOCK, None, "stage 0: every worker has the whole state"),
    "sparse_gradients": Option(
        _BOOL, False, NO + "gradients are dense", "gradients must be dense, as in DeepSpeed"
    ),
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp"), Option(BLOCK, None, _DTYPE)),
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu"), Option(_COUNT, None, _BATCH)
    ),
    **dict.fromkeys(
        ("communication_data_type", "disable_allgather", "gradient_predivide_factor",
         "prescale_gradients", "seq_parallel_comm_data_type"),
        Option(_ANY, None, _WIRE),
    ),
    **dict.fromkeys(
        ("comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler",
         "memory_breakdown", "steps_per_print", "tensorboard", "wall_clock_breakdown", "wandb"),
        Option(_ANY, None, _LOGS),
    ),
    **dict.fromkeys(
        ("activation_checkpointing", "aio", "autotuning", "checkpoint", "compression_training",
         "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last",
         "eigenvalue", "elasticity", "graph_harvesting", "pipeline", "progressive_layer_drop",
         "sparse_attention", "use_data_before_expert_parallelism", "vocabulary_size",
         "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        Option(_ANY, None, _ELSEWHERE),
    ),
}


def load(path: str | os.PathLike[str]) -> Any:
    """The JSON of a file.

    Raises:
      ValueError: if it is not JSON, or has an option twice.
      OSError: if it cannot be read.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json keeps the last of two, so that the first would be lost silently.
        block: dict[str, Any] = {}
        for name, value in pairs:
            if name in block:
                raise ValueError(f"the option {name!r:.200} is there twice")
            block[name] = value
        return block

    try:
        return json.loads(pathlib.Path(path).read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        message = f"{error.strerror}; expected a DeepSpeed configuration in JSON"
        raise OSError(error.errno, message, os.fspath(path)) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"expected a DeepSpeed configuration in plain JSON, found none: {error}"
        ) from error


def check_value(path: str, value: Any, kind: Kind) -> None:
    """Raises a ValueError that names the option, what was found and what was expected."""
    if not kind.accepts(value):
        raise ValueError(f"{path} must be {kind.words}, found {value!r:.200}")


def check_names(path: str, names: Iterable[Any], known: Iterable[str]) -> None:
    """Raises a ValueError for the first name that is not known, with the closest that is."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{path} has an unknown option {name!r:.200}.{hint} Known are {', '.join(known)}"
            )


def check_block(path: str, block: dict[str, Any], options: dict[str, Option]) -> None:
    """Raises a ValueError for an option unknown, with a bad value, or refused."""
    check_names(path or "the configuration", block, options)
    for name, value in block.items():
        full = f"{path}.{name}" if path else name
        check_value(full, value, options[name].kind)
        if options[name].refused and value:
            raise ValueError(f"{full}={value!r} cannot be kept: {options[name].refused}")
