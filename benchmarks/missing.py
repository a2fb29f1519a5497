"""A figure that could not be had carries its reason until it becomes a null in a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is no figure."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a missing figure has a reason")


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values with null for what is missing, and the reasons by name."""
    found = {name: None if isinstance(value, Missing) else value for name, value in values.items()}
    reasons = {name: value.reason for name, value in values.items() if isinstance(value, Missing)}
    return found, reasons
