"""UTC instants as text."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """Return the time as ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
