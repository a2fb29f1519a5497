"""What this machine can do at best: bandwidth from device to host, of the digest, and of the disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.devices import NO_DEVICE, Device
from benchmarks.missing import Missing
from benchmarks.stopwatch import Stopwatch

COPY_BYTES = 256 << 20
SMALL_COPY_BYTES = 4096
SMALL_COPIES = 200
DIGEST_BYTES = 64 << 20
DISK_BYTES = 128 << 20
REPEATS = 3


def measure_ceiling(device: Device, scratch: Path) -> dict[str, float | Missing]:
    """Measure once; take the best of a few repeats, since a ceiling is what can be reached.

    Host memory: twice `COPY_BYTES`.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    watch = Stopwatch(device)

    def bandwidth(copy: Callable[[], object]) -> float:
        return COPY_BYTES / min(watch.measure(copy).total_seconds for _ in range(REPEATS))

    def to_fresh() -> None:
        torch.empty(COPY_BYTES, dtype=torch.uint8).copy_(source)

    warm = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    return {
        "pinned_bytes_per_second": _pinned(device, source, bandwidth),
        "pageable_warm_bytes_per_second": bandwidth(lambda: warm.copy_(source)),
        "pageable_fresh_bytes_per_second": bandwidth(to_fresh),
        "small_copy_seconds": _small_copy_seconds(device, watch),
        "digest_bytes_per_second": _digest(),
        "disk_write_bytes_per_second": _disk(scratch),
    }


def _pinned(
    device: Device, source: torch.Tensor, bandwidth: Callable[[Callable[[], object]], float]
) -> float | Missing:
    if device.kind == "cpu":
        return NO_DEVICE
    try:
        # A power of two: torch rounds pinned blocks up to one.
        pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Missing(f"host memory cannot be pinned: {str(error).splitlines()[0]}")
    pinned.copy_(source)
    return bandwidth(lambda: pinned.copy_(source, non_blocking=True))


def _small_copy_seconds(device: Device, watch: Stopwatch) -> float:
    source = torch.ones(SMALL_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros(SMALL_COPY_BYTES, dtype=torch.uint8)

    def copies() -> None:
        for _ in range(SMALL_COPIES):
            target.copy_(source)

    return min(watch.measure(copies).total_seconds for _ in range(REPEATS)) / SMALL_COPIES


def _digest() -> float:
    data = bytes(DIGEST_BYTES)
    start = time.perf_counter()
    hashlib.blake2b(data, digest_size=32).hexdigest()
    return DIGEST_BYTES / (time.perf_counter() - start)


def _disk(scratch: Path) -> float | Missing:
    path = scratch / "ceiling"
    data = os.urandom(1 << 20)
    start = time.perf_counter()
    try:
        with open(path, "wb") as file:
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - start)
    except OSError as error:
        return Missing(f"the scratch disk refused {DISK_BYTES} bytes: {error.strerror}")
    finally:
        path.unlink(missing_ok=True)
