"""Start the workers of a task, wait for them without using a core, and say what became of each."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.scrub import ROOT, scrub
from benchmarks.task import Order

# A rank that another one left alone finds out by itself; this long it may take to say so.
GRACE_SECONDS = 15.0
TERM_SECONDS = 2.0
_STDERR_TAIL = 4000

RankResult = dict[str, Any]


class Launcher(Protocol):
    """Runs the ranks of one task and returns what each wrote, by rank."""

    def run(self, order: Order, limit_seconds: float) -> dict[int, RankResult]:
        """Run a task; a rank that failed has a result that says how."""
        ...


class LocalLauncher:
    """Starts every rank on this machine."""

    def run(self, order: Order, limit_seconds: float) -> dict[int, RankResult]:
        """Run a task; see `Launcher`."""
        return run_ranks(order, order.task.ranks, limit_seconds)


class _Child:
    """One worker process."""

    def __init__(self, order: Order, rank: int) -> None:
        scratch = Path(order.scratch)
        self.rank = rank
        self.result = scratch / f"result-{rank}.json"
        self.errors = scratch / f"stderr-{rank}.txt"
        self.late = False
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(scratch / "order.json"), str(rank), str(self.result)],
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                # Ctrl-C reaches the driver alone, which then ends the workers in order.
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def outcome(self, limit_seconds: float) -> RankResult:
        """Return what the worker wrote, or how it ended."""
        if self.process.returncode == 0 and self.result.exists():
            content: RankResult = json.loads(self.result.read_text(encoding="utf-8"))
            return content
        tail = scrub(self.errors.read_text(encoding="utf-8", errors="replace")[-_STDERR_TAIL:])
        kind, message = self._ending(limit_seconds)
        return {"device": None, "failure": {"type": kind, "message": message, "traceback": tail or message}}

    def _ending(self, limit_seconds: float) -> tuple[str, str]:
        if self.late:
            return "TimeLimit", f"rank {self.rank} was ended after {limit_seconds:.0f} s, the limit for one launch"
        code = self.process.returncode
        if code < 0:
            return "WorkerKilled", f"rank {self.rank} was ended by signal {-code} ({signal.Signals(-code).name})"
        return "WorkerFailed", f"rank {self.rank} exited with status {code}"


def run_ranks(order: Order, ranks: Sequence[int], limit_seconds: float) -> dict[int, RankResult]:
    """Run some ranks of a task on this machine. Whatever happens, none outlives the call."""
    order.write(Path(order.scratch) / "order.json")
    children: list[_Child] = []
    try:
        for rank in ranks:
            children.append(_Child(order, rank))
        _wait(children, limit_seconds)
    finally:
        _end([child for child in children if child.process.poll() is None])
    return {child.rank: child.outcome(limit_seconds) for child in children}


def _wait(children: Sequence[_Child], limit_seconds: float) -> None:
    """Wait for all; once one has failed, the others get a moment to notice."""
    deadline = time.monotonic() + limit_seconds
    late_at = deadline
    running = list(children)
    with ExitStack() as stack:
        ended = _EndOfProcesses(stack, running)
        while running:
            ended.wait(max(deadline - time.monotonic(), 0.0))
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                if child.process.returncode != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if running and time.monotonic() >= deadline:
                for child in running:
                    child.late = deadline >= late_at
                return


class _EndOfProcesses:
    """Sleeps in the kernel until a process ends: a parent that polls would disturb what is timed."""

    def __init__(self, stack: ExitStack, children: Sequence[_Child]) -> None:
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._can_sleep = hasattr(os, "pidfd_open")
        for child in children if self._can_sleep else ():
            descriptor = os.pidfd_open(child.process.pid)
            stack.callback(os.close, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Return when one has ended, or after that long."""
        if not self._can_sleep:
            time.sleep(min(seconds, 0.2))
            return
        for key, _ in self._selector.select(seconds):
            self._selector.unregister(key.fd)


def _end(children: Sequence[_Child]) -> None:
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, None)):
        for child in children:
            if child.process.poll() is None:
                child.signal(number)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(seconds)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    # CUDA's numbers are then NVML's; with its default order an index can mean another GPU.
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return environment
