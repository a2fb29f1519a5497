"""One rank's private snapshot: written block by block under the fence, read back by the commit."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from packckpt.disk import remove_tree
from packckpt.exports import blocks_of
from packckpt.plan import TransferPlan
from packckpt.tensorfile import write_tensors
from packckpt.tensorreader import TensorFileReader
from packckpt.transfer import Path as TransferPath
from packckpt.transfer import TransferLog


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

    def write(
        self, plan: TransferPlan, path: TransferPath, step_of: Mapping[int, int] | None, log: TransferLog
    ) -> None:
        """Capture and write one block after another; each is let go before the next is copied.

        Args:
            plan: what is copied.
            path: how it is copied.
            step_of: step count by the id of the parameter, or None where no optimizer is saved.
            log: counts what leaves the device.

        Memory: what the path states for the largest block, and one packed expert.
        """
        os.mkdir(self.directory)
        for number, block in enumerate(plan.blocks):
            tensors = path.capture(block, log)
            if step_of is not None:
                for export in block.exports:
                    # float64 holds every step up to 2**53 exactly.
                    tensors[f"step/{export.key}"] = torch.tensor(step_of[id(export.parameter)], dtype=torch.float64)
            self._file_of_block[block.name] = f"block-{number:06d}.safetensors"
            write_tensors(self.directory / self._file_of_block[block.name], tensors)
            del tensors

    def reader(self) -> SnapshotReader:
        """Open the snapshot for reading; use it as a context manager."""
        return SnapshotReader(
            self.directory, lambda component, block, key: (self._file_of_block[block], f"{component}/{key}")
        )


class SnapshotReader:
    """Reads tensors of a snapshot by component and key; keeps its files open until it is left.

    Args:
        directory: of the snapshot.
        locate: maps a component ("lora", "master", ...), a layer block and a key of it to a file and the tensor's
            name in it.

    Memory: pages of the mapped files, which the system takes back when it needs them.
    """

    def __init__(self, directory: Path, locate: Callable[[str, str, str], tuple[str, str]]) -> None:
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

    def _parts(self, component: str, keys: Sequence[str]) -> Iterator[memoryview]:
        for key, block in zip(keys, blocks_of(keys), strict=True):
            name, tensor = self._locate(component, block, key)
            if name not in self._opened:
                self._opened[name] = TensorFileReader(self._directory / name)
            yield self._opened[name].bytes(tensor)
