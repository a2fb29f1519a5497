"""Read what is wanted of a checkpoint's files, once, and place it: on all cores, through bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from packckpt.filepass import FilePass
from packckpt.fillings import Chunk, FileLayout, Portion
from packckpt.placing import place_on_device, place_on_host
from packckpt.ring import Ring, Slot
from packckpt.room import Room
from packckpt.staging import departure, make_ring, overlaps
from packckpt.strands import MOST_THREADS, usable_cores
from packckpt.tensorfile import host_bytes
from packckpt.tensorreader import TensorFileReader
from packckpt.verify import digest_problem, unreadable_problem
from packckpt.windows import DEFAULT_BUFFER_BYTES

_HOST_CHUNK_BYTES = 8 << 20  # smaller ones take more turns with the interpreter than a cache gives back
_CHUNKS_OF_RING = 8  # as many threads can read and digest at once
_LARGE_TENSORS_BYTES = 128 << 20  # of those that are larger than a chunk, in memory at once
TASK_BYTES = 16 << 20  # of a file that is not digested, so that several threads can share it


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a file that one thread reads front to back.

    Attributes:
        reader: of the file.
        layout: what is wanted of it.
        tensors: which of those.
        digest: what the whole file must have, or None where that is known already.
    """

    reader: TensorFileReader
    layout: FileLayout
    tensors: range
    digest: str | None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A chunk on its way to a device, whose host memory must not change before it has left."""

    slot: Slot
    departures: Sequence[Callable[[], None]]


class Intake:
    """Reads files and fills tensors of the trainer.

    On an accelerator a chunk arrives in one copy through a ring of two buffers, and goes to its rows there. On the
    CPU it goes to its rows while it is in the core's cache. A file that is digested is read by one thread.

    Args:
        tasks: what is to be read.
        buffer_bytes: of each of the ring's two buffers, which are larger where a tensor is.

    Host memory: the ring, where something goes to an accelerator; for what goes to the CPU 9 MiB for each thread, of
    which there are at most 8, and larger tensors one by one, or several up to 128 MiB; and a copy of a chunk where it
    is converted, or where a shard is cut from components.
    Device memory: a chunk, which is an eighth of the ring or one tensor that is larger; twice that for components.
    """

    def __init__(self, tasks: Iterable[Task], buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        # The longest files first: the others even out what is left.
        self._tasks = sorted(tasks, key=lambda task: -task.reader.size_bytes)
        self._ring: Ring | None = None
        self._ring_chunk_bytes = 2 * buffer_bytes // _CHUNKS_OF_RING
        accelerator = next((task.layout.accelerator for task in self._tasks if task.layout.accelerator), None)
        if accelerator is not None:
            largest_bytes = max(task.layout.largest_bytes for task in self._tasks)
            self._ring, _ = make_ring(2 * max(buffer_bytes, largest_bytes), accelerator)
        self._room = Room(_LARGE_TENSORS_BYTES)
        self._arrived: SimpleQueue[tuple[Slot, Chunk] | None] = SimpleQueue()
        self._in_flight: deque[_InFlight] = deque()
        self._own = threading.local()
        self._running = 0
        self._stopped = False

    def run(self) -> dict[TensorFileReader, str]:
        """Read everything and place it.

        All is in place when this returns: on CUDA for what follows on the caller's current streams.

        Returns:
            what is wrong with which file; what it holds may have been placed by then.
        """
        mode = torch.is_inference_mode_enabled()
        with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), "packckpt-read") as pool:
            try:
                results = [(task.reader, pool.submit(self._run_task, task, mode)) for task in self._tasks]
                self._running = len(results)
                while self._running:
                    self._await_arrival()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                if self._ring is not None:
                    self._ring.close()  # threads may wait for it
                raise
            finally:
                while self._in_flight:
                    self._await_oldest()
        problems: dict[TensorFileReader, str] = {}
        for reader, result in results:
            if (problem := result.result()) is not None:
                problems.setdefault(reader, problem)
        return problems

    def _run_task(self, task: Task, inference_mode: bool) -> str | None:
        try:
            # Each thread has a mode of its own; the caller's holds.
            with torch.inference_mode(inference_mode):
                return self._read(task)
        except OSError as error:
            return unreadable_problem(task.reader.path, error)
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._arrived.put(None)

    def _read(self, task: Task) -> str | None:
        chunk_bytes = _HOST_CHUNK_BYTES if task.layout.accelerator is None else self._ring_chunk_bytes
        with FilePass(task.reader, digested=task.digest is not None, stopped=lambda: self._stopped) as file:
            for tensors in task.layout.split(task.tensors, chunk_bytes):
                self._take(file, task.layout.chunk(tensors))
            return None if task.digest is None else digest_problem(task.reader.path, file.finish(), task.digest)

    def _take(self, file: FilePass, chunk: Chunk) -> None:
        if any(_on_accelerator(portion) for portion in chunk.portions):
            self._take_into_ring(file, chunk)
        elif chunk.bytes > _HOST_CHUNK_BYTES:
            with self._room.taken(chunk.bytes):
                _take_to_host(file, chunk, torch.empty(chunk.bytes, dtype=torch.uint8))
        else:
            if not hasattr(self._own, "memory"):
                self._own.memory = torch.empty(_HOST_CHUNK_BYTES, dtype=torch.uint8)
            _take_to_host(file, chunk, self._own.memory[: chunk.bytes])

    def _take_into_ring(self, file: FilePass, chunk: Chunk) -> None:
        assert self._ring is not None
        slot = self._ring.acquire(chunk.bytes)
        try:
            _read_spans(file, chunk, slot.memory)
            for portion in chunk.portions:
                if not _on_accelerator(portion):
                    place_on_host(portion, slot.memory)
        except BaseException:
            slot.release()
            raise
        self._arrived.put((slot, chunk))

    def _await_arrival(self) -> None:
        """Launch the next chunk that is on the host, or note that a task has ended."""
        # Threads may wait for the ring, and none be at work that will bring a chunk: make room before waiting.
        while self._in_flight and self._arrived.empty():
            self._await_oldest()
        arrival = self._arrived.get()
        if arrival is None:
            self._running -= 1
        else:
            self._launch(*arrival)

    def _launch(self, slot: Slot, chunk: Chunk) -> None:
        """Send a chunk to its devices, on the caller's streams, and from there to its rows."""
        on_device = {}
        for device in {p.filling.destination.device for p in chunk.portions if _on_accelerator(p)}:
            arriving = slot.memory.to(device, non_blocking=overlaps(slot.memory, device))
            on_device[device] = arriving, departure(device)
        self._in_flight.append(_InFlight(slot, [departed for _, departed in on_device.values()]))
        for portion in chunk.portions:
            if _on_accelerator(portion):
                place_on_device(portion, on_device[portion.filling.destination.device][0])

    def _await_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        for departed in oldest.departures:
            departed()
        oldest.slot.release()


def _take_to_host(file: FilePass, chunk: Chunk, memory: torch.Tensor) -> None:
    _read_spans(file, chunk, memory)
    for portion in chunk.portions:
        place_on_host(portion, memory)


def _read_spans(file: FilePass, chunk: Chunk, memory: torch.Tensor) -> None:
    view, filled = host_bytes(memory), 0
    for begin, end in chunk.spans:
        file.read(begin, end, view[filled : filled + end - begin])
        filled += end - begin


def _on_accelerator(portion: Portion) -> bool:
    return portion.filling.destination.device.type != "cpu"
