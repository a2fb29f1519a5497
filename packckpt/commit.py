"""Merge the ranks' snapshots into one checkpoint, digest what is written, and rename it into place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from packckpt.strands import Strands
from packckpt.tensorfile import TensorFileWriter, new_digest, tensor_bytes
from packckpt.verify import verify_checkpoint
from packckpt.windows import WEIGHTS

# Fetched at once; two such windows may wait to be written, one is being fetched and one joined.
WINDOW_BYTES = 32 << 20
MEMORY_BYTES = 4 * WINDOW_BYTES

# (rank, component, keys) -> the bytes of each key, in order
Fetch = Callable[[int, str, Sequence[str]], list[memoryview]]


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file of a snapshot that stands as the checkpoint will have it, already digested."""

    path: Path
    digest: str


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
        whole_files: by relative path, files of snapshots that are moved instead of merged; their owners have
            synced them where durable.
    """

    destination: Path
    config: dict[str, Any]
    optimizer: Hyperparameters | None
    merged: Sequence[MergedKey]
    durable: bool
    strict_duplicates: bool
    new_parents: Sequence[Path] = ()
    whole_files: Mapping[str, WholeFile] = field(default_factory=dict)

    def write(self, fetch: Fetch) -> str:
        """Write the checkpoint beside the destination, rename it into place, and return its digest.

        Every file is written once, front to back, and digested on the way, several of them side by side.
        Memory: `MEMORY_BYTES`, or four times the largest tensor where that is more.

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
        layout = self._layout()
        if self.optimizer is not None:
            os.mkdir(root / OPTIMIZER_DIRECTORY)
        taken = {name: digest for name in layout if (digest := self._take(root, name)) is not None}
        merged = self._merge_files(root, {name: layout[name] for name in layout if name not in taken}, fetch)
        files = {**taken, **merged}
        if self.optimizer is not None:
            self._sync_directory(root / OPTIMIZER_DIRECTORY)
        files[CONFIG_FILE] = self._write_bytes(root / CONFIG_FILE, config_bytes(self.config))
        steps = {item.key: item.step for item in self.merged if item.step is not None}
        content, digest = manifest_bytes(str(self.config[MODEL_KEY]), self.optimizer, self._parameters(), steps, files)
        self._write_bytes(root / MANIFEST_FILE, content)
        self._sync_directory(root)
        return digest

    def _layout(self) -> dict[str, tuple[str, Sequence[MergedKey]]]:
        """Return the tensor files by relative path: their component and tensors."""
        return {name: (component, items) for name, component, items in tensor_files(self.merged, self._has_state)}

    @property
    def _has_state(self) -> bool:
        return self.optimizer is not None

    def _parameters(self) -> dict[str, list[str]]:
        if not self._has_state:
            return {}
        return {
            item.key: [optimizer_file(component, number) for component in COMPONENTS]
            for number, items in enumerate(blocks_of(self.merged).values())
            for item in items
        }

    def _take(self, root: Path, name: str) -> str | None:
        """Move a whole file of a snapshot into the checkpoint; None where it has to be merged after all."""
        whole = self.whole_files.get(name)
        if whole is None:
            return None
        try:
            os.rename(whole.path, root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None  # on another machine's disk: its rank sends the bytes
        return whole.digest

    def _merge_files(
        self, root: Path, layout: Mapping[str, tuple[str, Sequence[MergedKey]]], fetch: Fetch
    ) -> dict[str, str]:
        """Write files from what the ranks hold: fetched in order, written and digested on several threads."""
        digests: dict[str, str] = {}
        writers: list[TensorFileWriter] = []
        strands = Strands(most_bytes=2 * WINDOW_BYTES)
        try:
            for name, (component, items) in layout.items():
                writer = self._open_writer(root / name, component, items)
                writers.append(writer)
                for window in _windows(items):
                    parts = list(self._merged_window(component, window, fetch))
                    strands.submit(name, partial(writer.append, *parts), size_bytes=sum(map(len, parts)))
                strands.submit(name, partial(_finish, writer, name, digests))
            strands.finish()
        except BaseException:
            strands.cancel()
            for writer in writers:
                writer.discard()
            raise
        return digests

    def _open_writer(self, path: Path, component: str, items: Sequence[MergedKey]) -> TensorFileWriter:
        is_adapter = component == WEIGHTS
        specs = [item.spec(item.dtype if is_adapter else STATE_DTYPE) for item in items]
        return TensorFileWriter(path, specs, ascii_header=is_adapter, durable=self.durable)

    def _merged_window(self, component: str, items: Sequence[MergedKey], fetch: Fetch) -> Iterator[memoryview]:
        keys_of = _keys_by_rank((part.rank, item) for item in items for part in item.parts)
        arrived = {rank: iter(fetch(rank, component, keys)) for rank, keys in keys_of.items()}
        datas_of = {item.key: [next(arrived[part.rank]) for part in item.parts] for item in items}
        if self.strict_duplicates:
            _expect_equal_duplicates(component, items, datas_of, fetch)
        for item in items:
            datas = datas_of.pop(item.key)
            yield datas[0] if len(datas) == 1 else _joined(component, item, datas)

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


def tensor_files(merged: Sequence[MergedKey], has_state: bool) -> Iterator[tuple[str, str, Sequence[MergedKey]]]:
    """Yield the tensor files of a checkpoint: relative path, component, tensors in key order."""
    yield ADAPTER_FILE, WEIGHTS, merged
    for number, items in enumerate(blocks_of(merged).values()):
        for component in COMPONENTS if has_state else ():
            yield optimizer_file(component, number), component, items


def owners_of_files(merged: Sequence[MergedKey], has_state: bool) -> dict[str, int]:
    """Return the files that one rank alone fills, by relative path, and that rank."""
    owners: dict[str, int] = {}
    for name, _, items in tensor_files(merged, has_state):
        ranks = {part.rank for item in items for part in (*item.parts, *item.duplicates)}
        if len(ranks) == 1 and all(len(item.parts) == 1 for item in items):
            owners[name] = ranks.pop()
    return owners


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


def _keys_by_rank(wanted: Iterable[tuple[int, MergedKey]]) -> dict[int, list[str]]:
    by_rank: dict[int, list[str]] = {}
    for rank, item in wanted:
        by_rank.setdefault(rank, []).append(item.key)
    return dict(sorted(by_rank.items()))


def _expect_equal_duplicates(
    component: str, items: Sequence[MergedKey], datas_of: Mapping[str, Sequence[memoryview]], fetch: Fetch
) -> None:
    """Compare what is not taken with what is, one rank after another: however many there are, one is in memory."""
    by_key = {item.key: item for item in items}
    wanted = _keys_by_rank((part.rank, item) for item in items for part in item.duplicates)
    for rank, keys in wanted.items():
        for key, data in zip(keys, fetch(rank, component, keys), strict=True):
            item = by_key[key]
            part = next(part for part in item.duplicates if part.rank == rank)
            _expect_same(component, item, part, datas_of[key], data)


def _finish(writer: TensorFileWriter, name: str, digests: dict[str, str]) -> None:
    digests[name] = writer.finish()


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
    dtype = item.dtype if component == WEIGHTS else STATE_DTYPE
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
        what = "value" if component == WEIGHTS else component
        raise SaveError(
            f"{item.key}: ranks {item.parts[twin].rank} and {duplicate.rank} export it with different {what}s; "
            "expected equal ones under strict_duplicates (without it the lowest rank's is taken)"
        )
