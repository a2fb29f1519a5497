"""What the GPU's own profiler saw of one save: copies to the host, their length, and waits for the device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.missing import Missing
from benchmarks.record import Count

_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@dataclass
class Profile:
    """Filled when `profiled` is left."""

    transfers: Count | Missing = field(default_factory=lambda: Missing("the profiler was not stopped"))
    memcpy_seconds: float | Missing = field(default_factory=lambda: Missing("the profiler was not stopped"))
    synchronize_calls: int | Missing = field(default_factory=lambda: Missing("the profiler was not stopped"))


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile what runs inside on a CUDA device."""
    profile = Profile()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        yield profile
        torch.cuda.synchronize()
    # The trace file is the profiler's public face; its Python events leave the bytes of a copy out.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        read_events(profile, json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def read_events(profile: Profile, events: Sequence[Mapping[str, Any]]) -> None:
    """Sum up the events of a Chrome trace."""
    if not any(event.get("cat") in ("gpu_memcpy", "kernel", "cuda_runtime") for event in events):
        why = Missing("the profiler recorded nothing of the GPU; is CUPTI there, and allowed?")
        profile.transfers = profile.memcpy_seconds = profile.synchronize_calls = why
        return
    copies = [event for event in events if str(event.get("name", "")).startswith("Memcpy DtoH")]
    profile.transfers = Count(len(copies), sum(int(event["args"]["bytes"]) for event in copies))
    profile.memcpy_seconds = sum(float(event["dur"]) for event in copies) / 1e6  # microseconds
    profile.synchronize_calls = sum(event.get("name") in _WAITS for event in events)
