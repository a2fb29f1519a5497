"""Where the trainer's tensors live: one small interface over the CPU, CUDA and any other torch device."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.errors import DeviceError
from benchmarks.missing import Missing

Elapsed = Callable[[], float | Missing]


class Device(Protocol):
    """What the driver asks of a device. A fake of it lets the stopwatch be tested without a GPU."""

    kind: str
    torch_device: torch.device

    @property
    def name(self) -> str | None:
        """Model of the device."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was submitted has ended."""
        ...

    def start_timer(self) -> Elapsed:
        """Mark the current stream now; the result, called once, marks it again, waits and returns the seconds."""
        ...

    def reset_peaks(self) -> None:
        """Start new peaks of allocated, reserved and pinned memory."""
        ...

    def memory(self) -> DeviceMemory:
        """Return the device's memory figures."""
        ...

    @property
    def uuid(self) -> str | Missing:
        """The UUID of the GPU that this process uses."""
        ...


class DeviceMemory:
    """Bytes of device memory now and at most, as torch's allocators count them."""

    def __init__(
        self,
        allocated_bytes: int | Missing,
        allocated_peak_bytes: int | Missing,
        reserved_bytes: int | Missing,
        reserved_peak_bytes: int | Missing,
        pinned_peak_bytes: int | Missing,
    ) -> None:
        self.allocated_bytes = allocated_bytes
        self.allocated_peak_bytes = allocated_peak_bytes
        self.reserved_bytes = reserved_bytes
        self.reserved_peak_bytes = reserved_peak_bytes
        self.pinned_peak_bytes = pinned_peak_bytes


NO_DEVICE = Missing("no GPU: the tensors are in host memory")


class HostDevice:
    """The CPU: nothing is asynchronous, and there is no memory beside the host's."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    uuid: str | Missing = NO_DEVICE

    @property
    def name(self) -> str | None:
        """Model of the CPU."""
        return cpu_model()

    def synchronize(self) -> None:
        """Nothing is pending on a CPU."""

    def start_timer(self) -> Elapsed:
        """There are no events on a CPU."""
        return lambda: NO_DEVICE

    def reset_peaks(self) -> None:
        """There are no device peaks on a CPU."""

    def memory(self) -> DeviceMemory:
        """Nothing: see the host's figures."""
        return DeviceMemory(NO_DEVICE, NO_DEVICE, NO_DEVICE, NO_DEVICE, NO_DEVICE)


class Accelerator:
    """A torch device with a module of its own (`torch.cuda`, ...)."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.torch_device = torch.device(kind, index)
        self._module = torch.get_device_module(kind)
        # Before anything is pinned or copied: else device 0 gets a context of its own from every rank.
        self._module.set_device(index)

    @property
    def name(self) -> str | None:
        """Model of the device."""
        get_name = getattr(self._module, "get_device_name", None)
        return None if get_name is None else str(get_name(self.torch_device))

    @property
    def uuid(self) -> str | Missing:
        """As CUDA counts the device, so that NVML can be asked about the same one."""
        get_properties = getattr(self._module, "get_device_properties", None)
        found = None if get_properties is None else getattr(get_properties(self.torch_device), "uuid", None)
        return (
            Missing(f"torch {torch.__version__} does not tell the UUID of {self.kind}") if found is None else str(found)
        )

    def synchronize(self) -> None:
        """Wait until everything on the device has ended."""
        self._module.synchronize(self.torch_device)

    def start_timer(self) -> Elapsed:
        """Record an event on the current stream, on which a blocking copy runs."""
        make_event = getattr(self._module, "Event", None)
        if make_event is None:
            return lambda: Missing(f"torch has no events for {self.kind}")
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        start.record()

        def elapsed() -> float:
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        return elapsed

    def reset_peaks(self) -> None:
        """Start new peaks of device memory, and of pinned memory where torch can."""
        for name in ("reset_peak_memory_stats", "reset_peak_host_memory_stats"):
            reset = getattr(self._module, name, None)
            if reset is not None:
                reset(*([] if "host" in name else [self.torch_device]))

    def memory(self) -> DeviceMemory:
        """Return torch's counters."""
        return DeviceMemory(
            self._number("memory_allocated"),
            self._number("max_memory_allocated"),
            self._number("memory_reserved"),
            self._number("max_memory_reserved"),
            self._pinned_peak_bytes(),
        )

    def _number(self, name: str) -> int | Missing:
        read = getattr(self._module, name, None)
        return Missing(f"torch has no {name} for {self.kind}") if read is None else int(read(self.torch_device))

    def _pinned_peak_bytes(self) -> int | Missing:
        read = getattr(self._module, "host_memory_stats", None)
        if read is None:
            return Missing(f"torch has no host_memory_stats for {self.kind}")
        stats: dict[str, Any] = read()
        for key in ("allocated_bytes.peak", "allocated_bytes.all.peak"):
            if key in stats:
                return int(stats[key])
        return Missing("torch's host_memory_stats tells no peak")


def default_kind() -> str:
    """Return "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count(kind: str) -> int:
    """Return how many devices of a kind torch sees; any number of ranks shares the CPU.

    Raises:
        DeviceError: torch knows no such device.
    """
    if kind == "cpu":
        return 1
    try:
        return int(torch.get_device_module(kind).device_count())
    except (RuntimeError, AttributeError, AssertionError):
        found = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise DeviceError(f"device is {kind!r}; expected one of {', '.join(found)}") from None


def open_device(kind: str, index: int) -> Device:
    """Return a device, chosen as the current one of this process.

    Raises:
        DeviceError: not there.
    """
    if kind == "cpu":
        return HostDevice()
    count = device_count(kind)
    if index >= count:
        raise DeviceError(f"device is {kind}:{index}, and torch sees {count} of that kind")
    return Accelerator(kind, index)


def cpu_model() -> str | None:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None
