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
from packckpt.merge import Composition, Merged, join_parts
from packckpt.optimizer import COMPONENTS, Hyperparameters
from packckpt.strands import Strands
from packckpt.tensorfile import Header, TensorFileWriter, header_of, new_digest, tensor_bytes
from packckpt.verify import verify_checkpoint
from packckpt.windows import WEIGHTS, stored_dtype

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
class AlikeFiles:
    """Tensor files of a checkpoint that hold the same keys: the weights alone, or the components of a block.

    Attributes:
        components: by relative path, what each file holds of the keys.
        keys: in string order.
    """

    components: Mapping[str, str]
    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything that the coordinator needs to write one checkpoint.

    Attributes:
        destination: where it goes, absolute.
        config: the portable configuration.
        optimizer: hyper-parameters, or None to write no optimizer files.
        merged: the tensors.
        durable: sync files and directories to disk.
        strict_duplicates: compare what several ranks export under one key.
        new_parents: directories above the destination that were made for this save, outermost first.
        whole_files: by relative path, files of snapshots that are moved instead of merged; their owners have
            synced them where durable.
    """

    destination: Path
    config: dict[str, Any]
    optimizer: Hyperparameters | None
    merged: Merged
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
        if self._has_state:
            os.mkdir(root / OPTIMIZER_DIRECTORY)
        files: dict[str, str] = {}
        missing: list[AlikeFiles] = []
        for alike in tensor_files(self.merged, self._has_state):
            files.update(self._take(root, alike.components))
            rest = {name: component for name, component in alike.components.items() if name not in files}
            if rest:
                missing.append(AlikeFiles(rest, alike.keys))
        files.update(self._merge_files(root, missing, fetch))
        if self._has_state:
            self._sync_directory(root / OPTIMIZER_DIRECTORY)
        files[CONFIG_FILE] = self._write_bytes(root / CONFIG_FILE, config_bytes(self.config))
        steps = {key: made_of.step for key, made_of in self.merged.compositions.items() if made_of.step is not None}
        content, digest = manifest_bytes(str(self.config[MODEL_KEY]), self.optimizer, self._parameters(), steps, files)
        self._write_bytes(root / MANIFEST_FILE, content)
        self._sync_directory(root)
        return digest

    @property
    def _has_state(self) -> bool:
        return self.optimizer is not None

    def _parameters(self) -> dict[str, tuple[str, ...]]:
        if not self._has_state:
            return {}
        parameters: dict[str, tuple[str, ...]] = {}
        for number, keys in enumerate(self.merged.blocks.values()):
            names = tuple(optimizer_file(component, number) for component in COMPONENTS)
            parameters.update(dict.fromkeys(keys, names))
        return parameters

    def _take(self, root: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Move whole files of snapshots into the checkpoint; yield path and digest of what need not be merged."""
        for name in names:
            whole = self.whole_files.get(name)
            if whole is None:
                continue
            try:
                os.rename(whole.path, root / name)
            except (FileNotFoundError, NotADirectoryError):
                continue  # on another machine's disk: its rank sends the bytes
            yield name, whole.digest

    def _merge_files(self, root: Path, missing: Iterable[AlikeFiles], fetch: Fetch) -> dict[str, str]:
        """Write files from what the ranks hold: fetched in order, written and digested on several threads."""
        digests: dict[str, str] = {}
        writers: list[TensorFileWriter] = []
        strands = Strands(most_bytes=2 * WINDOW_BYTES)
        try:
            for alike in missing:
                header = self._header_of(alike)
                for name, component in alike.components.items():
                    writer = TensorFileWriter(root / name, header, durable=self.durable)
                    writers.append(writer)
                    for window in self._windows(component, alike.keys):
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

    def _header_of(self, alike: AlikeFiles) -> Header:
        component = next(iter(alike.components.values()))  # the components of a block have one header
        tensors = ((key, self.merged.compositions[key].spec(component)) for key in alike.keys)
        return header_of(tensors, ascii_header=component == WEIGHTS)

    def _windows(self, component: str, keys: Iterable[str]) -> Iterator[list[str]]:
        window: list[str] = []
        size = 0
        for key in keys:
            key_bytes = self.merged.compositions[key].spec(component).bytes
            if window and size + key_bytes > WINDOW_BYTES:
                yield window
                window, size = [], 0
            window.append(key)
            size += key_bytes
        if window:
            yield window

    def _merged_window(self, component: str, keys: Sequence[str], fetch: Fetch) -> Iterator[memoryview]:
        compositions = self.merged.compositions
        keys_of = _keys_by_rank((part.rank, key) for key in keys for part in compositions[key].parts)
        arrived = {rank: iter(fetch(rank, component, wanted)) for rank, wanted in keys_of.items()}
        datas_of = {key: [next(arrived[part.rank]) for part in compositions[key].parts] for key in keys}
        if self.strict_duplicates:
            self._expect_equal_duplicates(component, keys, datas_of, fetch)
        for key in keys:
            datas = datas_of.pop(key)
            yield datas[0] if len(datas) == 1 else _joined(component, compositions[key], datas)

    def _expect_equal_duplicates(
        self, component: str, keys: Sequence[str], datas_of: Mapping[str, Sequence[memoryview]], fetch: Fetch
    ) -> None:
        """Compare what is not taken with what is, one rank after another: however many there are, one is in memory."""
        compositions = self.merged.compositions
        wanted = _keys_by_rank((part.rank, key) for key in keys for part in compositions[key].duplicates)
        for rank, of_rank in wanted.items():
            for key, data in zip(of_rank, fetch(rank, component, of_rank), strict=True):
                _expect_same(key, component, compositions[key], rank, datas_of[key], data)

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


def tensor_files(merged: Merged, has_state: bool) -> Iterator[AlikeFiles]:
    """Yield the tensor files of a checkpoint: the weights, then the components of each block."""
    yield AlikeFiles({ADAPTER_FILE: WEIGHTS}, list(merged.compositions))
    for number, keys in enumerate(merged.blocks.values()):
        if has_state:
            yield AlikeFiles({optimizer_file(component, number): component for component in COMPONENTS}, keys)


def owners_of_files(merged: Merged, has_state: bool) -> dict[str, int]:
    """Return the files that one rank alone fills, by relative path, and that rank."""
    owners: dict[str, int] = {}
    for alike in tensor_files(merged, has_state):
        first, *others = {made_of.only_rank for made_of in {merged.compositions[key] for key in alike.keys}}
        if first is not None and not others:
            owners.update(dict.fromkeys(alike.components, first))
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


def _keys_by_rank(wanted: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    by_rank: dict[int, list[str]] = {}
    for rank, key in wanted:
        by_rank.setdefault(rank, []).append(key)
    return dict(sorted(by_rank.items()))


def _finish(writer: TensorFileWriter, name: str, digests: dict[str, str]) -> None:
    digests[name] = writer.finish()


def _joined(component: str, composition: Composition, datas: Sequence[memoryview]) -> memoryview:
    dtype = stored_dtype(component, composition.dtype)
    shapes = [part.description.shape for part in composition.parts]
    tensors = [_tensor(data, dtype, shape) for data, shape in zip(datas, shapes, strict=True)]
    return tensor_bytes(join_parts(composition, tensors))


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    # The bytes of a received window need not be aligned for the dtype.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _expect_same(
    key: str, component: str, composition: Composition, rank: int, datas: Sequence[memoryview], data: memoryview
) -> None:
    of_duplicate = composition.part_of(rank).description
    twin = next(i for i, part in enumerate(composition.parts) if part.description.shard == of_duplicate.shard)
    taken = composition.parts[twin]
    if datas[twin] != data or taken.description.step != of_duplicate.step:
        what = "value" if component == WEIGHTS else component
        raise SaveError(
            f"{key}: ranks {taken.rank} and {rank} export it with different {what}s; "
            "expected equal ones under strict_duplicates (without it the lowest rank's is taken)"
        )
