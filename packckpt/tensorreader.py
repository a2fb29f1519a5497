"""Look into files in the safetensors layout: what they hold, and tensors as views of the file."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from io import FileIO
from typing import IO, Any

import torch

from packckpt.dtypes import DTYPE_OF_NAME
from packckpt.tensorfile import TensorSpec, host_bytes

_LARGEST_SIZE = 2**63 - 1  # of what torch counts in
_PLAIN_ENTRY = re.compile(
    r'"([^"\\]+)":\{"dtype":"([A-Z0-9_]+)","shape":\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\],'
    r'"data_offsets":\[([0-9]{1,18}),([0-9]{1,18})\]\}'
)
_PLAIN_ENTRY_LENGTH = len('"":{"dtype":"","shape":[],"data_offsets":[,]}')
_LARGEST_HEADER_BYTES = 100_000_000  # what safetensors takes
# dtype as the header has it, shape, first byte and the one behind the last, counted from the file's start
Entry = tuple[str, tuple[int, ...], int, int]
_File = IO[bytes]


class Headers:
    """What is known of the headers of a checkpoint's files: those of a block's components are one and the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[bytes, int], tuple[bytes, dict[str, Entry]]] = {}

    def known(self, head: bytes, size_bytes: int, check: Callable[[], None]) -> tuple[bytes, dict[str, Entry]]:
        """Return a head as it is kept, and what it says; one that was not met in a file of that size is checked."""
        with self._lock:
            if (head, size_bytes) not in self._known:
                check()
                self._known[head, size_bytes] = head, _parse(head)
            return self._known[head, size_bytes]


class TensorFileReader:
    """Look at the tensors of a file without reading it: what is looked at is paged in.

    The file is one that this package wrote, or that safetensors accepted. It can be looked at until the reader and
    all views are gone, also after it was removed. Memory: pages that the system takes back when it needs them.

    Args:
        path: the file.
        headers: shared by readers whose files may have the same header; it is then checked and parsed once.
        check: raises where the file is not what it should be.

    Attributes:
        path: the file.
        size_bytes: of the whole file.
        head: its first bytes, up to where the tensors begin, as they were when it was opened.
        entries: what it holds: name to dtype, shape and place.

    Raises:
        ValueError, RecursionError: the header is not one that this package reads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        headers: Headers | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        with open(path, "rb", opener=_open_at_once) as file:
            self._identity = _identity(file)
            self.size_bytes = os.fstat(file.fileno()).st_size
            head = _head(file, self.size_bytes)
            # Private, since torch wants memory that may be written; unlike Python's, its maps keep no descriptor open.
            name = _name_for_torch(path, file.fileno())
            self._bytes = torch.from_file(name, size=self.size_bytes, dtype=torch.uint8)
        self._view = host_bytes(self._bytes)
        self.head, self.entries = (headers or Headers()).known(head, self.size_bytes, check)

    def bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor; nothing is copied."""
        _, _, begin, end = self.entries[name]
        return self._view[begin:end]

    def data(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes of the file as a uint8 tensor that nobody may write to; nothing is copied."""
        return self._bytes[begin:end]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that nobody may write to; one that is not aligned in its file is copied."""
        dtype_name, shape, begin, end = self.entries[name]
        dtype = DTYPE_OF_NAME[dtype_name]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        data = self.data(begin, end)
        return (data.clone() if begin % dtype.itemsize else data).view(dtype).view(shape)

    def open_again(self) -> FileIO | None:
        """Open the same file for reading; None where it was removed or replaced since it was opened first."""
        try:
            file = open(self.path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115  # the caller closes it
        except OSError:
            return None
        if _identity(file) == self._identity:
            return file
        file.close()
        return None


def spec_of(entry: Entry) -> TensorSpec:
    """Return dtype and shape of a tensor, from what the header says of it."""
    return TensorSpec(DTYPE_OF_NAME[entry[0]], entry[1])


def _open_at_once(path: str, flags: int) -> int:
    # A named pipe that has taken a file's place would be waited for.
    return os.open(path, flags | os.O_NONBLOCK)


def _head(file: _File, size_bytes: int) -> bytes:
    """Read a file up to where its tensors begin; where that is nowhere, its first eight bytes."""
    length = file.read(8)
    count = int.from_bytes(length, "little")
    return length + file.read(count) if count <= min(size_bytes - 8, _LARGEST_HEADER_BYTES) else length


def _identity(file: _File) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _name_for_torch(path: str | os.PathLike[str], descriptor: int) -> str:
    """Return a name of an open file that torch can take: it wants UTF-8, which a path need not be."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"/dev/fd/{descriptor}"
    return name


def _parse(head: bytes) -> dict[str, Entry]:
    return _parse_plain(head) or _parse_json(head)


def _parse_plain(head: bytes) -> dict[str, Entry] | None:
    """Parse a header without spaces, metadata and escapes, as this package writes them, in half the time; else None."""
    try:
        text = head[8:].decode().rstrip(" ")
    except UnicodeDecodeError:
        return None
    start, shapes = len(head), _Shapes()
    entries: dict[str, Entry] = {}
    matched = 0
    for name, dtype_name, shape, begin, end in (found := _PLAIN_ENTRY.findall(text)):
        entries[name] = dtype_name, shapes[shape], start + int(begin), start + int(end)
        matched += len(name) + len(dtype_name) + len(shape) + len(begin) + len(end)
    # Between the entries there is room for commas and braces alone.
    if matched + len(found) * (_PLAIN_ENTRY_LENGTH + 1) + 1 != len(text) or len(entries) != len(found):
        return None
    return entries


class _Shapes(dict[str, tuple[int, ...]]):
    """Shapes by their text: most tensors of a file have one of a few."""

    def __missing__(self, text: str) -> tuple[int, ...]:
        shape = self[text] = tuple(map(int, text.split(","))) if text else ()
        return shape


def _parse_json(head: bytes) -> dict[str, Entry]:
    start = len(head)

    def compact(fields: dict[str, Any]) -> dict[str, Any] | Entry:
        return _compact(fields, start)

    entries: dict[str, Any] = json.loads(head[8:], object_hook=compact)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if not isinstance(entry, tuple):
            raise ValueError(f"{name} is described by {entry!r}; expected dtype, shape and data_offsets")
    return entries


def _compact(fields: dict[str, Any], start: int) -> dict[str, Any] | Entry:
    """Return what a header says of one tensor as a flat tuple, which the garbage collector need not visit.

    Dictionaries and lists for each of ten thousand tensors start a full collection of the trainer's objects, which
    took a third of the time that reading a checkpoint takes (0.1 s of 0.3 s).
    """
    if len(fields) != 3 or not fields.keys() >= {"dtype", "shape", "data_offsets"}:
        return fields  # the header itself, or its metadata
    dtype_name, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype_name, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return fields
    return dtype_name, tuple(shape), start + offsets[0], start + offsets[1]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _LARGEST_SIZE for number in value)
