"""Put exported tensors back into parameters and moments, wherever those are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packckpt.exports import Export, Shard
from packckpt.merge import cut_shard
from packckpt.progressions import progressions
from packckpt.ring import Ring, Slot
from packckpt.staging import make_ring
from packckpt.strands import MOST_THREADS, usable_cores
from packckpt.transfer import reorder, same_bits
from packckpt.windows import DEFAULT_BUFFER_BYTES

# (keys) -> their whole tensors in the checkpoint: positions in keys, and a tensor `[positions, out, in]`
Source = Callable[[Sequence[str]], Iterator[tuple[list[int], torch.Tensor]]]
_MOST_WAITING_BYTES = 64 << 20
_JOB_BYTES = 2 << 20  # of rows that one thread writes at a time


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A chunk on its way to the device, whose host memory must not change before it has left."""

    slot: Slot
    left: Callable[[], None]


class Placer:
    """Writes exported tensors into tensors of the trainer.

    On an accelerator the rows of a packed tensor are laid side by side in a ring of two buffers, arrive in one
    copy (in several where they do not fit a buffer), and are transposed there. On the CPU they go to their places
    directly. Rows that lie evenly in their file are one operation, on as many threads as help: row by row, threads
    would wait for one another's turn with the interpreter. Use it as a context manager: all is in place when it is
    left.

    Args:
        largest_bytes: the largest exported tensor in any dtype; a buffer holds at least one.

    Host memory: the ring, for accelerators only. Device memory: one buffer.
    """

    def __init__(self, largest_bytes: int, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        self._buffer_bytes = max(buffer_bytes, largest_bytes)
        self._ring: Ring | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), "packckpt-place")
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0

    def __enter__(self) -> Placer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(cancel_futures=kind is not None)
        try:
            if kind is None:
                self._finish_writes()
        finally:
            while self._in_flight:
                self._wait_for_oldest()

    def make_room(self, devices: Iterable[torch.device]) -> None:
        """Make the ring now, where one of the devices is an accelerator: before anything is written."""
        accelerator = next((device for device in devices if device.type != "cpu"), None)
        if accelerator is not None and self._ring is None:
            self._ring, _ = make_ring(2 * self._buffer_bytes, accelerator)

    def place(self, destination: torch.Tensor, exports: Sequence[Export], source: Source) -> None:
        """Write the exports of one parameter into a tensor of its shape.

        Args:
            destination: the parameter, its master or a moment; any strides, any dtype.
            exports: the rows that are written, or the one export of a whole parameter.
            source: gives the tensors of keys.
        """
        destination = destination.detach()
        if destination.device.type == "cpu":
            packed = destination if exports[0].expert is not None else destination[None]
            self._fill(packed.transpose(1, 2), [export.expert or 0 for export in exports], exports, source)
            return
        row_bytes = math.prod(exports[0].shape) * destination.element_size()
        per_buffer = max(1, self._buffer_bytes // max(1, row_bytes))
        ascending = sorted(exports, key=lambda export: export.expert or 0)
        for start in range(0, len(ascending), per_buffer):
            self._place_chunk(destination, ascending[start : start + per_buffer], source)

    def _place_chunk(self, destination: torch.Tensor, exports: Sequence[Export], source: Source) -> None:
        shape = (len(exports), *exports[0].shape)
        slot = self._acquire(destination.device, math.prod(shape) * destination.element_size())
        # In the destination's dtype, so that no more bytes cross than stay; narrowing a widened value is exact.
        host = slot.memory.view(destination.dtype).view(shape)
        self._fill(host, range(len(exports)), exports, source)
        self._finish_writes()
        # Without blocking on CUDA alone, whose events say when host memory may change again.
        overlapped = host.is_pinned() and destination.device.type == "cuda"
        device = host.to(destination.device, non_blocking=overlapped)
        self._in_flight.append(_InFlight(slot, _departure(destination.device)))
        if exports[0].expert is None:
            destination.copy_(device[0].T)
            return
        start = 0
        for rows in progressions([export.expert or 0 for export in exports]):
            stop = start + len(rows)
            destination[rows.start : rows.stop : rows.step].copy_(device[start:stop].transpose(1, 2))
            start = stop

    def _fill(self, destination: torch.Tensor, rows: Sequence[int], exports: Sequence[Export], source: Source) -> None:
        """Begin to write exports to rows of a host tensor `[rows, out, in]`, of any strides."""
        by_shard: dict[Shard | None, list[int]] = {}
        for position, export in enumerate(exports):
            by_shard.setdefault(export.shard, []).append(position)
        for positions in by_shard.values():
            first = exports[positions[0]]
            for found, stack in source([exports[position].key for position in positions]):
                step = max(1, _JOB_BYTES // max(1, stack[0].numel() * stack.element_size()))
                for start in range(0, len(found), step):
                    where = [rows[positions[index]] for index in found[start : start + step]]
                    self._begin_write(destination, where, first, stack[start : start + step])

    def _begin_write(self, destination: torch.Tensor, rows: Sequence[int], export: Export, stack: torch.Tensor) -> None:
        count_bytes = stack.numel() * stack.element_size()
        # What is not aligned in its file was copied, so what waits is bounded.
        self._finish_writes(_MOST_WAITING_BYTES - count_bytes)
        mode = torch.is_inference_mode_enabled()
        self._writes.append((self._threads.submit(_write_rows, destination, rows, export, stack, mode), count_bytes))
        self._waiting_bytes += count_bytes

    def _finish_writes(self, most_bytes: int = -1) -> None:
        """Wait for the oldest writes until no more than so many bytes wait; by default for all."""
        while self._writes and self._waiting_bytes > most_bytes:
            write, count_bytes = self._writes.popleft()
            self._waiting_bytes -= count_bytes
            write.result()

    def _acquire(self, device: torch.device, count_bytes: int) -> Slot:
        self.make_room([device])
        assert self._ring is not None
        while self._in_flight and not self._ring.has_room(count_bytes):
            self._wait_for_oldest()
        return self._ring.acquire(count_bytes)

    def _wait_for_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        oldest.left()
        oldest.slot.release()


def _write_rows(
    destination: torch.Tensor, rows: Sequence[int], export: Export, stack: torch.Tensor, inference_mode: bool
) -> None:
    """Write what an export's shard takes of every tensor of a stack to the given rows."""
    with torch.inference_mode(inference_mode):  # each thread has a mode of its own; the caller's holds
        _write_parts(destination, rows, export, stack)


def _write_parts(destination: torch.Tensor, rows: Sequence[int], export: Export, stack: torch.Tensor) -> None:
    parts = cut_shard(export.key, stack, export.shard, export.shape)
    if len(rows) == 1 or parts.dtype is not destination.dtype:
        for row, part in zip(rows, parts, strict=True):
            reorder(destination[row], part)
        return
    same_bits(destination)[np.array(rows)] = same_bits(parts)


def _departure(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for what was submitted to the device's current stream so far."""
    if device.type != "cuda":
        return lambda: None
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait
