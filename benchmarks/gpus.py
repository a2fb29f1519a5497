"""What NVML tells of the GPUs that this run may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks import nvml
from benchmarks.missing import Missing, split
from benchmarks.nvml import Gpu, Library

# Keep the link busy that long while its generation is read: an idle one sleeps at generation 1.
_LOAD_BYTES = 64 << 20
_LOAD_COPIES = 8


def library() -> Library | Missing:
    """Open NVML."""
    return nvml.load()


def driver_version(opened: Library | Missing) -> str | Missing:
    """Return the driver's version."""
    if isinstance(opened, Missing):
        return opened
    answer = opened.ask("nvmlSystemGetDriverVersion")
    return answer if isinstance(answer, Missing) else str(answer)


def visible(opened: Library | Missing) -> list[Gpu] | Missing:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.

    Raises:
        VisibleDeviceError: the variable names what is not there.
    """
    if isinstance(opened, Missing):
        return opened
    handles = opened.handles()
    if isinstance(handles, Missing):
        return handles
    found = [Gpu(opened, handle) for handle in handles]
    uuids = [gpu.uuid for gpu in found]
    named = {uuid: gpu for uuid, gpu in zip(uuids, found, strict=True) if not isinstance(uuid, Missing)}
    instances = {uuid: gpu for gpu in found for uuid, gpu in _instances(gpu)}
    chosen = nvml.visible_uuids(os.environ.get("CUDA_VISIBLE_DEVICES"), list(named), list(instances))
    return [(named | instances)[uuid] for uuid in chosen]


def describe_all(opened: Library | Missing) -> list[dict[str, Any]] | Missing:
    """Return the facts of every visible GPU."""
    found = visible(opened)
    if isinstance(found, Missing):
        return found
    return [describe(gpu, index) for index, gpu in enumerate(found)]


def describe(gpu: Gpu, index: int) -> dict[str, Any]:
    """Return the facts of one GPU, nulls with reasons."""
    under_load = _keep_link_busy(index)
    uuid = gpu.uuid
    values: dict[str, Any] = {
        "index": index,
        "name": _text(gpu.ask("nvmlDeviceGetName")),
        "uuid_hash": uuid if isinstance(uuid, Missing) else nvml.hash_uuid(uuid),
        "memory_bytes": _field(gpu.ask("nvmlDeviceGetMemoryInfo"), "total"),
        "sm_clock_mhz": _clock(gpu, "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        "memory_clock_mhz": _clock(gpu, "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        "max_sm_clock_mhz": _clock(gpu, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        "throttle_reasons": throttle_reasons(gpu),
        "power_limit_watts": _scaled(gpu.ask("nvmlDeviceGetEnforcedPowerLimit"), 1000),
        "link_generation": gpu.ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "link_width": gpu.ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "max_link_generation": gpu.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "max_link_width": gpu.ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "link_under_load": under_load,
        "mig": _first_flag(gpu.ask("nvmlDeviceGetMigMode")),
        "ecc": _first_flag(gpu.ask("nvmlDeviceGetEccMode")),
        "numa_node": numa_node(gpu),
        "cpu_affinity": cpu_affinity(gpu),
        "other_processes": gpu.other_processes([os.getpid()]),
    }
    found, reasons = split(values)
    return {**found, "reasons": reasons}


def throttle_reasons(gpu: Gpu) -> list[str] | Missing:
    """Return the names of what slows the clocks now; being idle is no reason."""
    mask = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if isinstance(mask, Missing):  # the name before driver 535
        mask = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if isinstance(mask, Missing):
        return mask
    names = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    bits = {
        name: gpu.library.constant(f"nvmlClocksEventReason{name}")
        or gpu.library.constant(f"nvmlClocksThrottleReason{name}")
        for name in names
    }
    return [name for name, bit in bits.items() if bit and mask & bit]


def numa_node(gpu: Gpu) -> int | Missing:
    """Return the NUMA node of the GPU: from NVML, else from the PCI device."""
    answer = gpu.ask("nvmlDeviceGetNumaNodeId")
    if not isinstance(answer, Missing):
        return int(answer)
    bus = _field(gpu.ask("nvmlDeviceGetPciInfo"), "busId")
    if isinstance(bus, Missing):
        return bus
    name = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()
    path = Path("/sys/bus/pci/devices", name[-12:], "numa_node")
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Missing("neither NVML nor the PCI device tells a NUMA node")
    return node if node >= 0 else Missing("the machine has no NUMA nodes")


def cpu_affinity(gpu: Gpu) -> str | Missing:
    """Return the CPUs next to the GPU, as a list like `0-7,16-23`."""
    words = -(-(os.cpu_count() or 1) // 64)
    masks = gpu.ask("nvmlDeviceGetCpuAffinity", words)
    if isinstance(masks, Missing):
        return masks
    cpus = [64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1]
    return ranges(cpus)


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as `0-7,16-23`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _instances(gpu: Gpu) -> list[tuple[str, Gpu]]:
    count = gpu.ask("nvmlDeviceGetMaxMigDeviceCount")
    found = (
        [] if isinstance(count, Missing) else [gpu.ask("nvmlDeviceGetMigDeviceHandleByIndex", i) for i in range(count)]
    )
    instances = [Gpu(gpu.library, handle) for handle in found if not isinstance(handle, Missing)]
    named = [(instance.uuid, instance) for instance in instances]
    return [(uuid, instance) for uuid, instance in named if not isinstance(uuid, Missing)]


def _keep_link_busy(index: int) -> bool:
    """Copy to the host for a moment; the link stays up for a while after."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return False
    source = torch.empty(_LOAD_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
    for _ in range(_LOAD_COPIES):
        source.cpu()
    return True


def _clock(gpu: Gpu, function: str, domain: str) -> Any:
    constant = gpu.library.constant(domain)
    return Missing(f"this pynvml has no {domain}") if constant is None else gpu.ask(function, constant)


def _field(answer: Any, name: str) -> Any:
    if isinstance(answer, Missing):
        return answer
    value = getattr(answer, name, None)
    return Missing(f"NVML tells no {name}") if value is None else value


def _scaled(answer: Any, divisor: int) -> Any:
    return answer if isinstance(answer, Missing) else answer / divisor


def _text(answer: Any) -> Any:
    return answer.decode() if isinstance(answer, bytes) else answer


def _first_flag(answer: Any) -> Any:
    """NVML answers the current and the pending mode."""
    return answer if isinstance(answer, Missing) else bool(answer[0])
