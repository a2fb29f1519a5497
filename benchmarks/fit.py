"""What fits: memory, disk, GPU memory and time, judged before a task starts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.assemble import Assembler
from benchmarks.missing import Missing
from benchmarks.predict import Prediction
from benchmarks.progress import duration
from benchmarks.record import Record
from benchmarks.settings import Settings
from benchmarks.task import Task
from benchmarks.units import format_bytes

# Interpreter, torch and its libraries, of one worker; a GPU's context adds host memory of its own.
PROCESS_BYTES = 500 << 20
PROCESS_SECONDS = 4.0
# Until this run has measured the machine: slow enough for most.
ASSUMED_COPY_BYTES_PER_SECOND = 1e9
ASSUMED_DIGEST_BYTES_PER_SECOND = 0.4e9
ASSUMED_DISK_BYTES_PER_SECOND = 0.5e9
_SAVES_WHILE_WATCHING = 4


# In the reason of whatever a time budget left out: that is what the budget is for, and no failure.
OF_THE_TIME_BUDGET = "of the time budget"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a task does not fit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bandwidths to foresee time with, bytes a second."""

    copy: float = ASSUMED_COPY_BYTES_PER_SECOND
    digest: float = ASSUMED_DIGEST_BYTES_PER_SECOND
    disk: float = ASSUMED_DISK_BYTES_PER_SECOND

    def save_seconds(self, prediction: Prediction) -> tuple[float, float]:
        """Return the seconds of prepare and of finalize of one save."""
        captured = prediction.all.bytes
        written = max(prediction.disk_bytes - captured, 0)
        prepare = captured / self.copy + captured / self.disk
        return prepare, written / self.digest + 2 * written / self.disk


class Fit:
    """Judges tasks of one run, and learns from those that ran."""

    def __init__(self, settings: Settings, assembler: Assembler, scratch: Path) -> None:
        self._settings = settings
        self._assembler = assembler
        self._scratch = scratch
        self._started = time.monotonic()
        self._speeds = Speeds()
        self._foreseen = 0.0
        self._taken = 0.0

    def obstacle(self, task: Task) -> Obstacle | None:
        """Return why a task cannot be started, or None."""
        if task.case_id is None:
            return None
        predictions = self._predictions(task)
        return (
            self._ranks_obstacle(task)
            or self._host_obstacle(task, predictions)
            or self._device_obstacle(task, predictions)
            or self._disk_obstacle(predictions)
            or self._time_obstacle(task)
        )

    def touch_bytes(self, task: Task) -> int:
        """Return the host memory of one rank under the path that needs most: the same for every path."""
        if task.case_id is None:
            return 0
        needs = [p.resident_host_bytes + p.host_peak_bytes for p in self._predictions(task)]
        return max(needs, default=0)

    def seconds(self, task: Task) -> float:
        """Foresee how long a task takes."""
        if task.case_id is None:
            return 3 * PROCESS_SECONDS
        predictions = self._predictions(task)
        saves = 1 + self._settings.repeats if task.passes == ("timing",) else _SAVES_WHILE_WATCHING
        each = [sum(self._speeds.save_seconds(p)) for p in predictions]
        # The ranks share cores and disk.
        plain = PROCESS_SECONDS + saves * sum(each) / max(1, len(each)) * len(task.ranks)
        return plain * (self._taken / self._foreseen if self._foreseen else 1.0)

    def learn(self, task: Task, records: Sequence[Record], elapsed_seconds: float) -> None:
        """Take the machine's own speeds, and how wrong the foresight was."""
        for record in records:
            if record.identity.pass_ == "ceiling" and record.samples:
                self._speeds = speeds_of(record)
        if task.case_id is not None:
            factor = self._taken / self._foreseen if self._foreseen else 1.0
            self._foreseen += self.seconds(task) / factor
            self._taken += elapsed_seconds

    def _predictions(self, task: Task) -> list[Prediction]:
        """Predictions of every rank that runs, under the path of the task that needs most memory."""
        found: list[Prediction] = []
        for rank in task.ranks:
            options = [
                self._assembler.prediction(self._under(task, arm.implementation), rank) for arm in self._settings.arms
            ]
            known = [option for option in options if not isinstance(option, Missing)]
            found.append(max(known, key=lambda p: p.host_peak_bytes))
        return found

    def _under(self, task: Task, implementation: str) -> Task:
        return replace(task, implementation=implementation)

    def _ranks_obstacle(self, task: Task) -> Obstacle | None:
        if self._settings.device == "cpu" or self._settings.share_device:
            return None
        count = int(torch.get_device_module(self._settings.device).device_count())
        if task.world_size <= count:
            return None
        return Obstacle(
            f"{task.world_size} ranks need {task.world_size} devices and {count} is there; "
            "--share-device puts all on one, labelled so"
        )

    def _host_obstacle(self, task: Task, predictions: Sequence[Prediction]) -> Obstacle | None:
        need = sum(p.resident_host_bytes + p.host_peak_bytes + PROCESS_BYTES for p in predictions)
        budget = self._settings.memory_budget_bytes
        if need <= budget:
            return None
        return Obstacle(f"needs {format_bytes(need)} of host memory; the budget is {format_bytes(budget)}")

    def _device_obstacle(self, task: Task, predictions: Sequence[Prediction]) -> Obstacle | None:
        if self._settings.device != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(0)
        needs = [p.resident_device_bytes + p.device_peak_bytes for p in predictions]
        need = sum(needs) if self._settings.share_device else max(needs)
        if need <= free:
            return None
        return Obstacle(f"needs {format_bytes(need)} of GPU memory; {format_bytes(free)} is free")

    def _disk_obstacle(self, predictions: Sequence[Prediction]) -> Obstacle | None:
        disk = os.statvfs(self._scratch)
        free, need = disk.f_bavail * disk.f_frsize, sum(p.disk_bytes for p in predictions)
        if need <= free:
            return None
        return Obstacle(f"needs {format_bytes(need)} of scratch disk; {format_bytes(free)} is free")

    def _time_obstacle(self, task: Task) -> Obstacle | None:
        budget = self._settings.time_budget_seconds
        if budget is None:
            return None
        left, need = budget - (time.monotonic() - self._started), self.seconds(task)
        if need <= left:
            return None
        return Obstacle(
            f"would take about {duration(need)}, and {duration(max(left, 0))} {OF_THE_TIME_BUDGET} of "
            f"{duration(budget)} is left"
        )


def speeds_of(ceiling: Record) -> Speeds:
    """Return what a ceiling record measured; what it lacks is assumed."""
    sample = ceiling.samples[0]
    return Speeds(
        copy=sample["pageable_fresh_bytes_per_second"] or ASSUMED_COPY_BYTES_PER_SECOND,
        digest=sample["digest_bytes_per_second"] or ASSUMED_DIGEST_BYTES_PER_SECOND,
        disk=sample["disk_write_bytes_per_second"] or ASSUMED_DISK_BYTES_PER_SECOND,
    )
