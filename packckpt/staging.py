"""Bring windows of a save to the host through a ring: gathered and transposed where the tensors are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from packckpt.ring import Ring, Slot
from packckpt.tensorfile import host_bytes
from packckpt.transfer import Kind, TransferLog, copy_in, gather_in
from packckpt.windows import DEFAULT_BUFFER_BYTES, WEIGHTS, Copy, Piece, Run, Window

_LOGGER = logging.getLogger("packckpt")


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

    def capture(self, window: Window, slot: Slot, log: TransferLog) -> tuple[list[memoryview], Callable[[], None]]:
        """Begin the copies of a window into its slot.

        Returns:
            the window's bytes in file order, and a function that waits until they are there.
        """
        waits = []
        with torch.no_grad():
            for copy in window.copies:
                memory = slot.memory[copy.offset_bytes : copy.offset_bytes + copy.bytes]
                waits.append(self._copy(copy, memory.view(copy.dtype), log))

        def wait() -> None:
            for each in waits:
                each()

        return self._parts(window, slot), wait

    def _parts(self, window: Window, slot: Slot) -> list[memoryview]:
        """Return the bytes of a window in file order."""
        memory = host_bytes(slot.memory)
        # Each part is hashed by a call that needs the interpreter's lock before and after it: thousands of them keep
        # threads waiting for one another.
        if window.contiguous:
            return [memory]
        places: dict[int, memoryview] = {}
        for copy in window.copies:
            places.update(_places(copy, memory[copy.offset_bytes : copy.offset_bytes + copy.bytes]))
        return [places.get(id(piece)) or self._zero_bytes(piece.bytes) for piece in window.pieces]

    def _copy(self, copy: Copy, host: torch.Tensor, log: TransferLog) -> Callable[[], None]:
        kind = _kind(copy)
        if copy.device.type == "cpu":
            self._tell("parameters or optimizer state on the CPU are gathered by the CPU", log)
            for run in copy.runs:
                gather_in(_placed(run, host), kind, log)
            return lambda: None
        with self._stream_of(copy.device):
            stage = self._stage(copy, log)
            if stage is None:
                _copy_rows(copy, host, kind, log)
                return lambda: None
            # Without blocking on CUDA alone, whose events say when the bytes are there.
            copy_in(host, stage, kind, log, non_blocking=host.is_pinned() and copy.device.type == "cuda")
            # Freed here and taken by the next window on this stream, which waits for this copy: one is enough.
            del stage
            return self._recorded(copy.device)

    def _stage(self, copy: Copy, log: TransferLog) -> torch.Tensor | None:
        """Gather a copy's runs side by side on their device; None where it has no memory for that."""
        try:
            stage = torch.empty(copy.numel, dtype=copy.dtype, device=copy.device)
        except torch.OutOfMemoryError:
            self._tell(f"no memory on {copy.device} to gather in; rows are copied one by one", log)
            return None
        for run in copy.runs:
            for destination, source in _placed(run, stage):
                destination.copy_(source)  # transposed and converted by the one operation
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

    def _recorded(self, device: torch.device) -> Callable[[], None]:
        if device.type != "cuda":
            return lambda: None
        # Blocking: a thread that waits sleeps, and leaves its core to those that hash.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[device])

        def wait() -> None:
            # A thread of its own would otherwise wake up device 0 as well; the trainer's keeps its device.
            with torch.cuda.device(device):
                event.synchronize()

        return wait

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


def _kind(copy: Copy) -> Kind:
    return "weight" if copy.component == WEIGHTS else "optimizer"


def _places(copy: Copy, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
    for run in copy.runs:
        for piece, place in zip(run.pieces, run.places, strict=True):
            start = place * copy.dtype.itemsize
            yield id(piece), memory[start : start + piece.bytes]


def _placed(run: Run, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of a copy's memory, and of the source in exported order, for what belongs there."""
    if not run.packed:
        yield from _placed_singly(run, memory)
        return
    rows_of_piece, columns = run.shape
    for rows, places in run.segments:
        span = memory[places[0] : places[-1] + rows_of_piece * columns]
        destination = span.as_strided((len(places), rows_of_piece, columns), (places.step, columns, 1))
        yield destination, run.source.detach()[rows.start : rows.stop : rows.step].transpose(1, 2)


def _placed_singly(run: Run, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same, piece by piece."""
    rows, columns = run.shape
    for piece, place in zip(run.pieces, run.places, strict=True):
        yield memory[place : place + rows * columns].view(rows, columns), _single(piece)


def _copy_rows(copy: Copy, host: torch.Tensor, kind: Kind, log: TransferLog) -> None:
    """Copy piece by piece in the source's own strides: on the device only a row with gaps takes memory."""
    for run in copy.runs:
        for destination, value in _placed_singly(run, host):
            landed = torch.empty_like(value, device="cpu")
            copy_in(landed, value, kind, log)
            destination.copy_(landed)


def _single(piece: Piece) -> torch.Tensor:
    source = piece.source
    assert source is not None
    row = source if piece.export.expert is None else source[piece.export.expert]
    return row.detach().T[piece.start : piece.stop]
