"""A stand-in for pynvml: answers what it is told to, refuses what it is told to refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Base of the errors, as in pynvml."""


class NVMLError_NotSupported(NVMLError):  # pynvml's name
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class FakeNvml:
    """GPUs by UUID, in NVML's order, each with the bytes in use."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    nvmlClocksEventReasonSwPowerCap, nvmlClocksEventReasonHwSlowdown = 4, 8

    def __init__(self, used_bytes: dict[str, int | None], *, init: NVMLError | None = None) -> None:
        self.used_bytes = used_bytes
        self.refuse: dict[str, NVMLError] = {}
        self.processes: list[Any] = []
        self._init = init

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "__dict__").get("refuse", {}):
            error = self.refuse[name]

            def refuse(*_: Any) -> Any:
                raise error

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise self._init

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.0"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used_bytes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.used_bytes)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.used_bytes:
            raise NVMLError_NotSupported("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=1 << 37, used=self.used_bytes[handle])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 5000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        return self.processes

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetCpuAffinity(self, handle: str, words: int) -> list[int]:
        return [0b1110_0011, *([0] * (words - 1))]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5
