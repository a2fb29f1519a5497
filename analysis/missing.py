"""What there is no figure for: the reason travels in the figure's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is no figure: not measured, failed, or the data cannot tell."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a missing figure has a reason")

    def __str__(self) -> str:
        return self.reason


def known(value: T | Missing) -> T | None:
    """Return the figure, or None where there is none."""
    return None if isinstance(value, Missing) else value
