"""What one pass found, as it travels from a worker to the launcher."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.missing import Missing, split
from benchmarks.record import Count
from benchmarks.scrub import scrub


@dataclass
class Outcome:
    """What one pass found; JSON for the launcher.

    Attributes:
        transfers: what was counted -> who counted -> calls and bytes, or the reason why not.
    """

    status: str = "ok"
    error: dict[str, str] | None = None
    digest: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    transfers: dict[str, dict[str, Any]] = field(default_factory=dict)
    timeline: dict[str, Any] | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def add_sample(self, number: int, values: dict[str, Any]) -> None:
        """Keep the figures of one save; what is missing becomes null with a reason."""
        found, reasons = split(values)
        self.samples.append({"save": number, "phase": "steady" if number else "first", **found})
        self.reasons.update(reasons)

    def add_count(self, what: str, who: str, count: Count | Missing) -> None:
        """Keep one count of transfers."""
        if isinstance(count, Missing):
            self.reasons[f"transfers.{what}.{who}"] = count.reason
        else:
            self.transfers.setdefault(what, {})[who] = asdict(count)

    def keep_digest(self, digest: str) -> None:
        """Keep the checkpoint's digest; every save of one state has the same."""
        if self.digest not in (None, digest):
            raise RuntimeError(f"two saves of one state differ: digests {self.digest} and {digest}")
        self.digest = digest


def describe(error: BaseException) -> dict[str, str]:
    """Return type, message and traceback of an error, without machine paths."""
    text = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": scrub(str(error)), "traceback": scrub(text)}
