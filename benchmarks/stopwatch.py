"""Time a piece of work that a device may carry out later: by wall clock and by events on its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.devices import Device
from benchmarks.missing import Missing

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a piece of work returned, and how long it took.

    Attributes:
        call_seconds: until the call returned.
        total_seconds: until the device was idle, too.
        device_seconds: between two events on the stream; with a pageable destination it contains the host's
            page faults.
    """

    value: T
    call_seconds: float
    total_seconds: float
    device_seconds: float | Missing


class Stopwatch:
    """Measures on one device. The device is idle before the clock starts and when it stops, whatever the work does."""

    def __init__(self, device: Device, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._clock = clock

    def measure(self, work: Callable[[], T]) -> Timed[T]:
        """Run the work once and time it."""
        self._device.synchronize()
        start = self._clock()
        stop_timer = self._device.start_timer()
        try:
            value = work()
            returned = self._clock()
            device_seconds = stop_timer()
        finally:
            self._device.synchronize()
        ended = self._clock()
        return Timed(value, returned - start, ended - start, device_seconds)
