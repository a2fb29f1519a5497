"""What a run would cost, said before anything starts."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.cases import Case
from benchmarks.devices import default_kind, device_count, open_device
from benchmarks.errors import DeviceError
from benchmarks.fit import PROCESS_BYTES, Speeds
from benchmarks.paths import SAVER_PATHS, parse_arm
from benchmarks.predict import Prediction, predict
from benchmarks.settings import RANKS
from benchmarks.stopwatch import Stopwatch
from benchmarks.units import format_bytes, format_seconds

HEADER = (
    "path",
    "ranks",
    "optimizer copies",
    "all copies",
    "bytes",
    "host peak",
    "device peak",
    "disk",
    "prepare",
    "finalize",
)
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Planned:
    """What one save of one path costs, over all ranks."""

    path: str
    world_size: int
    predictions: tuple[Prediction, ...]

    def total(self, name: str) -> int:
        """Sum one figure over the ranks."""
        return sum(int(getattr(prediction, name)) for prediction in self.predictions)

    @property
    def host_bytes(self) -> int:
        """Host memory of all worker processes at their peak."""
        return self.total("resident_host_bytes") + self.total("host_peak_bytes") + len(self.predictions) * PROCESS_BYTES

    @property
    def device_bytes(self) -> int:
        """Device memory of the rank that needs most."""
        return max(p.resident_device_bytes + p.device_peak_bytes for p in self.predictions)


def render_plan(cases: Sequence[Case], parsed: argparse.Namespace, memory_bytes: int) -> str:
    """Return what each case costs on each path, and what does not fit. No tensor of a case is allocated."""
    device = parsed.device or default_kind()
    device_count(device)
    arms = [parse_arm(text) for text in parsed.paths or SAVER_PATHS]
    speeds = Speeds() if parsed.bandwidth is None else replace(Speeds(), copy=float(parsed.bandwidth))
    origin = "stated"
    if parsed.bandwidth is None:
        speeds, origin = replace(speeds, copy=_measured_bandwidth(device)), "measured now"
    lines = [
        f"device {device}; to the host {format_bytes(speeds.copy)}/s ({origin}); the digest and the disk are assumed",
        "",
    ]
    for case in cases:
        for world_size in parsed.ranks or RANKS:
            split = case.with_ranks(world_size)
            # Every rank of the model, where the whole of it saves.
            planned = [
                Planned(
                    arm.name,
                    world_size,
                    tuple(predict(split, arm.implementation, rank, world_size, device) for rank in range(world_size)),
                )
                for arm in arms
            ]
            lines.append(f"{split.id}, {world_size} rank{'s' * (world_size > 1)}")
            lines += _aligned([HEADER, *(_row(one, speeds) for one in planned)])
            lines += [f"  DOES NOT FIT  {why}" for why in _obstacles(planned, device, memory_bytes)]
            lines.append("")
    return "\n".join(lines)


def _row(planned: Planned, speeds: Speeds) -> tuple[str, ...]:
    seconds = [speeds.save_seconds(prediction) for prediction in planned.predictions]
    return (
        planned.path,
        str(planned.world_size),
        str(sum(p.optimizer.calls for p in planned.predictions)),
        str(sum(p.all.calls for p in planned.predictions)),
        format_bytes(sum(p.all.bytes for p in planned.predictions)),
        format_bytes(planned.total("host_peak_bytes")),
        format_bytes(planned.total("device_peak_bytes")),
        format_bytes(planned.total("disk_bytes")),
        format_seconds(max(prepare for prepare, _ in seconds)),
        format_seconds(max(finalize for _, finalize in seconds)),
    )


def _obstacles(planned: Sequence[Planned], device: str, memory_bytes: int) -> list[str]:
    found = []
    worst = max(planned, key=lambda one: one.host_bytes)
    if worst.host_bytes > memory_bytes:
        found.append(
            f"host memory: {format_bytes(worst.host_bytes)} on path {worst.path}; "
            f"the budget is {format_bytes(memory_bytes)}"
        )
    # A plan for a GPU node may be made on a laptop, which has no GPU memory to compare with.
    if device == "cuda" and device_count(device):
        free, _ = torch.cuda.mem_get_info(0)
        needed = max(one.device_bytes for one in planned)
        if needed > free:
            found.append(f"GPU memory: {format_bytes(needed)}; {format_bytes(free)} is free")
    disk = os.statvfs(Path(tempfile.gettempdir()))
    free_disk, needed_disk = disk.f_bavail * disk.f_frsize, max(one.total("disk_bytes") for one in planned)
    if needed_disk > free_disk:
        found.append(f"scratch disk: {format_bytes(needed_disk)}; {format_bytes(free_disk)} is free")
    return found


def _measured_bandwidth(device: str) -> float:
    """Copy a little to fresh host memory, which is what both paths do."""
    if not device_count(device):
        raise DeviceError(f"torch sees no {device} device here to measure; state its speed: --bandwidth 50GiB, say")
    opened = open_device(device, 0)
    source = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=opened.torch_device)
    watch = Stopwatch(opened)
    seconds = [
        watch.measure(lambda: torch.empty(_PROBE_BYTES, dtype=torch.uint8).copy_(source)).total_seconds
        for _ in range(3)
    ]
    return _PROBE_BYTES / min(seconds)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
