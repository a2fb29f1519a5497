"""Case 15 and planted spikes: peaks are those of the save, over what was resident."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from typing import Any

import pytest

from benchmarks import memory_watch
from benchmarks.devices import DeviceMemory, HostDevice
from benchmarks.host_memory import Sampler, read_host_memory, reset_host_peak, touch_memory
from benchmarks.memory_watch import MemoryWatch
from benchmarks.missing import Missing

MB = 1 << 20

# Runs in a fresh process whose parent holds much more memory than it.
SPIKE = """
import json, mmap, sys, time
from benchmarks.devices import HostDevice
from benchmarks.memory_watch import MemoryWatch
from benchmarks.missing import Missing

def hold(size, seconds):
    with mmap.mmap(-1, size) as memory:
        for _ in range(size >> 20):
            memory.write(b"x" * (1 << 20))
        time.sleep(seconds)

with MemoryWatch(HostDevice(), Missing("no GPU")) as watch:
    hold(300 << 20, 0.02)
    watch.prepared()
    hold(50 << 20, 0)
print(json.dumps({k: v for k, v in watch.figures.items() if isinstance(v, int)}))
"""


def spend(size_bytes: int) -> None:
    touch_memory(size_bytes)


class DeviceWithMemory(HostDevice):
    """A device whose counters a test moves; it counts as torch's allocator does."""

    def __init__(self, resident: int) -> None:
        self.allocated = self.peak = resident

    def use(self, size: int) -> None:
        self.peak = max(self.peak, self.allocated + size)

    def reset_peaks(self) -> None:
        self.peak = self.allocated

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.allocated, self.peak, self.allocated, self.peak, Missing("not pinned"))


def peaks(device: DeviceWithMemory, size: int) -> dict[str, Any]:
    with MemoryWatch(device, Missing("no GPU")) as watch:
        spend(size)
        device.use(size)
        watch.prepared()
    return watch.figures


def test_a_short_spike_is_in_the_peak_and_the_parents_memory_is_not() -> None:
    with mmap.mmap(-1, 600 * MB) as held:
        for _ in range(600):
            held.write(b"x" * MB)
        done = subprocess.run([sys.executable, "-c", SPIKE], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert 299 * MB <= figures["host_peak_prepare_bytes"] < 310 * MB
    assert 49 * MB <= figures["host_peak_finalize_bytes"] < 60 * MB
    assert figures["host_peak_bytes"] == figures["host_peak_prepare_bytes"]
    assert figures["host_resident_bytes"] < 500 * MB


def test_peaks_do_not_depend_on_the_order() -> None:
    device = DeviceWithMemory(100 * MB)
    spend(700 * MB)  # the warm-up
    device.use(700 * MB)
    found = [(name, peaks(device, size * MB)) for name, size in (("A", 512), ("B", 64), ("B", 64), ("A", 512))]
    for name, figures in found:
        size = {"A": 512, "B": 64}[name] * MB
        assert figures["device_peak_allocated_bytes"] == size
        assert figures["device_resident_bytes"] == 100 * MB
        # The kernel sums its counters up lazily, some hundred KiB late.
        assert size - MB <= figures["host_peak_prepare_bytes"] < size + 10 * MB


def test_what_cannot_be_read_is_missing_with_a_reason() -> None:
    figures = peaks(DeviceWithMemory(0), 0)
    assert figures["host_peak_pinned_bytes"] == Missing("not pinned")
    assert figures["device_peak_nvml_bytes"] == Missing("no GPU")


def test_where_the_peak_cannot_be_reset_it_is_sampled_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "reset_host_peak", lambda: Missing("VmHWM cannot be reset: EACCES"))
    with MemoryWatch(DeviceWithMemory(0), Missing("no GPU")) as watch:
        with mmap.mmap(-1, 64 * MB) as memory:
            for _ in range(64):
                memory.write(b"x" * MB)
            time.sleep(0.05)
        watch.prepared()
    assert 63 * MB <= watch.figures["host_peak_bytes"] < 74 * MB
    assert "VmHWM cannot be reset" in watch.remarks["host_peak_prepare_bytes"]


def test_the_peak_starts_again_from_what_is_resident() -> None:
    spend(200 * MB)
    assert reset_host_peak() is None
    memory = read_host_memory()
    assert not isinstance(memory, Missing)
    assert memory.peak_bytes - memory.resident_bytes < 20 * MB


def test_a_sampler_sees_the_beginning_and_the_end() -> None:
    with Sampler(lambda: 7, every_seconds=10) as samples:
        pass
    assert samples.extra == [7, 7]
    assert samples.seconds == sorted(samples.seconds)
