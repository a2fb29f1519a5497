"""Where the ranks come from: this driver's own processes, or a torchrun or Slurm job that the driver is part of.

Under torchrun or Slurm each rank runs `python -m benchmarks run`. They are agents: rank 0 drives, speaks and writes;
every one starts the fresh worker process of its own rank for each task, and waits in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.launcher import Launcher, LocalLauncher, RankResult, run_ranks
from benchmarks.settings import SettingsError
from benchmarks.task import Order, order_from_json

# Agents wait through whole tasks.
_AGENT_PATIENCE = timedelta(hours=24)
# torchrun's name, then Slurm's.
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place in a job of several."""

    rank: int
    world_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise SettingsError(f"RANK is {self.rank}; expected 0 to {self.world_size - 1}")


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or Slurm gave this process, or None where it is by itself.

    An interactive Slurm shell has SLURM_NTASKS but is no job step of several: a step has SLURM_STEP_ID besides.
    """
    if "RANK" not in environment and "SLURM_STEP_ID" not in environment:
        return None
    found: dict[str, int] = {}
    for field, names in _NAMES.items():
        values = [environment[name] for name in names if name in environment]
        if not values:
            raise SettingsError(f"{' and '.join(names)} are not set; torchrun or srun sets them")
        found[field] = int(values[0])
    place = Place(**found)
    return place if place.world_size > 1 else None


@contextmanager
def opened_launcher() -> Iterator[tuple[Launcher | None, int | None]]:
    """Yield a launcher and the job's world size; where another rank drives, serve it, then yield None."""
    place = find_place(os.environ)
    if place is None:
        yield LocalLauncher(), None
        return
    if "MASTER_ADDR" not in os.environ:
        raise SettingsError("MASTER_ADDR is not set; torchrun sets it, under Slurm see benchmarks/launch/slurm.sh")
    # The workers of this agent find their device by it.
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size, timeout=_AGENT_PATIENCE)
    try:
        if place.rank != 0:
            _serve(place.rank)
            yield None, place.world_size
            return
        launcher = AgentLauncher(place.world_size)
        try:
            yield launcher, place.world_size
        finally:
            launcher.dismiss()
    finally:
        dist.destroy_process_group()


class AgentLauncher:
    """Asks the agents to run their ranks of a task; runs rank 0's own."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def run(self, order: Order, limit_seconds: float) -> dict[int, RankResult]:
        """Run a task; see `Launcher`."""
        dist.broadcast_object_list([{"order": asdict(order), "limit_seconds": limit_seconds}], src=0)
        own = _run_own(order, 0, limit_seconds)
        gathered: list[Any] = [None] * self._world_size
        dist.gather_object(own, gathered, dst=0)
        return {rank: result for results in gathered for rank, result in results.items()}

    def dismiss(self) -> None:
        """Tell the agents that there is nothing more to do."""
        dist.broadcast_object_list([None], src=0)


def _serve(rank: int) -> None:
    while True:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0)
        if received[0] is None:
            return
        order = order_from_json(received[0]["order"])
        dist.gather_object(_run_own(order, rank, received[0]["limit_seconds"]), None, dst=0)


def _run_own(order: Order, rank: int, limit_seconds: float) -> dict[int, RankResult]:
    return run_ranks(order, [rank], limit_seconds) if rank in order.task.ranks else {}
