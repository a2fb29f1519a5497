"""One rank's private snapshot: written block by block under the fence, read back by the commit."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from packckpt.disk import remove_tree
from packckpt.dtypes import DTYPE_OF_NAME, NAME_OF_DTYPE
from packckpt.exports import Export, Shard, block_of
from packckpt.plan import TransferPlan
from packckpt.tensorfile import write_tensors
from packckpt.tensorreader import TensorFileReader
from packckpt.transfer import Path as TransferPath
from packckpt.transfer import TransferLog


@dataclass(frozen=True, slots=True)
class Entry:
    """What the other ranks need to know of one export, without its bytes.

    Attributes:
        key, dtype, shape, shard: of the exported value on this rank; shape is `(out, in)`.
        step: the step count, or None where no optimizer is saved.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, int]
    shard: Shard | None
    step: int | None

    def to_json(self) -> list[Any]:
        """Return the entry as JSON."""
        shard = None if self.shard is None else asdict(self.shard)
        return [self.key, NAME_OF_DTYPE[self.dtype], list(self.shape), shard, self.step]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Entry:
        """Return the entry that `to_json` made."""
        key, dtype, shape, shard, step = fields
        return cls(key, DTYPE_OF_NAME[dtype], (shape[0], shape[1]), None if shard is None else Shard(**shard), step)


def entries_of(exports: Iterable[Export], steps: Sequence[int] | None) -> list[Entry]:
    """Describe exports; `steps` has one count for each, or is None where no optimizer is saved."""
    return [
        Entry(export.key, export.parameter.dtype, export.shape, export.shard, None if steps is None else steps[i])
        for i, export in enumerate(exports)
    ]


class Snapshot:
    """A directory `.<name>.snapshot-r<rank>-<random hex>` that holds one rank's exports.

    Its layout is private to the path that writes it, and it need not survive the process.
    """

    def __init__(self, destination: Path, rank: int) -> None:
        self.directory = destination.with_name(f".{destination.name}.snapshot-r{rank}-{secrets.token_hex(8)}")

    @property
    def whole_files(self) -> dict[str, str]:
        """Files that stand as the checkpoint will have them: relative path to digest."""
        return {}

    def complete(self, *, durable: bool) -> None:
        """Wait until everything is written; put whole files on disk where durable.

        Raises:
            BaseException: what a write that went on after prepare raised.
        """

    def reader(self) -> SnapshotReader:
        """Open the snapshot for reading; use it as a context manager."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the directory and its files, if they are there."""
        remove_tree(self.directory)


class BlockSnapshot(Snapshot):
    """A snapshot of one file `block-<6 digits>.safetensors` for each layer block."""

    def __init__(self, destination: Path, rank: int) -> None:
        super().__init__(destination, rank)
        self._file_of_block: dict[str, str] = {}

    def write(self, plan: TransferPlan, path: TransferPath, steps: dict[str, int] | None, log: TransferLog) -> None:
        """Capture and write one block after another; each is let go before the next is copied.

        Memory: what the path states for the largest block, and one packed expert.
        """
        os.mkdir(self.directory)
        for number, block in enumerate(plan.blocks):
            tensors = path.capture(block, log)
            if steps is not None:
                for export in block.exports:
                    # float64 holds every step up to 2**53 exactly.
                    tensors[f"step/{export.key}"] = torch.tensor(steps[export.key], dtype=torch.float64)
            self._file_of_block[block.name] = f"block-{number:06d}.safetensors"
            write_tensors(self.directory / self._file_of_block[block.name], tensors)
            del tensors

    def reader(self) -> SnapshotReader:
        """Open the snapshot for reading; use it as a context manager."""
        return SnapshotReader(
            self.directory, lambda component, key: (self._file_of_block[block_of(key)], f"{component}/{key}")
        )


class SnapshotReader:
    """Reads tensors of a snapshot by component and key; keeps its files open until it is left.

    Args:
        directory: of the snapshot.
        locate: maps a component ("lora", "master", ...) and a key to a file and the tensor's name in it.

    Memory: pages of the mapped files, which the system takes back when it needs them.
    """

    def __init__(self, directory: Path, locate: Callable[[str, str], tuple[str, str]]) -> None:
        self._directory = directory
        self._locate = locate
        self._opened: dict[str, TensorFileReader] = {}

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()

    def __call__(self, component: str, keys: Sequence[str]) -> list[memoryview]:
        """Return the bytes of one component of the keys."""
        return list(self._parts(component, keys))

    def _parts(self, component: str, keys: Iterable[str]) -> Iterator[memoryview]:
        for key in keys:
            name, tensor = self._locate(component, key)
            if name not in self._opened:
                self._opened[name] = TensorFileReader(self._directory / name)
            yield self._opened[name].bytes(tensor)
