"""What a run was asked to do; kept in `run.json`, so that `resume` goes on with the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.cases import parse_case
from benchmarks.paths import Arm, PathError

RANKS = (1, 2)


class SettingsError(ValueError):
    """A setting that cannot be: which, its value, what is allowed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        cases: ids, most telling first.
        arms: paths that are compared.
        ranks: world sizes.
        device: kind of device.
        share_device: put all ranks on the first device; labelled so in every record.
        repeats: steady saves in each timing process, after a first one.
        rounds: fresh timing processes for each path, alternating: A B, B A, ...
        memory_budget_bytes: host memory that a case may need, over all ranks.
        time_budget_seconds: skip what does not fit; None: no limit.
        case_seconds: limit for one launch.
        durable: sync checkpoints to disk.
        references: measure torch's `DefaultStager` too.
        alone: measure each rank of a pair alone, too.
        imports: modules that each worker imports first (a device backend from outside torch, say).
    """

    cases: tuple[str, ...]
    arms: tuple[Arm, ...]
    ranks: tuple[int, ...]
    device: str
    share_device: bool
    repeats: int
    rounds: int
    memory_budget_bytes: int
    time_budget_seconds: float | None
    case_seconds: float
    durable: bool
    references: bool
    alone: bool
    imports: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in self.cases:
            parse_case(text)
        _expect_some("case", self.cases)
        _expect_some("path", self.arms)
        _expect_some("ranks", self.ranks)
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise PathError(f"path names are {', '.join(names)}; expected each once (`again=slice` gives another name)")
        for name in ("repeats", "rounds"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for world_size in self.ranks:
            if world_size < 1:
                raise SettingsError(f"ranks is {world_size}; expected 1 or more")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        content = asdict(self)
        content["arms"] = [asdict(arm) for arm in self.arms]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Settings:
        """Return the settings of a `run.json`."""
        values: dict[str, Any] = {field.name: content[field.name] for field in fields(cls)}
        values["arms"] = [Arm(**arm) for arm in values["arms"]]
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _expect_some(name: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise SettingsError(f"no {name} is given; expected at least one")
