"""How long steps and runs take and what they send, from a few numbers; no arrays here."""

import math
from typing import NamedTuple

#: Share of the bandwidth that an exchange reaches, as ``bench net`` measures it.
EFFICIENCY_F32 = 0.9
EFFICIENCY_BF16 = 0.75
EFFICIENCY_ONEBIT = 0.94

#: Where an update is not measured: the bytes of memory it moves for each parameter,
#: and how many a second, as ``bench update`` measured on one core.
ADAM_MEMORY_BYTES = 28
ONEBIT_MEMORY_BYTES = 60
MEMORY_SPEED = 28e9

#: Bytes per parameter on the wire. One float32 scale for 512 signs.
F32_BYTES = 4
BF16_BYTES = 2
ONEBIT_BYTES = 1 / 8 * (1 + 32 / 512)

#: Names of the predictions.
ADAM = "Adam, float32"
ADAM_BF16 = "Adam, bfloat16"
FROZEN = "1-bit, frozen"
REFRESHED = "1-bit, refreshed"


class Setting(NamedTuple):
    """What a prediction starts from.

    Attributes:
      params: number of parameters.
      workers: that exchange with one another.
      bandwidth: of each worker's link, bits per second.
      compute: seconds of forward and backward pass in a step.
      adam_update: seconds of Adam's update.
      onebit_update: seconds of 1-bit Adam's update in a 1-bit round, with the
        packing and the error feedback. Its exact rounds cost what Adam's do.
    """

    params: int
    workers: int
    bandwidth: float
    compute: float
    adam_update: float
    onebit_update: float


class Prediction(NamedTuple):
    """One way to train.

    Attributes:
      method: which.
      exact_rounds: steps that exchange full precision, or bfloat16.
      onebit_rounds: steps that exchange bits.
      seconds_per_step: mean over the run.
      seconds: of the run.
      bytes_per_step: that each worker sends, mean over the run.
      bytes: that each worker sends in the run.
    """

    method: str
    exact_rounds: int
    onebit_rounds: int
    seconds_per_step: float
    seconds: float
    bytes_per_step: float
    bytes: float


def memory_bound_update(params: int, bytes_per_param: float) -> float:
    """Seconds of an update that does nothing but move memory."""
    return params * bytes_per_param / MEMORY_SPEED


def round_bytes(setting: Setting, bytes_per_param: float) -> float:
    """Bytes a worker sends to average all parameters, by the ring formula."""
    w = setting.workers
    return 2 * (w - 1) / w * bytes_per_param * setting.params


def wire_seconds(setting: Setting, bytes_per_param: float, efficiency: float) -> float:
    """Seconds in which they are sent."""
    return round_bytes(setting, bytes_per_param) * 8 / (setting.bandwidth * efficiency)


def refresh_rounds(steps: int, every: int = 16, exact_steps: int = 100) -> int:
    """Exact rounds of ``refresh(every, exact_steps)`` in a run that never starts its grid anew.

    Args:
      steps: length of the run.
      every: as there.
      exact_steps: as there.

    Returns:
      How many of the steps are exact.

    Example:
      >>> refresh_rounds(100), refresh_rounds(1000)
      (100, 139)
    """
    if steps <= exact_steps:
        return steps
    count, last = exact_steps, exact_steps - 1
    while (last := last + max(last // every, 1)) < steps:
        count += 1
    return count


def predict(setting: Setting, steps: int, exact_fraction: float) -> list[Prediction]:
    """Four ways to train, plain Adam first.

    Args:
      setting: model, machines and network.
      steps: length of the run.
      exact_fraction: share of the steps before the frozen 1-bit Adam is frozen.

    Returns:
      The predictions, in the order of the names in this module.
    """
    # Of each kind of round: bytes and seconds of exchange and update.
    f32, bf16, onebit = (
        (round_bytes(setting, n), wire_seconds(setting, n, efficiency) + update)
        for n, efficiency, update in (
            (F32_BYTES, EFFICIENCY_F32, setting.adam_update),
            (BF16_BYTES, EFFICIENCY_BF16, setting.adam_update),
            (ONEBIT_BYTES, EFFICIENCY_ONEBIT, setting.onebit_update),
        )
    )

    def run(method: str, exact_rounds: int, exact: tuple[float, float]) -> Prediction:
        rest = steps - exact_rounds
        sent, seconds = (exact_rounds * e + rest * o for e, o in zip(exact, onebit, strict=True))
        seconds += steps * setting.compute
        return Prediction(
            method, exact_rounds, rest, seconds / steps, seconds, sent / steps, sent
        )

    return [
        run(ADAM, steps, f32),
        run(ADAM_BF16, steps, bf16),
        run(FROZEN, round(exact_fraction * steps), f32),
        run(REFRESHED, refresh_rounds(steps), f32),
    ]


def break_even(setting: Setting, bytes_per_param: float, efficiency: float) -> float:
    """The bandwidth at which a 1-bit step takes as long as a step of Adam.

    Below it the 1-bit step is faster. The share of exact rounds does not matter:
    they take as long as Adam's.

    Args:
      setting: its bandwidth and compute do not matter.
      bytes_per_param: of Adam's exchange.
      efficiency: of Adam's exchange.

    Returns:
      Bits per second; infinity if 1-bit Adam wins at any bandwidth, and 0 if at none.
    """
    saved = 8 * (
        round_bytes(setting, bytes_per_param) / efficiency
        - round_bytes(setting, ONEBIT_BYTES) / EFFICIENCY_ONEBIT
    )
    slower = setting.onebit_update - setting.adam_update
    if slower > 0:
        return saved / slower
    return math.inf if saved > 0 or slower < 0 else 0.0
