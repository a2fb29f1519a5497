"""One place that writes and reads units."""

from __future__ import annotations

import re

_BYTE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class UnitError(ValueError):
    """A size or a time that cannot be read."""


def format_bytes(size: float) -> str:
    """Return a size with three significant digits: `34.6 MiB`."""
    for unit, factor in _BYTE_UNITS.items():
        if abs(size) < 1000 * factor or unit == "TiB":
            value = size / factor
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError("the last unit takes every size")


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits in seconds, milliseconds or microseconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError("the last unit takes every time")


def parse_bytes(text: str) -> int:
    """Read `16GiB`, `500 MiB`, `16G`.

    Raises:
        UnitError: not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text)
    if found is None:
        raise UnitError(f"{text!r} is no size; expected a number with B, KiB, MiB, GiB or TiB, say 16GiB")
    return int(float(found[1]) * _BYTE_UNITS[f"{found[2]}iB" if found[2] else "B"])


def parse_seconds(text: str) -> float:
    """Read `90s`, `8m`, `1.5h`; a plain number is seconds.

    Raises:
        UnitError: not a length of time.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None:
        raise UnitError(f"{text!r} is no length of time; expected a number with s, m or h, say 8m")
    return float(found[1]) * _SECONDS[found[2] or "s"]
