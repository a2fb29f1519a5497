"""One launch: what its worker processes are told, and what they tell back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Concurrency, Identity, Pass


@dataclass(frozen=True, slots=True)
class Task:
    """One fresh process a rank, for one case and path.

    Attributes:
        passes: what it measures, in order. Timing has processes of its own; memory comes before what would disturb it.
        ranks: which ranks of `world_size` run: all of them together, or one alone.
        sequence: position in the run.
    """

    case_id: str | None
    path: str
    implementation: str
    passes: tuple[Pass, ...]
    round: int
    world_size: int
    ranks: tuple[int, ...]
    concurrency: Concurrency
    sequence: int

    def identities(self) -> list[Identity]:
        """Return the identities of the records that the task owes, in the order in which they are written."""
        return [self.identity(what, rank) for what in self.passes for rank in self.ranks]

    def identity(self, what: Pass, rank: int) -> Identity:
        """Return the identity of one record."""
        return Identity(self.case_id, self.path, what, self.round, self.world_size, rank, self.concurrency)

    def jobs(self) -> list[dict[str, Any]]:
        """Return the task's entries in `run.json`: one a pass."""
        return [
            {
                "case_id": self.case_id,
                "path": self.path,
                "implementation": self.implementation,
                "pass": what,
                "round": self.round,
                "world_size": self.world_size,
                "ranks": list(self.ranks),
                "concurrency": self.concurrency,
            }
            for what in self.passes
        ]

    @property
    def title(self) -> str:
        """What it is, for people."""
        who = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.concurrency == "alone":
            who = f"rank {self.ranks[0]} of {self.world_size} alone"
        return f"{self.case_id or 'this machine'}  {self.path}  {who}  {'+'.join(self.passes)}"


@dataclass(frozen=True, slots=True)
class Order:
    """A task with everything that a worker needs; travels as JSON.

    Attributes:
        device, share_device: kind of device; put every rank on the first one.
        saves: samples in the timing pass; the first is reported apart.
        memory_saves: samples in the memory pass.
        touch_bytes: host memory to touch before anything is measured.
        durable: sync the checkpoint to disk, as a trainer does.
        scratch: where checkpoints go; removed by the launcher.
        imports: modules that each worker imports first.
        threads: torch's threads a process.
        timeout_seconds: how long ranks wait for each other.
    """

    task: Task
    device: str
    share_device: bool
    saves: int
    memory_saves: int
    touch_bytes: int
    durable: bool
    scratch: str
    imports: tuple[str, ...]
    threads: int
    timeout_seconds: float

    def write(self, path: Path) -> None:
        """Write the order where the workers read it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read an order."""
        return order_from_json(json.loads(path.read_text(encoding="utf-8")))


def order_from_json(content: Mapping[str, Any]) -> Order:
    """Return the order that `asdict` made into JSON values."""
    task: dict[str, Any] = dict(content["task"])
    task |= {"passes": tuple(task["passes"]), "ranks": tuple(task["ranks"])}
    rest = {name: value for name, value in content.items() if name != "task"}
    return Order(task=Task(**task), **{**rest, "imports": tuple(rest["imports"])})
