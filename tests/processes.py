"""Real processes for ranks: a pool of workers, of which each job takes some and forms a fresh process group.

A worker imports torch once and serves many jobs. Traffic stays on the loopback device; ranks meet in a file.
A worker that died in a job, or was killed because it hung, is replaced when the next job needs one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Failure:
    """An exception, as text that can cross a process boundary."""

    kind: str
    text: str
    ranks: tuple[int, ...] | None
    notes: tuple[str, ...]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        ranks = getattr(error, "ranks", None)
        notes = tuple(getattr(error, "__notes__", ()))
        return cls(type(error).__name__, str(error), ranks, notes, "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, an exception, or the exit status of a process that is gone."""

    value: Any = None
    failure: Failure | None = None
    exit_status: int | None = None
    hung: bool = False


def attempt(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or the `Failure` that it raises."""
    try:
        return work()
    except BaseException as error:
        return Failure.of(error)


def on_ranks(
    size: int, job: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0, group: bool = True
) -> list[Any]:
    """Run `job(rank, *args)` on ranks of a fresh gloo group; return the values, or fail with what a rank raised.

    Without `group` the job makes its own.
    """
    outcomes = outcomes_on_ranks(size, job, *args, timeout_seconds=timeout_seconds, group=group)
    for rank, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            raise AssertionError(f"rank {rank} of {size} raised\n{outcome.failure.traceback}")
        if outcome.exit_status is not None:
            what = f"hung for {timeout_seconds} s" if outcome.hung else f"is gone with status {outcome.exit_status}"
            raise AssertionError(f"rank {rank} of {size} {what}")
    return [outcome.value for outcome in outcomes]


def outcomes_on_ranks(
    size: int, job: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0, group: bool = True
) -> list[Outcome]:
    """Run `job(rank, *args)` on ranks that may die or hang; who hangs longer than the time-out is killed."""
    return _pool().run(size, job, args, timeout_seconds, group)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls) -> _Worker:
        ours, theirs = Pipe()
        command = f"from tests.processes import _serve; _serve({theirs.fileno()})"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", command], cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        return cls(process, ours)

    def stop(self) -> int:
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


class _Pool:
    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._meetings = tempfile.TemporaryDirectory(prefix="packckpt-ranks-")
        self._numbers = itertools.count()

    def run(
        self, size: int, job: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float, group: bool
    ) -> list[Outcome]:
        while len(self._idle) < size:
            self._idle.append(_Worker.start())
        workers = [self._idle.pop(0) for _ in range(size)]
        meeting = os.path.join(self._meetings.name, str(next(self._numbers)))
        for rank, worker in enumerate(workers):
            worker.connection.send((job, args, rank, size, meeting if group else None))
        outcomes = self._collect(workers, time.monotonic() + timeout_seconds)
        missing = sum(outcome.exit_status is not None for outcome in outcomes)
        self._idle.extend(_Worker.start() for _ in range(missing))  # ready by the time that they are needed
        return outcomes

    def _collect(self, workers: list[_Worker], deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = {id(worker.connection): (rank, worker) for rank, worker in enumerate(workers)}
        while waiting:
            seconds = max(deadline - time.monotonic(), 0)
            ready = wait([worker.connection for _, worker in waiting.values()], seconds)
            if not ready:
                break
            for connection in ready:
                rank, worker = waiting.pop(id(connection))
                try:
                    outcomes[rank] = worker.connection.recv()
                    self._idle.append(worker)
                except (EOFError, ConnectionError):
                    outcomes[rank] = Outcome(exit_status=worker.stop())
        for _, worker in waiting.values():
            worker.process.send_signal(signal.SIGUSR1)  # prints where it stands
        if waiting:
            time.sleep(0.5)
        for rank, worker in waiting.values():
            outcomes[rank] = Outcome(exit_status=worker.stop(), hung=True)
        return [outcomes[rank] for rank in range(len(workers))]

    def close(self) -> None:
        for worker in self._idle:
            worker.stop()
        self._meetings.cleanup()


@cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool


def _serve(descriptor: int) -> None:
    """Run jobs until the parent is gone."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see conftest.py
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # torch imports much at the first one, now and not in the first job
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_outcome(*connection.recv()))


def _outcome(job: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, meeting: str | None) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if meeting is not None:
                store = dist.FileStore(meeting, size)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
            try:
                return Outcome(value=job(rank, *args))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as error:
            return Outcome(failure=Failure.of(error))
