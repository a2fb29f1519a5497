"""Run jobs on a few threads: those of one strand in order, different strands side by side.

A file is written and digested front to back, so its pieces are one strand; hashing and writing release the
interpreter's lock, so several files are done at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

MOST_THREADS = 8


@dataclass(slots=True, eq=False)
class _Job:
    strand: Hashable
    work: Callable[[], None]
    release: Callable[[], None]
    size_bytes: int
    ahead: Callable[[], None] | None


class Strands:
    """A pool of threads that lives for one save.

    Args:
        threads: how many; None means one for each core this process may use, at most 8.
        most_bytes: `submit` waits while jobs of more than this many bytes are under way; None for no bound.
    """

    def __init__(self, threads: int | None = None, most_bytes: int | None = None) -> None:
        count = threads or min(MOST_THREADS, usable_cores())
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._busy: dict[Hashable, _Job] = {}
        self._pending_bytes = 0
        self._closing = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"packckpt-write-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        strand: Hashable,
        work: Callable[[], None],
        release: Callable[[], None] = lambda: None,
        size_bytes: int = 0,
        ahead: Callable[[], None] | None = None,
    ) -> None:
        """Queue a job; `release` is called when it is over, also where it failed or was dropped.

        Args:
            strand: whose job it is.
            work: the job.
            release: lets go of what it holds.
            size_bytes: what counts towards `most_bytes`.
            ahead: a part of the work that may be done before its turn, by a thread that finds every strand busy;
                it must not wait for another job. The work begins with it too, and waits where it has begun already.

        Raises:
            BaseException: what an earlier job raised; the new one is dropped.
        """
        with self._changed:
            if self._most_bytes is not None:
                limit = self._most_bytes
                self._changed.wait_for(
                    lambda: self._error or not self._pending_bytes or self._pending_bytes + size_bytes <= limit
                )
            if self._error is None:
                self._pending_bytes += size_bytes
                self._waiting.append(_Job(strand, work, release, size_bytes, ahead))
                self._changed.notify_all()
                return
        release()
        raise self._error

    def finish(self) -> None:
        """Wait for all jobs and end the threads; raise what the first failed job raised."""
        self._close()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Drop the jobs that have not begun, wait for those that have, and end the threads."""
        with self._changed:
            self._error = self._error or InterruptedError("the save was given up")
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            # No more come. A strand that is left to the end would keep one thread busy while the others have none.
            left_bytes: dict[Hashable, int] = {}
            for job in self._waiting:
                left_bytes[job.strand] = left_bytes.get(job.strand, 0) + job.size_bytes
            self._waiting = deque(sorted(self._waiting, key=lambda job: -left_bytes[job.strand]))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()
            del step  # a thread that waits for the next must not keep what the last one wrote

    def _next(self) -> Callable[[], None] | None:
        """Wait for a job whose strand is free, or for what can be done ahead of one; None when all are taken."""
        with self._changed:
            while True:
                for job in self._waiting:
                    if job.strand not in self._busy:
                        self._waiting.remove(job)
                        self._busy[job.strand] = job
                        return partial(self._finish_job, job)
                for job in self._waiting:
                    if job.ahead is not None:
                        ahead, job.ahead = job.ahead, None
                        return partial(self._attempt, ahead)
                if self._closing and not self._waiting:
                    return None
                self._changed.wait()

    def _finish_job(self, job: _Job) -> None:
        try:
            self._attempt(job.work)
        finally:
            job.release()
            with self._changed:
                self._pending_bytes -= job.size_bytes
                del self._busy[job.strand]
                self._changed.notify_all()

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error


def usable_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
