"""Carry out a run: start one task after another, keep what each found, end well however it ends."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import environment
from benchmarks.assemble import Assembler
from benchmarks.clock import now
from benchmarks.codestate import git_commit, git_dirty
from benchmarks.fit import Fit
from benchmarks.launcher import Launcher
from benchmarks.missing import Missing
from benchmarks.progress import Progress
from benchmarks.record import Record, RunStatus
from benchmarks.runfolder import RunFolder
from benchmarks.settings import Settings
from benchmarks.task import Order, Task

# A rank waits that much less for another than the launcher waits for all, so that it can still say what happened.
_RANK_PATIENCE = 0.5


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM arrived. Not an `Exception`: nothing that handles failures may swallow it."""


class Driver:
    """Runs tasks and appends their records."""

    def __init__(
        self, folder: RunFolder, settings: Settings, launcher: Launcher, tasks: Sequence[Task], scratch: Path
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._launcher = launcher
        self._tasks = tasks
        self._scratch = scratch
        self._assembler = Assembler(settings)
        self._fit = Fit(settings, self._assembler, scratch)

    def run(self, done: set[int]) -> RunStatus:
        """Run every task that is not done; return how the run ended."""
        rest = [task for task in self._tasks if task.sequence not in done]
        progress = Progress(len(rest))
        try:
            with interruptible():
                for task in rest:
                    progress.start(task.title)
                    self._folder.append(self._measure(task, progress))
                    progress.finish()
        except Interrupted:
            progress.say(f"interrupted; what was measured is kept: python -m benchmarks resume {self._folder.path}")
            return "interrupted"
        finally:
            progress.close()
        return "complete"

    def _measure(self, task: Task, progress: Progress) -> list[Record]:
        obstacle = self._fit.obstacle(task)
        if obstacle is not None:
            progress.say(f"  skipped: {obstacle.reason}")
            return self._assembler.skipped(task, obstacle.reason, now())
        started_at, start = now(), time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="packckpt-bench-", dir=self._scratch))
        try:
            results = self._launcher.run(self._order(task, scratch), self._settings.case_seconds)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        elapsed = time.monotonic() - start
        records = self._assembler.records(task, results, started_at, elapsed)
        self._fit.learn(task, records, elapsed)
        for record in records:
            if record.error is not None:
                progress.say(f"  failed: rank {record.identity.rank}, {record.identity.pass_}: {record.error.message}")
        return records

    def _order(self, task: Task, scratch: Path) -> Order:
        return Order(
            task=task,
            device=self._settings.device,
            share_device=self._settings.share_device,
            saves=1 + self._settings.repeats,
            memory_saves=2,
            touch_bytes=self._fit.touch_bytes(task),
            durable=self._settings.durable,
            scratch=str(scratch),
            imports=self._settings.imports,
            threads=max(1, environment.usable_cpus() // task.world_size),
            timeout_seconds=self._settings.case_seconds * _RANK_PATIENCE,
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into `Interrupted`; a second one changes nothing while the first is handled."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_name(settings: Settings) -> str:
    """Return the name of a run's folder: date, machine, device and ranks, commit."""
    commit, dirty = git_commit(), git_dirty()
    kind = {"cuda": "gpu"}.get(settings.device, settings.device)
    parts = [
        now()[:10].replace("-", ""),
        environment.machine_slug(),
        f"{kind}x{max(settings.ranks)}",
        "unknown" if isinstance(commit, Missing) else commit[:7],
    ]
    return "-".join(parts) + ("-dirty" if dirty is True else "")
