"""The snapshot of the staged path: files as the checkpoint will have them, written through a ring as they arrive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packckpt.disk import sync_path
from packckpt.gathering import Sources
from packckpt.manifest import ADAPTER_FILE, OPTIMIZER_DIRECTORY, optimizer_file
from packckpt.optimizer import COMPONENTS
from packckpt.ring import Slot
from packckpt.snapshot import Snapshot, SnapshotReader
from packckpt.staging import Arrival, Stager
from packckpt.strands import MOST_THREADS, Strands
from packckpt.tensorfile import Header, TensorFileWriter, TensorSpec, header_of
from packckpt.transfer import TransferLog
from packckpt.windows import WEIGHTS, FilePlan

_DONE = object()


class StagedSnapshot(Snapshot):
    """A snapshot laid out like the checkpoint.

    A file that is this rank's alone is digested while it is written, and moved into the checkpoint by the commit;
    of the others it holds this rank's tensors.

    Args:
        block_numbers: number of every layer block of the checkpoint, by name.
        own_files: relative paths of the checkpoint's files that are this rank's alone.
    """

    def __init__(
        self, destination: Path, rank: int, block_numbers: Mapping[str, int], own_files: Iterable[str]
    ) -> None:
        super().__init__(destination, rank)
        self._block_numbers = block_numbers
        self._own_files = frozenset(own_files)
        self._digests: dict[str, str] = {}
        self._strands: Strands | None = None
        self._writers: list[TensorFileWriter] = []
        # With one writer this thread gathers beside it; with one for each core it would take turns from them.
        self._gathers_too = False
        # One for each window: small beside the window, and gone when all are written.
        self._arrivals: list[Callable[[], None]] = []
        self._last_header: tuple[str | None, Header] | None = None

    @property
    def whole_files(self) -> dict[str, str]:
        """Files that stand as the checkpoint will have them: relative path to digest."""
        return {name: self._digests[name] for name in sorted(self._own_files & self._digests.keys())}

    def write(self, files: Sequence[FilePlan], stager: Stager, log: TransferLog, *, wait: bool = True) -> None:
        """Copy, write and digest window after window; a window is let go when it is written.

        Args:
            files: the weights, then the components of each block.
            stager: the ring that the windows go through.
            wait: return when everything is written; else when everything is on the host, and `complete` waits.

        Host memory: the stager's ring, whatever the number of files.
        """
        os.mkdir(self.directory)
        if any(file.component != WEIGHTS for file in files):
            os.mkdir(self.directory / OPTIMIZER_DIRECTORY)
        self._strands = Strands(None if wait else 1)
        self._gathers_too = not wait
        try:
            weights, *others = (self._write_file(file, stager, log) for file in files)
            _submit_in_turn(weights, others)
            if wait:
                self._join()
            else:
                for arrive in self._arrivals:
                    arrive()
        except BaseException:
            # Slots of jobs that were dropped are free, though a gather may still write into them.
            stager.drop_ring()
            raise

    def complete(self, *, durable: bool) -> None:
        """Wait until everything is written; put whole files on disk where durable."""
        self._join()
        if durable:
            with ThreadPoolExecutor(MOST_THREADS) as pool:
                list(pool.map(sync_path, [self.directory / name for name in self.whole_files]))

    def reader(self) -> SnapshotReader:
        """Open the snapshot for reading; use it as a context manager."""
        return SnapshotReader(self.directory, lambda component, block, key: (self._file_name(component, block), key))

    def remove(self) -> None:
        """End the writing and remove the directory and its files."""
        if self._strands is not None:
            self._strands.cancel()
        for writer in self._writers:
            writer.discard()
        super().remove()

    def _join(self) -> None:
        if self._strands is not None:
            self._strands.finish()
        self._arrivals.clear()
        self._writers.clear()

    def _write_file(self, file: FilePlan, stager: Stager, log: TransferLog) -> Iterator[None]:
        """Submit one window of a file after another; each step of the iterator is one."""
        assert self._strands is not None
        name = self._file_name(file.component, file.block or "")
        writer = TensorFileWriter(self.directory / name, self._header_of(file), digested=name in self._own_files)
        self._writers.append(writer)
        sources = Sources(file)
        for window in file.windows(stager.buffer_bytes):
            slot = stager.slot_for(window, log)
            try:
                arrival = stager.capture(sources, window, slot, log)
                self._submit_window(name, writer, arrival, slot)
            except BaseException:
                slot.release()
                raise
            yield
        self._strands.submit(name, partial(self._finish_file, name, writer))

    def _header_of(self, file: FilePlan) -> Header:
        """Return the header of a file; the components of a block, which follow one another, share one."""
        if self._last_header is None or self._last_header[0] != file.block:
            self._last_header = file.block, header_of(_specs(file), ascii_header=file.component == WEIGHTS)
        return self._last_header[1]

    def _submit_window(self, strand: str, writer: TensorFileWriter, arrival: Arrival, slot: Slot) -> None:
        assert self._strands is not None
        self._arrivals.append(arrival.wait)
        work = partial(_append, writer, arrival)
        ahead = arrival.wait if arrival.on_host else None
        self._strands.submit(strand, work, slot.release, sum(map(len, arrival.parts)), ahead)
        if arrival.on_host and self._gathers_too:
            arrival.wait()

    def _finish_file(self, name: str, writer: TensorFileWriter) -> None:
        self._digests[name] = writer.finish()

    def _file_name(self, component: str, block: str) -> str:
        return ADAPTER_FILE if component == WEIGHTS else optimizer_file(component, self._block_numbers[block])


def _specs(file: FilePlan) -> Iterator[tuple[str, TensorSpec]]:
    """Yield key and spec of every tensor of a file; asking a parameter for its shape takes longer than all the rest."""
    specs = [TensorSpec(file.dtype_of(p), (p.shape[-1], p.shape[-2])) for p in file.layout.parameters]
    for export, number in zip(file.exports, file.layout.numbers.tolist(), strict=True):
        yield export.key, specs[number]


def _submit_in_turn(weights: Iterator[None], others: Sequence[Iterator[None]]) -> None:
    """Submit the windows of a block's components in turn, and one of the weights now and then.

    A file is hashed on one thread, so windows of different files keep more than one busy. The weights of all blocks
    are one file.
    """
    waiting = [weights]
    for start in range(0, len(others), len(COMPONENTS)):
        under_way = list(others[start : start + len(COMPONENTS)])
        while under_way:
            under_way = [file for file in under_way if next(file, _DONE) is not _DONE]
            waiting = [file for file in waiting if next(file, _DONE) is not _DONE]
    for file in waiting:
        for _ in file:
            pass


def _append(writer: TensorFileWriter, arrival: Arrival) -> None:
    arrival.wait()
    writer.append(*arrival.parts)
