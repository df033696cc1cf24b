"""Network rates as words: ``100mbit``, ``2.5gbit``."""

import argparse
import re

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def bits_per_second(text: str) -> float:
    """The rate that a text means; a ``type=`` of argparse.

    Args:
      text: a number and bit, kbit, mbit, gbit or tbit, in either case, with or
        without ``/s``.

    Returns:
      Bits per second, above 0.

    Raises:
      argparse.ArgumentTypeError: for anything else. Bytes and the ambiguous
        ``mb`` and ``mbps`` are refused.

    Example:
      >>> bits_per_second("2.5gbit"), bits_per_second("100 Mbit/s")
      (2500000000.0, 100000000.0)
    """
    parts = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?bit)(?:/s)?\s*", text.lower())
    rate = float(parts[1]) * _UNITS[parts[2]] if parts else 0.0
    if rate <= 0:
        raise argparse.ArgumentTypeError(
            f"expected a rate above 0 in bits per second such as 100mbit, 1gbit or 2.5gbit, "
            f"found {text!r}"
        )
    return rate


def bits_per_second_or_none(text: str) -> float | None:
    """As :func:`bits_per_second`, and None for ``none``, which is no limit.

    Args:
      text: as there, or ``"none"``.

    Returns:
      Bits per second or None.

    Raises:
      argparse.ArgumentTypeError: as there.

    Example:
      >>> bits_per_second_or_none("none") is None
      True
    """
    return None if text.strip().lower() == "none" else bits_per_second(text)


def rate_text(rate: float) -> str:
    """A rate in the largest unit in which it is at least 1.

    Args:
      rate: bits per second.

    Returns:
      The text, to three digits; :func:`bits_per_second` reads it.

    Example:
      >>> rate_text(2.5e9), rate_text(123456789)
      ('2.5gbit', '123mbit')
    """
    rate = float(f"{rate:.3g}")
    unit = max((u for u in _UNITS if _UNITS[u] <= rate), key=_UNITS.__getitem__, default="bit")
    return f"{rate / _UNITS[unit]:.3g}{unit}"
