"""Bring windows of a save to the host through a ring: gathered and transposed where the tensors are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packckpt.gathering import HostGather, Sources
from packckpt.once import Once
from packckpt.ring import Ring, Slot
from packckpt.tensorfile import host_bytes
from packckpt.transfer import Kind, TransferLog, copy_in
from packckpt.windows import DEFAULT_BUFFER_BYTES, WEIGHTS, Copy, Run, Window

_LOGGER = logging.getLogger("packckpt")


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A window on its way into its slot.

    Attributes:
        parts: its bytes in file order, once they are there.
        wait: ends the copies, on any thread; the trainer may change what they read when it has returned.
        on_host: whether that is work for the CPU alone, which some thread may do beforehand.
    """

    parts: list[memoryview]
    wait: Once
    on_host: bool


class Stager:
    """The memory and the streams of staged saves: made at the first one, kept for the next.

    Args:
        buffer_bytes: a window's most bytes; the ring holds two such buffers.

    Host memory: two buffers, pinned where an accelerator is in use and the system allows it.
    Device memory: one buffer on the accelerator while a window is gathered.
    """

    def __init__(self, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        self.buffer_bytes = buffer_bytes
        self._ring: Ring | None = None
        self._ring_is_for_cpu = False
        self._unpinned: str | None = None
        self._streams: dict[torch.device, Any] = {}
        self._zeros = memoryview(b"")
        self._told: set[str] = set()

    def slot_for(self, window: Window, log: TransferLog) -> Slot:
        """Wait for a place for the window in the ring."""
        device = next((copy.device for copy in window.copies if copy.device.type != "cpu"), torch.device("cpu"))
        if self._ring is None or (self._ring_is_for_cpu and device.type != "cpu"):
            # The old ring, if any, lives as long as its slots do.
            self._ring, self._unpinned = make_ring(2 * self.buffer_bytes, device)
            self._ring_is_for_cpu = device.type == "cpu"
        if self._unpinned is not None:
            self._tell(f"no pinned memory ({self._unpinned}); copies go through pageable memory and block", log)
        return self._ring.acquire(window.bytes)

    def drop_ring(self) -> None:
        """Let go of the ring, as after a save that was cut short: a slot of it may never be released.

        Its memory is free once the windows that are still in it are written.
        """
        self._ring = None

    def capture(self, sources: Sources, window: Window, slot: Slot, log: TransferLog) -> Arrival:
        """Begin the copies of a window of a file into its slot; what the CPU gathers waits for whoever has time."""
        memory = host_bytes(slot.memory)
        parts = [self._zero_bytes(size) if at is None else memory[at : at + size] for at, size in window.parts]
        with torch.no_grad():
            arrivals = [self._copy(sources, copy, slot, log) for copy in window.copies]
        on_host = all(copy.device.type == "cpu" for copy in window.copies)
        return Arrival(parts, Once(_in_turn(arrivals)), on_host)

    def _copy(self, sources: Sources, copy: Copy, slot: Slot, log: TransferLog) -> Callable[[], None]:
        """Begin a copy; return what ends it, which any thread may call."""
        kind: Kind = "weight" if sources.component == WEIGHTS else "optimizer"
        host = slot.memory[copy.offset_bytes : copy.offset_bytes + copy.bytes].view(copy.dtype)
        if copy.device.type == "cpu":
            self._tell("parameters or optimizer state on the CPU are gathered by the CPU", log)
            for run in copy.runs:
                # Counted here: the log belongs to this thread.
                log.add_bytes(kind, run.numel * copy.dtype.itemsize)
            return HostGather(copy.runs, sources, host)
        with self._stream_of(copy.device):
            stage = self._stage(sources, copy, log)
            if stage is None:
                _copy_rows(sources, copy, host, kind, log)
                return lambda: None
            copy_in(host, stage, kind, log, non_blocking=overlaps(host, copy.device))
            # Freed here and taken by the next window on this stream, which waits for this copy: one is enough.
            del stage
            return departure(copy.device)

    def _stage(self, sources: Sources, copy: Copy, log: TransferLog) -> torch.Tensor | None:
        """Gather a copy's runs side by side on their device; None where it has no memory for that."""
        try:
            stage = torch.empty(copy.numel, dtype=copy.dtype, device=copy.device)
        except torch.OutOfMemoryError:
            self._tell(f"no memory on {copy.device} to gather in; rows are copied one by one", log)
            return None
        for run in copy.runs:
            exported = sources.exported(run.number)[:, run.start : run.stop]
            for rows, places in run.segments:
                # Transposed and converted by the one operation.
                _placed(stage, run, places).copy_(exported[rows.start : rows.stop : rows.step])
        return stage

    def _stream_of(self, device: torch.device) -> AbstractContextManager[Any]:
        """Enter the copy stream of a device, ordered after what the trainer has submitted."""
        module = torch.get_device_module(device)
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))
        context: AbstractContextManager[Any] = module.stream(stream)
        return context

    def _zero_bytes(self, count: int) -> memoryview:
        # Pages of a fresh allocation that are only read take no memory.
        if len(self._zeros) < count:
            self._zeros = np.zeros(count, dtype=np.uint8).data  # torch would write them
        return self._zeros[:count]

    def _tell(self, what: str, log: TransferLog) -> None:
        """Record a fall-back in the log of the save, and say it once."""
        if what not in log.notes:
            log.notes.append(what)
        if what not in self._told:
            self._told.add(what)
            _LOGGER.warning("staged path: %s", what)


def make_ring(size_bytes: int, device: torch.device) -> tuple[Ring, str | None]:
    """Make a ring for copies from or to a device; return it, and why it is not pinned where it should be."""
    if device.type == "cpu":
        return Ring(size_bytes, pinned=False), None
    try:
        # Pinned under the device that copies: another one would be woken up for it.
        with torch.get_device_module(device).device(device):
            return Ring(size_bytes, pinned=True), None
    except (RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Ring(size_bytes, pinned=False), reason


def overlaps(host: torch.Tensor, device: torch.device) -> bool:
    """Return whether a copy between host memory and a device may go on while the caller does."""
    # On CUDA alone, whose events say when it has ended.
    return device.type == "cuda" and host.is_pinned()


def departure(device: torch.device) -> Callable[[], None]:
    """Return a function that waits, on any thread, for what the device's current stream was given so far."""
    if device.type != "cuda":
        return lambda: None
    # Blocking: a thread that waits sleeps, and leaves its core to those that hash.
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(torch.cuda.current_stream(device))

    def wait() -> None:
        # A thread of its own would otherwise wake up device 0 as well; the trainer's keeps its device.
        with torch.cuda.device(device):
            event.synchronize()

    return wait


def _in_turn(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        for step in steps:
            step()

    return call


def _placed(memory: torch.Tensor, run: Run, places: range) -> torch.Tensor:
    """Return a view of a copy's memory, `[places, rows, in]`, where rows of a run belong."""
    height = run.stop - run.start
    span = memory[places[0] : places[-1] + height * run.columns]
    return span.as_strided((len(places), height, run.columns), (places.step, run.columns, 1))


def _copy_rows(sources: Sources, copy: Copy, host: torch.Tensor, kind: Kind, log: TransferLog) -> None:
    """Copy piece by piece in the source's own strides: on the device only a row with gaps takes memory."""
    for run in copy.runs:
        exported = sources.exported(run.number)[:, run.start : run.stop]
        for rows, places in run.segments:
            for row, destination in zip(rows, _placed(host, run, places), strict=True):
                landed = torch.empty_like(exported[row], device="cpu")
                copy_in(landed, exported[row], kind, log)
                destination.copy_(landed)
