"""Read a file front to back, once, and digest it on the way."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from packckpt.tensorfile import host_bytes, new_digest
from packckpt.tensorreader import TensorFileReader

READ_BYTES = 1 << 20  # what is digested, and what is done with it afterwards, is then still in the core's cache


class FilePass:
    """Reads parts of a tensor file, in order, into memory of the caller; use it as a context manager.

    Args:
        reader: of the file.
        digested: hash every byte of the file; what lies between the parts is then read too.
        stopped: asked now and then whether to give up.

    Memory: a buffer of 1 MiB for what lies between the parts.
    """

    def __init__(
        self, reader: TensorFileReader, *, digested: bool, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._reader = reader
        self._stopped = stopped
        self._digest = new_digest() if digested else None
        self._between = memoryview(b"")
        self._at = 0
        # Reading names what the disk refuses, where its map would end the process; a removed file has only the map.
        self._file = reader.open_again()
        if self._digest is not None:
            # As it was parsed: what says where the tensors are is then what was digested.
            self._digest.update(reader.head)
            self._at = len(reader.head)

    def __enter__(self) -> FilePass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, begin: int, end: int, memory: memoryview) -> None:
        """Read bytes `begin` to `end` of the file, which lie behind those that were read before.

        Raises:
            OSError: the disk refused, or the file has become shorter.
            InterruptedError: it was stopped.
        """
        self.pass_over(begin)
        for start in range(begin, end, READ_BYTES):
            piece = memory[start - begin : min(start + READ_BYTES, end) - begin]
            self._fill(start, piece)
            if self._digest is not None:
                self._digest.update(piece)
        self._at = end

    def pass_over(self, end: int) -> None:
        """Go on to a byte of the file without keeping what lies before it; errors as for `read`."""
        if self._digest is not None and end > self._at:
            if not self._between:
                self._between = memoryview(bytearray(READ_BYTES))
            for start in range(self._at, end, READ_BYTES):
                piece = self._between[: min(READ_BYTES, end - start)]
                self._fill(start, piece)
                self._digest.update(piece)
        self._at = end

    def finish(self) -> str:
        """Go to the end of the file and return its digest as hex, empty if it was not digested."""
        self.pass_over(self._reader.size_bytes)
        return "" if self._digest is None else self._digest.hexdigest()

    def _fill(self, start: int, piece: memoryview) -> None:
        if self._stopped():
            raise InterruptedError("reading was given up")
        if self._file is None:
            piece[:] = host_bytes(self._reader.data(start, start + len(piece)))
            return
        self._file.seek(start)
        filled = 0
        while filled < len(piece):
            count = self._file.readinto(piece[filled:])
            if not count:
                raise OSError(f"ends at byte {start + filled}, had {self._reader.size_bytes} bytes when it was opened")
            filled += count
