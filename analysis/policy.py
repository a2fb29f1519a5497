"""The thresholds of policy.toml, each checked when it is read."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from analysis.statistics import Bootstrap

POLICY_FILE = Path(__file__).with_name("policy.toml")
DIGEST_LETTERS = 12


class PolicyError(ValueError):
    """A policy that does not say what it should: entry, value, what is allowed."""


@dataclass(frozen=True, slots=True)
class Paths:
    """[paths]."""

    baseline: str
    candidate: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """[hardware]."""

    device_kind: str
    gpu: str
    ranks: tuple[int, ...]
    one_gpu_a_rank: bool
    mig: bool


@dataclass(frozen=True, slots=True)
class RunRules:
    """[run]."""

    status: str
    clean_checkout: bool
    blocking_doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """[cases]."""

    families: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """[repeats]."""

    rounds_at_least: int
    pairs_at_least: int
    memory_saves_at_least: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """[statistics]."""

    confidence: float
    resamples: int
    seed: int
    precision: float


@dataclass(frozen=True, slots=True)
class Time:
    """[time]."""

    fence_ratio_below: float


@dataclass(frozen=True, slots=True)
class Memory:
    """[memory]."""

    host_ratio_at_most: float
    host_more_bytes_at_most: int
    device_more_bytes_at_most: int


@dataclass(frozen=True, slots=True)
class Figures:
    """[figures]."""

    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Believable:
    """[believable]."""

    ceiling_share_at_most: float
    pinned_bytes_per_second_between: tuple[float, ...]
    fence_ratio_at_least: float
    peak_ratio_at_least: float
    peak_ratio_at_most: float
    host_peak_noise_bytes: int
    device_peak_noise_bytes: int
    resident_ratio_at_most: float
    device_resident_share_at_least: float
    part_share_at_most: float
    device_seconds_share_at_least: float
    prepare_share_at_least: float


@dataclass(frozen=True, slots=True)
class Instability:
    """[instability]."""

    blocking: tuple[str, ...]
    spread_share_at_most: float
    drift_share_at_most: float
    drift_p_below: float
    modes_explained_at_most: float
    modes_smaller_share_at_least: float
    modes_gap_share_at_least: float
    first_share_at_most: float


@dataclass(frozen=True, slots=True)
class Compare:
    """[compare]."""

    fence_change_at_least: float
    peak_change_at_least: float
    peak_change_bytes_at_least: int


@dataclass(frozen=True, slots=True)
class Policy:
    """policy.toml; what each entry means stands there.

    Attributes:
        digest: of the file: names the policy that a decision was made by.
    """

    paths: Paths
    hardware: Hardware
    run: RunRules
    cases: Cases
    repeats: Repeats
    statistics: Statistics
    time: Time
    memory: Memory
    figures: Figures
    believable: Believable
    instability: Instability
    compare: Compare
    digest: str

    @property
    def bootstrap(self) -> Bootstrap:
        """How intervals are made, in a report: from the fewest samples that have any interval at all."""
        return Bootstrap(self.statistics.confidence, self.statistics.resamples, self.statistics.seed, least_samples=5)


_TABLES: Mapping[str, type] = {
    "paths": Paths,
    "hardware": Hardware,
    "run": RunRules,
    "cases": Cases,
    "repeats": Repeats,
    "statistics": Statistics,
    "time": Time,
    "memory": Memory,
    "figures": Figures,
    "believable": Believable,
    "instability": Instability,
    "compare": Compare,
}
# A threshold that is not a positive number would let everything pass, or nothing.
_NUMBERS = ("float", "int")


def load_policy(path: Path = POLICY_FILE) -> Policy:
    """Read the policy.

    Raises:
        PolicyError: an entry is missing, unknown, or not what it can be.
    """
    content = path.read_bytes()
    try:
        tables = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path.name}: {error}") from None
    unknown = sorted(set(tables) ^ set(_TABLES))
    if unknown:
        raise PolicyError(f"{path.name}: missing or unknown: {', '.join(unknown)}")
    parts: dict[str, Any] = {name: _table(path.name, name, kind, tables[name]) for name, kind in _TABLES.items()}
    return Policy(**parts, digest=hashlib.blake2b(content, digest_size=32).hexdigest()[:DIGEST_LETTERS])


def _table(file: str, name: str, kind: type, entries: Mapping[str, Any]) -> Any:
    wanted = {field.name: str(field.type) for field in fields(kind)}
    unknown = sorted(set(entries) ^ set(wanted))
    if unknown:
        raise PolicyError(f"{file}: [{name}] missing or unknown: {', '.join(unknown)}")
    return kind(**{entry: _value(f"{file}: {name}.{entry}", wanted[entry], entries[entry]) for entry in wanted})


def _value(where: str, kind: str, value: Any) -> Any:
    if kind.startswith("tuple"):
        item = kind.removeprefix("tuple[").split(",")[0]
        if not isinstance(value, list) or not value:
            raise PolicyError(f"{where} is {value!r}; expected a list with at least one entry")
        return tuple(_value(where, item, each) for each in value)
    if kind in _NUMBERS:
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not 0 < value < float("inf") or (kind == "int" and value != int(value)):
            raise PolicyError(f"{where} is {value!r}; expected a positive {'whole ' if kind == 'int' else ''}number")
        return int(value) if kind == "int" else float(value)
    expected = {"str": str, "bool": bool}[kind]
    if not isinstance(value, expected) or value == "":
        raise PolicyError(f"{where} is {value!r}; expected {kind}")
    return value
