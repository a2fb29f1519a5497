"""Host memory of this process: what is resident, the peak, and what kind of memory it is."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.missing import Missing

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_TOUCH_CHUNK_BYTES = 1 << 20
SAMPLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class HostMemory:
    """One reading of /proc/self/status, in bytes."""

    resident_bytes: int
    peak_bytes: int
    anonymous_bytes: int
    shared_bytes: int


def read_host_memory() -> HostMemory | Missing:
    """Read the counters of this process. `ru_maxrss` would not do: it inherits the parent's peak."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return Missing(f"{_STATUS} cannot be read: {error.strerror}")
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return HostMemory(*(_kib(found[name]) for name in ("VmRSS", "VmHWM", "RssAnon", "RssShmem")))
    except KeyError as error:
        return Missing(f"{_STATUS} has no {error.args[0]}")


def reset_host_peak() -> Missing | None:
    """Make VmHWM start again from what is resident now."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError as error:
        return Missing(f"VmHWM cannot be reset: {error.strerror}")
    return None


def minor_faults() -> int:
    """Return the page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settle_heap() -> None:
    """Give free memory back to the system, so that one save's leftovers are not the next one's resident memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def touch_memory(size_bytes: int) -> None:
    """Write to that much fresh memory and give it back.

    A virtual machine may have to grow into its memory, once; whichever path ran first would pay for it.
    """
    if size_bytes <= 0:
        return
    chunk = b"\x01" * min(_TOUCH_CHUNK_BYTES, size_bytes)
    with mmap.mmap(-1, size_bytes) as memory:
        for _ in range(size_bytes // len(chunk)):
            memory.write(chunk)


@dataclass
class Samples:
    """Columns of equal length, filled by a `Sampler`; seconds are of `time.perf_counter`."""

    seconds: list[float] = field(default_factory=list)
    host: list[HostMemory] = field(default_factory=list)
    extra: list[int | None] = field(default_factory=list)

    def peak(self, name: str) -> int | Missing:
        """Return the largest of one host column."""
        found = [int(getattr(one, name)) for one in self.host]
        return max(found) if found else Missing("no sample was taken")


class Sampler:
    """Samples host memory, and one extra figure, from a thread; for passes in which nothing is timed."""

    def __init__(self, extra: Callable[[], int | None] = lambda: None, every_seconds: float = SAMPLE_SECONDS) -> None:
        self.samples = Samples()
        self._extra = extra
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Samples:
        self._sample()
        self._thread.start()
        return self.samples

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(self._every_seconds):
            self._sample()

    def _sample(self) -> None:
        host = read_host_memory()
        if isinstance(host, Missing):
            return
        self.samples.seconds.append(time.perf_counter())
        self.samples.host.append(host)
        self.samples.extra.append(self._extra())


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024
