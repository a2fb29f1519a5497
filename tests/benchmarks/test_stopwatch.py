"""Case 16: what a device does later is timed whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.devices import DeviceMemory, Elapsed, HostDevice
from benchmarks.missing import Missing
from benchmarks.stopwatch import Stopwatch

WORK_SECONDS = 0.05


class LaterDevice:
    """A device that works in a thread of its own, as a GPU does; its events are marks in that thread."""

    kind = "later"
    torch_device = torch.device("cpu")
    name = "later"
    uuid = Missing("none")

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._idle = True
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(work)
            self._idle = False
            self._changed.notify_all()

    def synchronize(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._idle, timeout=10)

    def start_timer(self) -> Elapsed:
        marks: list[float] = []
        self.submit(lambda: marks.append(time.perf_counter()))

        def elapsed() -> float:
            self.submit(lambda: marks.append(time.perf_counter()))
            self.synchronize()
            return marks[1] - marks[0]

        return elapsed

    def reset_peaks(self) -> None:
        pass

    def memory(self) -> DeviceMemory:
        raise NotImplementedError

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                work = self._queue.pop(0)
            work()
            with self._changed:
                self._idle = not self._queue
                self._changed.notify_all()


def test_asynchronous_work_is_timed_by_event_and_by_wall_clock() -> None:
    device = LaterDevice()
    timed = [Stopwatch(device).measure(lambda: device.submit(lambda: time.sleep(WORK_SECONDS))) for _ in range(5)]
    # The shortest: a busy machine can only make it longer.
    assert min(t.total_seconds for t in timed) == pytest.approx(WORK_SECONDS, rel=0.1)
    assert min(t.device_seconds for t in timed if not isinstance(t.device_seconds, Missing)) == pytest.approx(
        WORK_SECONDS, rel=0.1
    )
    assert min(t.call_seconds for t in timed) < WORK_SECONDS / 2, "the call itself returned at once"


def test_work_of_before_is_not_in_the_figure() -> None:
    device = LaterDevice()
    device.submit(lambda: time.sleep(0.3))
    assert Stopwatch(device).measure(lambda: None).total_seconds < 0.2


def test_with_a_fake_clock_one_call_is_exact() -> None:
    now = [100.0]

    def work() -> str:
        now[0] += 0.25
        return "done"

    timed = Stopwatch(HostDevice(), clock=lambda: now[0]).measure(work)
    assert (timed.value, timed.call_seconds, timed.total_seconds) == ("done", 0.25, 0.25)
    assert isinstance(timed.device_seconds, Missing)


def test_the_device_is_idle_even_when_the_work_raises() -> None:
    device = LaterDevice()
    finished: list[bool] = []

    def work() -> None:
        device.submit(lambda: (time.sleep(0.02), finished.append(True))[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Stopwatch(device).measure(work)
    assert finished == [True]
