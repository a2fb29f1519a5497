"""Settings for tests: small, on the CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.paths import Arm
from benchmarks.settings import Settings
from tests.benchmarks.orders import TINY


def make_settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "cases": (TINY,),
        "arms": (Arm("slice", "slice"), Arm("coalesced", "coalesced")),
        "ranks": (1,),
        "device": "cpu",
        "share_device": False,
        "repeats": 1,
        "rounds": 1,
        "memory_budget_bytes": 16 << 30,
        "time_budget_seconds": None,
        "case_seconds": 120.0,
        "durable": True,
        "references": False,
        "alone": False,
        "imports": (),
    }
    return Settings(**{**values, **changes})
