"""A DeepSpeed configuration of 1-bit Adam, read into the call that means the same here."""

import math
import os
import textwrap
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from onebit_jax.deepspeed import options as known
from onebit_jax.optimizers import adam, means, wrappers
from onebit_jax.optimizers.variance import VariancePolicy

_NAME = "OneBitAdam"
_OTHERS = {
    "ZeroOneAdam": (
        "closest here is onebit_jax.onebit_adam(lr, axis_name, variance=onebit_jax.refresh("
        'grid="doubling", every=<var_update_scaler>, until=<var_freeze_step>)). It refreshes '
        "the second moment ever more rarely too, but has no local steps: all steps exchange"
    ),
    "OneBitLamb": (
        "closest here are optax.chain(onebit_jax.exact_mean(axis_name), optax.lamb(lr)) in full "
        "precision, and onebit_jax.onebit_adamw in one bit"
    ),
}


class FromDeepSpeed(NamedTuple):
    """What :func:`from_deepspeed_config` returns; printed, it is a report.

    Attributes:
      tx: the optimizer.
      call: the Python expression that builds ``tx``, to paste into a program.
      notes: pairs of an option's name and what became of it.
    """

    tx: optax.GradientTransformationExtraArgs
    call: str
    notes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.notes) + 2
        rows = [
            textwrap.fill(
                text, 100, initial_indent=f"  {name:{width}}", break_long_words=False,
                break_on_hyphens=False, subsequent_indent=" " * (width + 2),
            )
            for name, text in self.notes
        ]
        call = textwrap.indent(self.call, "  ")
        return "\n".join(
            ["The call here:", "", call, "", "What became of the options:", "", *rows]
        )


class _Rate(NamedTuple):
    """A learning rate, how to write it in Python, and where it came from."""

    value: Any
    text: str
    notes: list[tuple[str, str]]


def from_deepspeed_config(
    config: dict[str, Any] | str | os.PathLike[str],
    axis_name: str | None,
    *,
    variance: int | VariancePolicy | None = None,
    bias_correction: bool = False,
    learning_rate: optax.ScalarOrSchedule | None = None,
) -> FromDeepSpeed:
    """Builds the optimizer that a DeepSpeed configuration of ``OneBitAdam`` describes.

    By default it makes the exact updates that DeepSpeed makes, and as many; the 1-bit
    rounds are those of :func:`onebit_adam`. Options without a meaning here are named
    in the notes, unknown ones refused.

    Args:
      config: a DeepSpeed configuration or its ``optimizer`` block alone, as a dict or
        as the path of a JSON file. Nothing in it is evaluated.
      axis_name: data-parallel mesh axis, or None for one worker.
      variance: as in :func:`onebit_adam`. By default the second moment is frozen after
        ``max(freeze_step - 1, 1)`` updates, as in DeepSpeed; :func:`refresh`, with
        exact steps that cover the learning-rate warm-up, is the default elsewhere.
      bias_correction: as in :func:`onebit_adam`. DeepSpeed never corrects, whatever its
        option of this name says.
      learning_rate: in place of that of the configuration; needed where its scheduler
        is neither ``WarmupLR`` nor ``WarmupDecayLR``.

    Returns:
      A :class:`FromDeepSpeed`: the optimizer, the call that builds it, and the notes.

    Raises:
      ValueError: for what is not such a configuration: what was found where, and what
        was expected. Also for what cannot be kept, such as ZeRO.
      TypeError: if ``config`` is neither a dict nor a path.
      OSError: if the file cannot be read.

    Example:
      >>> import onebit_jax
      >>> block = {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}}
      >>> converted = onebit_jax.from_deepspeed_config(block, "data")
      >>> print(converted.call)
      onebit_jax.onebit_adam(
          0.0004,
          'data',
          b1=0.9,
          b2=0.999,
          eps=1e-08,
          variance=22999,
          bias_correction=False,
      )
    """
    options = (variance, bias_correction, learning_rate)
    if isinstance(config, dict):
        return _convert(config, axis_name, *options)
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a dict or a path, found {type(config).__name__}")
    try:
        return _convert(known.load(config), axis_name, *options)
    except ValueError as error:
        raise ValueError(f"{os.fspath(config)}: {error}") from error


def _convert(
    config: Any, axis_name: str | None, variance: int | VariancePolicy | None,
    bias_correction: bool, learning_rate: optax.ScalarOrSchedule | None,
) -> FromDeepSpeed:
    top, path = _whole(config)
    known.check_block("", top, known.TOP)
    params = _params(top["optimizer"], path)
    rate = _rate(params, top.get("scheduler"), learning_rate)
    tx, call, notes = _adam(params, rate, axis_name, variance, bias_correction)

    clip = float(top.get("gradient_clipping", 0))
    clip_note = known.NO + "0 is no clipping"
    if clip:
        tx = optax.chain(means.clip_by_global_norm(clip, axis_name), tx)
        front = f"onebit_jax.clip_by_global_norm({clip}, {axis_name!r})"
        call = _call("optax.chain", [front, call])
        clip_note = (
            f"{front}: one factor for all workers in every step. Its norm is at least that of "
            "the mean gradient, by which DeepSpeed clips before the freeze"
        )
    every_k = top.get("gradient_accumulation_steps", 1)
    every_note = known.NO + "1 is no accumulation"
    if every_k > 1:
        tx = wrappers.accumulate(tx, every_k)
        call = _call("onebit_jax.accumulate", [call, f"every_k={every_k}"])
        every_note = f"accumulate(..., every_k={every_k}): one update in {every_k} calls"
    _refuse_zero(top.get("zero_optimization", {}))

    became = {"gradient_clipping": clip_note, "gradient_accumulation_steps": every_note}
    for name in top:
        if name not in ("optimizer", "scheduler"):
            notes.append((name, became.get(name, known.TOP[name].note)))
    return FromDeepSpeed(tx, call, tuple(notes))


def _whole(config: Any) -> tuple[dict[str, Any], str]:
    """The whole configuration, and the path of the optimizer's block in what was given."""
    known.check_value("the configuration", config, known.BLOCK)
    if "type" in config or "params" in config:
        return {"optimizer": config}, ""
    known.check_names("the configuration", config, known.TOP)
    if "optimizer" not in config:
        raise ValueError(
            f"there is no optimizer among the options {list(config)!r:.200}: expected a "
            'configuration with "optimizer", or that block itself, with "type" and "params"'
        )
    return config, "optimizer."


def _params(block: dict[str, Any], path: str) -> dict[str, Any]:
    """The options of an optimizer's block that is one of 1-bit Adam."""
    known.check_names(path.rstrip(".") or "the optimizer", block,
                      ["type", "params", "legacy_fusion"])
    if "type" not in block:
        raise ValueError(f'{path}type is missing: expected "{_NAME}"')
    found = block["type"]
    known.check_value(f"{path}type", found, known.TEXT)
    for name, instead in _OTHERS.items():
        if found.lower() == name.lower():
            raise ValueError(f'{path}type is "{name}", which cannot be converted: {instead}')
    # DeepSpeed does not mind the case either.
    if found.lower() != _NAME.lower():
        raise ValueError(f'{path}type must be "{_NAME}", found {found!r:.200}')
    params = block.get("params", {})
    known.check_value(f"{path}params", params, known.BLOCK)
    known.check_block(f"{path}params", params, known.OPTIMIZER)
    return params


def _refuse_zero(block: dict[str, Any]) -> None:
    if block.get("stage", 0) != 0:
        raise ValueError(
            f"zero_optimization.stage must be 0, found {block['stage']!r:.200}: every worker "
            "needs its own gradient of the whole model. DeepSpeed refuses the others too"
        )


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}(\n{_lines(arguments)})"


def _listed(items: list[str]) -> str:
    return f"[\n{_lines(items)}]"


def _lines(items: list[str]) -> str:
    return textwrap.indent("".join(f"{item},\n" for item in items), "    ")


def _adam(
    params: dict[str, Any], rate: _Rate, axis_name: str | None,
    variance: int | VariancePolicy | None, bias_correction: bool,
) -> tuple[optax.GradientTransformationExtraArgs, str, list[tuple[str, str]]]:
    """The optimizer without what comes in front, its call, and the notes on its options."""
    value = {name: params.get(name, option.default) for name, option in known.OPTIMIZER.items()}
    b1, b2 = map(float, value["betas"])
    decay = float(value["weight_decay"])
    # DeepSpeed counts a first call that updates nothing, and makes at least one.
    exact = max(value["freeze_step"] - 1, 1)
    options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": float(value["eps"])}
    if decay:
        options["weight_decay"] = decay
    options["variance"] = exact if variance is None else variance
    options["bias_correction"] = bias_correction
    tx = (adam.onebit_adamw if decay else adam.onebit_adam)(rate.value, axis_name, **options)

    # A policy is made of functions and cannot be written out.
    shown = options | ({"variance": "variance"} if isinstance(variance, VariancePolicy) else {})
    call = _call(
        "onebit_jax.onebit_adamw" if decay else "onebit_jax.onebit_adam",
        [rate.text, repr(axis_name), *(f"{name}={x}" for name, x in shown.items())],
    )
    freeze = "not used: variance= was given"
    if variance is None:
        source = "" if "freeze_step" in params else f", its default being {value['freeze_step']}"
        freeze = (
            f"variance={exact}, the number of exact updates DeepSpeed makes{source}: it counts a "
            "first call that updates nothing. The default here, onebit_jax.refresh(), does not "
            "freeze for good; pass it as variance="
        )
    became = {
        "betas": f"b1={b1}, b2={b2}",
        "eps": f"eps={options['eps']}",
        "weight_decay": f"weight_decay={decay}, multiplied by the learning rate in both",
        "freeze_step": freeze,
        "bias_correction": (
            f"bias_correction={bias_correction}: DeepSpeed accepts the option and never corrects. "
            + ("Yours was asked for by the argument" if bias_correction
               else "For Adam's correction pass bias_correction=True")
        ),
    }
    # What becomes of these two concerns also who has not named them.
    names = [*params, *(n for n in ("freeze_step", "bias_correction") if n not in params)]
    notes = [(n, became.get(n, known.OPTIMIZER[n].note)) for n in names if n != "lr"]
    return tx, call, rate.notes + notes


def _rate(
    params: dict[str, Any], scheduler: dict[str, Any] | None,
    learning_rate: optax.ScalarOrSchedule | None,
) -> _Rate:
    blocks = {"lr": params.get("lr"), "scheduler": scheduler}
    given = [name for name, block in blocks.items() if block is not None]
    if learning_rate is not None:
        text = "learning_rate" if callable(learning_rate) else repr(learning_rate)
        return _Rate(
            learning_rate, text, [(n, "not used: learning_rate= was given") for n in given]
        )
    if scheduler is None:
        lr = float(params.get("lr", known.OPTIMIZER["lr"].default))
        return _Rate(lr, str(lr), [("lr", f"learning_rate={lr}")])
    rate = _schedule(scheduler)
    return rate._replace(
        notes=[(n, "not used: the scheduler sets the rate") for n in given if n == "lr"]
        + rate.notes
    )


def _schedule(scheduler: dict[str, Any]) -> _Rate:
    """The schedule of a scheduler's block, by the number of updates made."""
    known.check_names("scheduler", scheduler, ["type", "params"])
    name = scheduler.get("type")
    known.check_value("scheduler.type", name, known.TEXT)
    if name not in known.SCHEDULERS:
        raise ValueError(
            f"scheduler.type must be one of {', '.join(known.SCHEDULERS)}, found {name!r:.200}. "
            "For another one, give its counterpart in Optax as learning_rate="
        )
    options = known.SCHEDULERS[name]
    params = scheduler.get("params", {})
    known.check_value("scheduler.params", params, known.BLOCK)
    known.check_block("scheduler.params", params, options)
    for required in ("warmup_max_lr", "total_num_steps"):
        if required in options and required not in params:
            raise ValueError(f"scheduler.params.{required} is missing")
    value = {name: params.get(name, option.default) for name, option in options.items()}
    low, high = float(value["warmup_min_lr"]), float(value["warmup_max_lr"])
    steps = max(value["warmup_num_steps"], 2)

    if value["warmup_type"] == "linear":
        rate: Any = optax.linear_schedule(low, high, steps)
        text = f"optax.linear_schedule({low}, {high}, {steps})"
    else:
        full, rise = math.log(steps), high - low
        rate = lambda i: low + rise * jnp.minimum(jnp.log1p(i) / full, 1.0)
        text = f"lambda i: {low} + {rise} * jnp.minimum(jnp.log1p(i) / {full}, 1.0)"
    if name == "WarmupDecayLR":
        rest = value["total_num_steps"] - steps
        if rest < 1:
            raise ValueError(
                f"scheduler.params.total_num_steps must be above the {steps} steps of warm-up, "
                f"found {value['total_num_steps']}"
            )
        rate = optax.join_schedules([rate, optax.linear_schedule(high, low, rest)], [steps])
        text = _call(
            "optax.join_schedules",
            [_listed([text, f"optax.linear_schedule({high}, {low}, {rest})"]), f"[{steps}]"],
        )
    return _Rate(rate, text, [("scheduler", f"{name} as a schedule by the number of updates")])
