"""Merge the ranks' snapshots into one checkpoint, digest what is written, and rename it into place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packckpt.disk import create_file, naming, remove_tree, rename_new, sync_directory, sync_file, sync_tree
from packckpt.dtypes import STATE_DTYPE
from packckpt.errors import CheckpointError, SaveError
from packckpt.manifest import (
    ADAPTER_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_KEY,
    OPTIMIZER_DIRECTORY,
    config_bytes,
    manifest_bytes,
    optimizer_file,
)
from packckpt.merge import MergedKey, Part, blocks_of, join_parts
from packckpt.optimizer import COMPONENTS, Hyperparameters
from packckpt.tensorfile import TensorFileWriter, new_digest, tensor_bytes
from packckpt.verify import verify_checkpoint

# Asked for at once from every rank; the memory that a commit needs beside one largest tensor.
WINDOW_BYTES = 64 << 20

# (rank, component, keys) -> the bytes of each key, in order
Fetch = Callable[[int, str, Sequence[str]], list[memoryview]]


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything that the coordinator needs to write one checkpoint.

    Attributes:
        destination: where it goes, absolute.
        config: the portable configuration.
        optimizer: hyper-parameters, or None to write no optimizer files.
        merged: the tensors, in string order of their keys.
        durable: sync files and directories to disk.
        strict_duplicates: compare what several ranks export under one key.
        new_parents: directories above the destination that were made for this save, outermost first.
    """

    destination: Path
    config: dict[str, Any]
    optimizer: Hyperparameters | None
    merged: Sequence[MergedKey]
    durable: bool
    strict_duplicates: bool
    new_parents: Sequence[Path] = ()

    def write(self, fetch: Fetch) -> str:
        """Write the checkpoint beside the destination, rename it into place, and return its digest.

        Every file is written once, front to back, and digested on the way. Memory: twice 64 MiB, or twice the
        largest tensor where that is larger.

        Raises:
            SaveError: something else is at the destination, or ranks disagree about a key.
            OSError: the disk refused; nothing is left behind.
        """
        temporary = self.destination.with_name(f".{self.destination.name}.tmp-{secrets.token_hex(8)}")
        try:
            os.mkdir(temporary)
            digest = self._write_files(temporary, fetch)
            return self._put_in_place(temporary, digest)
        finally:
            remove_tree(temporary)

    def _write_files(self, root: Path, fetch: Fetch) -> str:
        files = {ADAPTER_FILE: self._write_tensors(root / ADAPTER_FILE, "lora", self.merged, fetch)}
        parameters: dict[str, list[str]] = {}
        if self.optimizer is not None:
            os.mkdir(root / OPTIMIZER_DIRECTORY)
            for number, items in enumerate(blocks_of(self.merged).values()):
                names = [optimizer_file(component, number) for component in COMPONENTS]
                for component, name in zip(COMPONENTS, names, strict=True):
                    files[name] = self._write_tensors(root / name, component, items, fetch)
                parameters.update((item.key, names) for item in items)
            self._sync_directory(root / OPTIMIZER_DIRECTORY)
        files[CONFIG_FILE] = self._write_bytes(root / CONFIG_FILE, config_bytes(self.config))
        steps = {item.key: item.step for item in self.merged if item.step is not None}
        content, digest = manifest_bytes(str(self.config[MODEL_KEY]), self.optimizer, parameters, steps, files)
        self._write_bytes(root / MANIFEST_FILE, content)
        self._sync_directory(root)
        return digest

    def _write_tensors(self, path: Path, component: str, items: Sequence[MergedKey], fetch: Fetch) -> str:
        is_adapter = component == "lora"
        specs = [item.spec(item.dtype if is_adapter else STATE_DTYPE) for item in items]
        with TensorFileWriter(path, specs, ascii_header=is_adapter, durable=self.durable) as writer:
            for window in _windows(items):
                for data in self._merged_window(component, window, fetch):
                    writer.append(data)
            return writer.finish()

    def _merged_window(self, component: str, items: Sequence[MergedKey], fetch: Fetch) -> Iterator[memoryview]:
        wanted = [part for item in items for part in (*item.parts, *self._compared(item))]
        by_rank: dict[int, list[str]] = {}
        for part in wanted:
            by_rank.setdefault(part.rank, []).append(part.entry.key)
        arrived = {rank: iter(fetch(rank, component, keys)) for rank, keys in sorted(by_rank.items())}
        for item in items:
            datas = [next(arrived[part.rank]) for part in item.parts]
            for part in self._compared(item):
                _expect_same(component, item, part, datas, next(arrived[part.rank]))
            yield datas[0] if len(datas) == 1 else _joined(component, item, datas)

    def _compared(self, item: MergedKey) -> tuple[Part, ...]:
        return item.duplicates if self.strict_duplicates else ()

    def _write_bytes(self, path: Path, content: bytes) -> str:
        digest = new_digest()
        digest.update(content)
        with naming(path), create_file(path) as file:
            file.write(content)
            if self.durable:
                sync_file(file)
        return digest.hexdigest()

    def _put_in_place(self, temporary: Path, digest: str) -> str:
        try:
            rename_new(temporary, self.destination)
        except FileExistsError:
            _expect_same_checkpoint(self.destination, digest)
            if self.durable:
                # Whoever wrote it may not have synced it, or died before it did.
                sync_tree(self.destination)
                sync_directory(self.destination.parent)
            return digest
        try:
            self._sync_directory(self.destination.parent)
            for parent in reversed(self.new_parents):
                self._sync_directory(parent.parent)
        except OSError:
            # Not known to be on disk: a call that raises leaves no checkpoint.
            os.rename(self.destination, temporary)
            raise
        return digest

    def _sync_directory(self, path: Path) -> None:
        if self.durable:
            sync_directory(path)


def expect_free(destination: Path) -> None:
    """Refuse a destination where something stands that cannot be the same checkpoint.

    Raises:
        SaveError: a file, a link, a mount point or a directory without a checkpoint; says which.
    """
    if not os.path.lexists(destination):
        return
    what = _obstacle(destination)
    if what is not None:
        raise SaveError(f"{destination}: {what} is in the way; remove it or choose another destination")


def _obstacle(destination: Path) -> str | None:
    if destination.is_symlink():
        return "a symbolic link"
    if not destination.is_dir():
        return "a file"
    if os.path.ismount(destination):
        return "another file system's mount point (a checkpoint is renamed into place, within one file system)"
    if not any(destination.iterdir()):
        return "an empty directory"
    if not os.path.lexists(destination / MANIFEST_FILE):
        return f"a directory without {MANIFEST_FILE}"
    return None


def _expect_same_checkpoint(destination: Path, digest: str) -> None:
    expect_free(destination)
    try:
        found = verify_checkpoint(destination)
    except CheckpointError as error:
        raise SaveError(f"{destination}: a damaged checkpoint is in the way and was left as it is: {error}") from None
    if found != digest:
        raise SaveError(
            f"{destination}: a checkpoint with digest {found} is in the way, this save has {digest}; it was left as "
            "it is: choose another destination"
        )


def _windows(items: Iterable[MergedKey]) -> Iterator[list[MergedKey]]:
    window: list[MergedKey] = []
    size = 0
    for item in items:
        item_bytes = item.spec(STATE_DTYPE).bytes
        if window and size + item_bytes > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(item)
        size += item_bytes
    if window:
        yield window


def _joined(component: str, item: MergedKey, datas: Sequence[memoryview]) -> memoryview:
    dtype = item.dtype if component == "lora" else STATE_DTYPE
    tensors = [_tensor(data, dtype, part.entry.shape) for data, part in zip(datas, item.parts, strict=True)]
    return tensor_bytes(join_parts(item, tensors))


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    # The bytes of a received window need not be aligned for the dtype.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _expect_same(
    component: str, item: MergedKey, duplicate: Part, datas: Sequence[memoryview], data: memoryview
) -> None:
    twin = next(index for index, part in enumerate(item.parts) if part.entry.shard == duplicate.entry.shard)
    if datas[twin] != data or item.parts[twin].entry.step != duplicate.entry.step:
        what = "value" if component == "lora" else component
        raise SaveError(
            f"{item.key}: ranks {item.parts[twin].rank} and {duplicate.rank} export it with different {what}s; "
            "expected equal ones under strict_duplicates (without it the lowest rank's is taken)"
        )
