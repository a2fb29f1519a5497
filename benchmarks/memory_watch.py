"""Peaks of host and device memory in one save, over what was resident before it."""

from __future__ import annotations

from typing import Any

from benchmarks import nvml
from benchmarks.devices import Device
from benchmarks.host_memory import SAMPLE_SECONDS, HostMemory, Sampler, read_host_memory, reset_host_peak, settle_heap
from benchmarks.missing import Missing


class MemoryWatch:
    """Peaks of one save over what was resident when it was entered."""

    def __init__(self, device: Device, gpu: nvml.Gpu | Missing) -> None:
        self._device = device
        self._gpu = gpu
        self._sampler = Sampler(self._used_by_gpu)
        self._prepare_peak: int | Missing = Missing("prepare did not return")
        self.figures: dict[str, Any] = {}
        self.remarks: dict[str, str] = {}

    def __enter__(self) -> MemoryWatch:
        self._device.synchronize()
        self._device.reset_peaks()
        self._resident_device = self._device.memory()
        self._resident_gpu = nvml.used_bytes(self._gpu)
        # Started before the first reading, so that its own memory is resident too.
        self._samples = self._sampler.__enter__()
        self._cannot_reset = reset_host_peak()
        self._resident = read_host_memory()
        return self

    def prepared(self) -> None:
        """Read the peak of prepare, and start that of finalize.

        What prepare freed and the heap kept is given back in between: how much that is changes from run to run, and it
        would count as finalize's.
        """
        self._prepare_peak = self._peak()
        self._device_peaks = self._device.memory()
        settle_heap()
        reset_host_peak()

    def __exit__(self, *_: object) -> None:
        finalize_peak = self._peak()
        self._sampler.__exit__()
        if not hasattr(self, "_device_peaks"):
            return  # prepare raised; there is nothing to tell
        if self._cannot_reset is not None:
            for name in ("host_peak_bytes", "host_peak_prepare_bytes", "host_peak_finalize_bytes"):
                self.remarks[name] = f"sampled every {SAMPLE_SECONDS} s: {self._cannot_reset.reason}"
        peaks = [self._prepare_peak, finalize_peak]
        found = [peak for peak in peaks if not isinstance(peak, Missing)]
        now = self._device_peaks
        self.figures = {
            "host_resident_bytes": self._column(self._resident, "resident_bytes"),
            "host_peak_bytes": max(found) if len(found) == len(peaks) else self._prepare_peak,
            "host_peak_prepare_bytes": self._prepare_peak,
            "host_peak_finalize_bytes": finalize_peak,
            "host_peak_anonymous_bytes": self._sampled("anonymous_bytes"),
            "host_peak_shared_bytes": self._sampled("shared_bytes"),
            "host_peak_pinned_bytes": now.pinned_peak_bytes,
            "device_resident_bytes": self._resident_device.allocated_bytes,
            "device_peak_allocated_bytes": difference(self._resident_device.allocated_bytes, now.allocated_peak_bytes),
            "device_peak_reserved_bytes": difference(self._resident_device.reserved_bytes, now.reserved_peak_bytes),
            "device_peak_nvml_bytes": difference(self._resident_gpu, self._sampled_gpu()),
        }

    def _peak(self) -> int | Missing:
        now = read_host_memory()
        if isinstance(now, Missing) or isinstance(self._resident, Missing):
            return now if isinstance(now, Missing) else Missing("nothing is known of what was resident")
        peak = now.peak_bytes if self._cannot_reset is None else self._samples.peak("resident_bytes")
        over: int | Missing = difference(self._resident.resident_bytes, peak)
        return over

    def _sampled(self, name: str) -> int | Missing:
        over: int | Missing = difference(self._column(self._resident, name), self._samples.peak(name))
        return over

    def _column(self, memory: HostMemory | Missing, name: str) -> int | Missing:
        return memory if isinstance(memory, Missing) else int(getattr(memory, name))

    def _used_by_gpu(self) -> int | None:
        used = nvml.used_bytes(self._gpu)
        return None if isinstance(used, Missing) else used

    def _sampled_gpu(self) -> int | Missing:
        found = [used for used in self._samples.extra if used is not None]
        return max(found) if found else self._resident_gpu


def difference(before: Any, after: Any) -> Any:
    """Return after - before, or the reason why one of them is missing; what shrank is no peak: 0."""
    for value in (before, after):
        if isinstance(value, Missing):
            return value
    return max(after - before, 0)
