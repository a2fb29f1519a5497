"""How each unit is written: one table, so that a figure looks the same in text, table and plot."""

from __future__ import annotations

import math
from dataclasses import dataclass

DIGITS = 3
MOST_DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Unit:
    """How a quantity is shown.

    Attributes:
        symbol: what stands behind the number, or in a column's head.
        per_base: how many of the shown unit make one of the stored unit.
        whole: a count: never rounded.
        decimals: fixed; None: as many as three digits need.
    """

    symbol: str
    per_base: float = 1.0
    whole: bool = False
    decimals: int | None = None


# Stored in seconds, bytes, ...: the names' endings. Shown in these.
UNITS = {
    "seconds": Unit("ms", 1e3),
    "bytes": Unit("MB", 1e-6),
    "bytes_per_second": Unit("GB/s", 1e-9),
    "calls": Unit("copies", whole=True),
    "faults": Unit("faults", whole=True),
    "joules": Unit("J"),
    "ratio": Unit("×", decimals=2),
    "share": Unit("%", 1e2),
}


def number(value: float, unit: str, digits: int = DIGITS) -> str:
    """Return the bare number in the shown unit, with that many significant digits; counts in full."""
    shown = UNITS[unit]
    # A plain float: numpy rounds halves in another way, and a figure must look the same wherever it comes from.
    scaled = float(value) * shown.per_base
    if shown.whole:
        return f"{value:,.0f}"
    if not math.isfinite(scaled):
        return str(scaled)
    if shown.decimals is not None:
        return f"{scaled:.{shown.decimals}f}"
    if scaled == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(scaled)))
    # Rounding can add a digit: 9.996 is 10.0, not 10.00.
    decimals -= abs(round(scaled, decimals)) >= 10 ** (digits - decimals)
    if decimals > MOST_DECIMALS:
        small = f"{scaled:.{MOST_DECIMALS}f}"
        return small if float(small) else f"<{10**-MOST_DECIMALS}"
    return f"{round(scaled, decimals):.{max(decimals, 0)}f}"


def text(value: float, unit: str, digits: int = DIGITS) -> str:
    """Return the number with its unit."""
    return f"{number(value, unit, digits)} {UNITS[unit].symbol}"


def span(value: float, low: float, high: float, unit: str) -> str:
    """Return a figure and its interval, without the unit: `41.2 [40.9-41.6]`."""
    return f"{number(value, unit)} [{number(low, unit)}-{number(high, unit)}]"


def ranks_text(count: int) -> str:
    """Return a number of ranks in words: `1 rank`, `2 ranks`."""
    return f"{count} rank{'s' if count > 1 else ''}"


def size(value: int) -> str:
    """Return a slice size, which is a power of two more often than not: `64 KiB`."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            scaled = value / (1 << power)
            return f"{scaled:.0f} {name}" if scaled == int(scaled) else f"{scaled:.1f} {name}"
    return f"{value} B"
