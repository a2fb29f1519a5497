"""Files in the safetensors layout: written in one pass, in key order, digested on the way.

Both kinds of tensor file in a checkpoint have this layout: the keys in string order, data without gaps. The
header of `adapter_model.safetensors` is escaped to ASCII; the optimizer files are what
`safetensors.torch.save_file` writes for float32 tensors, whose header is UTF-8.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from types import TracebackType
from typing import IO, NamedTuple

import torch

from packckpt.disk import create_file, naming, sync_file
from packckpt.dtypes import NAME_OF_DTYPE

BATCH_BYTES = 1 << 20  # packed copies of small tensors that are written together
_MOST_VECTORS = 1024  # of one vectored write, by POSIX's common limit


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor in a file; a tuple, whose hash costs little: it is looked up for every name."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Header:
    """How a file begins, and what has to follow: files that hold the same names and specs have the same.

    Attributes:
        content: the first bytes of the file, the header's length among them.
        data_bytes: size of the data section.
    """

    content: bytes
    data_bytes: int


def new_digest() -> hashlib.blake2b:
    """Return the hash that the format uses for files and manifest: BLAKE2b with 256 bits."""
    return hashlib.blake2b(digest_size=32)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor in logical order; copies only where it is not contiguous."""
    packed = tensor.detach().contiguous()
    # A tensor of one element is contiguous with any strides; a view as bytes needs them to be 1.
    return host_bytes(packed.as_strided((packed.numel(),), (1,)).view(torch.uint8))


def host_bytes(data: torch.Tensor) -> memoryview:
    """Return the memory of a one-dimensional uint8 host tensor; nothing is copied."""
    view: memoryview = data.numpy().data
    return view


class TensorFileWriter:
    """Write one file whose tensors are known beforehand and arrive in key order.

    It is opened when its first bytes are written, by the thread that writes them: many may be under way.

    Args:
        path: a file that does not exist yet.
        header: says which tensors.
        durable: sync the file to disk when it is closed.
        digested: hash what is written; a private file needs no digest, and hashing costs more than writing.

    Memory: nothing of its own; parts are written from where they are.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        durable: bool = False,
        digested: bool = True,
    ) -> None:
        self._path = path
        self._header = header
        self._written_bytes = 0
        self._durable = durable
        self._digest = new_digest() if digested else None
        self._file: IO[bytes] | None = None

    def append(self, *parts: memoryview) -> None:
        """Write the next bytes of the data section, given in one or many parts."""
        self._written_bytes += sum(map(len, parts))
        self._put(self._opened(), parts)

    def finish(self) -> str:
        """Flush, sync where durable, and return the digest of the file as hex (empty if not digested)."""
        if self._written_bytes != self._header.data_bytes:
            raise RuntimeError(
                f"{os.fspath(self._path)}: {self._written_bytes} of {self._header.data_bytes} bytes were written"
            )
        file = self._opened()
        with naming(self._path):
            if self._durable:
                sync_file(file)
            file.close()
        return self._digest.hexdigest() if self._digest else ""

    def discard(self) -> None:
        """Close the file without an error; it is about to be removed."""
        if self._file is not None:
            with suppress(OSError):  # a full disk fails again on closing; the first error is the one to tell
                self._file.close()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = create_file(self._path, buffering=0)
            self._put(self._file, [memoryview(self._header.content)])
        return self._file

    def _put(self, file: IO[bytes], parts: Sequence[memoryview]) -> None:
        with naming(self._path):
            for batch in _batches(parts):
                if self._digest:
                    for part in batch:
                        self._digest.update(part)
                _write_all(file.fileno(), batch)


def _batches(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut parts into batches that are still in the core's cache when they are written after they were hashed."""
    batch: list[memoryview] = []
    batch_bytes = 0
    for part in parts:
        for start in range(0, len(part), BATCH_BYTES):
            piece = part[start : start + BATCH_BYTES]
            batch.append(piece)
            batch_bytes += len(piece)
            if batch_bytes >= BATCH_BYTES or len(batch) == _MOST_VECTORS:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Write parts one after another by as few system calls as the system takes, without joining them first."""
    left = deque(part for part in parts if len(part))
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write host tensors to a private file, without digest or sync; they are packed a few at a time.

    Memory: packed copies of 1 MiB of tensors, or of one that is larger.
    """
    ordered = [(name, tensors[name]) for name in sorted(tensors)]
    header = header_of((name, TensorSpec(tensor.dtype, tuple(tensor.shape))) for name, tensor in ordered)
    with TensorFileWriter(path, header, digested=False) as writer:
        batch: list[memoryview] = []
        batch_bytes = 0
        for _, tensor in ordered:
            batch.append(tensor_bytes(tensor))
            batch_bytes += len(batch[-1])
            if batch_bytes >= BATCH_BYTES:
                writer.append(*batch)
                batch, batch_bytes = [], 0
        writer.append(*batch)
        writer.finish()


def header_of(tensors: Iterable[tuple[str, TensorSpec]], *, ascii_header: bool = False) -> Header:
    """Return the header of a file.

    Args:
        tensors: name and spec of each, in string order of their names.
        ascii_header: escape what is not ASCII.
    """
    # As text, not by way of dictionaries: ten thousand of them start a full garbage collection in the middle of a save.
    quoted = encode_basestring_ascii if ascii_header else encode_basestring
    known: dict[TensorSpec, tuple[str, int]] = {}
    entries: list[str] = []
    offset = 0
    for name, spec in tensors:
        if (found := known.get(spec)) is None:
            shape = ",".join(map(str, spec.shape))
            text = f':{{"dtype":"{NAME_OF_DTYPE[spec.dtype]}","shape":[{shape}],"data_offsets":['
            found = known[spec] = text, spec.bytes
        text, size_bytes = found
        end = offset + size_bytes
        entries.append(f"{quoted(name)}{text}{offset},{end}]}}")
        offset = end
    encoded = f"{{{','.join(entries)}}}".encode()
    encoded += b" " * (-len(encoded) % 8)
    return Header(len(encoded).to_bytes(8, "little") + encoded, offset)
