"""Creating, syncing and renaming: what is called, in which order, and with what modes."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from packckpt import CheckpointSaver, SaveError, disk, verify_checkpoint
from tests.sharded import CONFIG, Site, build, names, tree

SITES = [
    Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)),
    Site("head.w", 3, (2, 2)),
]


def _save(destination: Path, **options: Any) -> str:
    exports, state, _ = build(SITES)
    return CheckpointSaver(**options).save(destination, exports, state, CONFIG)


# -- syncing -----------------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every fsync (by the path that the descriptor has at that moment) and the rename, in order."""
    found: list[tuple[str, str]] = []
    fsync, rename = os.fsync, disk._rename_noreplace

    def record_fsync(descriptor: int) -> None:
        found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(source: Path, destination: Path) -> bool:
        found.append(("rename", str(destination)))
        return rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(disk, "_rename_noreplace", record_rename)
    return found


def test_everything_is_synced_around_the_rename(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    destination = tmp_path / "step-1"
    _save(destination, durable=True)
    renamed = events.index(("rename", str(destination)))
    temporaries = {name.split(os.sep)[len(tmp_path.parts)] for kind, name in events[:renamed] if kind == "sync"}
    assert len(temporaries) == 1
    temporary = str(tmp_path / temporaries.pop())
    assert re.fullmatch(r"\.step-1\.tmp-[0-9a-f]{16}", os.path.basename(temporary))
    synced = [os.path.relpath(name, temporary) for _, name in events[:renamed]]
    assert set(synced) == {*tree(destination), "optimizer", "."}
    # A directory after all that it holds, the whole last.
    assert synced[-1] == "."
    assert synced.index("optimizer") > max(synced.index(name) for name in tree(destination) if "optimizer/" in name)
    assert synced.index("checkpoint.json") == len(synced) - 2
    assert events[renamed + 1 :] == [("sync", str(tmp_path))]


def test_parents_that_were_made_are_synced_too(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    """A directory is on disk when its parent's entries are."""
    destination = tmp_path / "runs" / "today" / "step-1"
    _save(destination, durable=True)
    renamed = events.index(("rename", str(destination)))
    parents = [tmp_path / "runs" / "today", tmp_path / "runs", tmp_path]
    assert events[renamed + 1 :] == [("sync", str(parent)) for parent in parents]
    events.clear()
    _save(tmp_path / "runs" / "today" / "step-2", durable=True)
    assert events[-1] == ("sync", str(parents[0]))
    assert events[-2][0] == "rename"


def test_nothing_is_synced_where_it_need_not_be(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    _save(tmp_path / "step-1", durable=False)
    assert events == [("rename", str(tmp_path / "step-1"))]


def test_what_is_there_already_is_synced_too(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    destination = tmp_path / "step-1"
    _save(destination, durable=False)
    events.clear()
    _save(destination, durable=True)
    assert events[-1] == ("sync", str(tmp_path))
    renamed = events.index(("rename", str(destination)))
    synced = [os.path.relpath(name, destination) for _, name in events[renamed + 1 : -1]]
    assert sorted(synced) == sorted([*tree(destination), "optimizer", "."])
    assert synced[-1] == "."


def test_a_directory_that_cannot_be_synced_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known to be on disk is not left in place by a call that raises."""
    fsync = os.fsync

    def fail_on_parent(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_on_parent)
        with pytest.raises(OSError, match=re.escape(f"Input/output error: '{tmp_path}'")):
            _save(tmp_path / "step-1")
    assert names(tmp_path) == []
    assert verify_checkpoint(tmp_path / "step-1") if _save(tmp_path / "step-1") else False


@pytest.mark.parametrize("victim", ["adapter_model.safetensors", "adapter_config.json", "checkpoint.json", "optimizer"])
def test_a_file_that_cannot_be_synced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == victim:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path}/\.step-1\.tmp-\w+/{victim}'"):
            _save(tmp_path / "step-1")
    assert names(tmp_path) == []


# -- modes -------------------------------------------------------------------------------------------------


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    with _umask(mask):
        _save(tmp_path / "deep" / "step-1", durable=False)
    directories = {tmp_path / "deep", tmp_path / "deep" / "step-1", tmp_path / "deep" / "step-1" / "optimizer"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o777 & ~mask}
    files = [path for path in (tmp_path / "deep").rglob("*") if path not in directories]
    assert len(files) == 3 + 2 * 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


# -- renaming ----------------------------------------------------------------------------------------------


class _NoRenameat2:
    """A C library without `renameat2`, as on another system."""

    def __init__(self, *_: object, **__: object) -> None: ...


def _failing_with(code: int) -> type:
    class Library:
        def __init__(self, *_: object, **__: object) -> None: ...

        def renameat2(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    return Library


LIBRARIES = {
    "renameat2": None,
    "without": _NoRenameat2,
    "EINVAL": _failing_with(errno.EINVAL),
    "ENOSYS": _failing_with(errno.ENOSYS),
    "EPERM": _failing_with(errno.EPERM),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    made = LIBRARIES[request.param]
    if made is not None:
        monkeypatch.setattr(disk.ctypes, "CDLL", made)


@pytest.mark.usefixtures("library")
def test_rename_to_a_free_name(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("7")
    disk.rename_new(tmp_path / "from", tmp_path / "to")
    assert names(tmp_path) == ["to"]
    assert (tmp_path / "to" / "file").read_text() == "7"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("what", ["empty directory", "full directory", "file", "dangling link"])
def test_rename_replaces_nothing(tmp_path: Path, what: str) -> None:
    (tmp_path / "from").mkdir()
    target = tmp_path / "to"
    if what == "file":
        target.write_text("x")
    elif what == "dangling link":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
        if what == "full directory":
            (target / "x").write_text("x")
    before = (os.lstat(target).st_ino, tree(tmp_path))
    with pytest.raises(FileExistsError, match=re.escape(str(target))):
        disk.rename_new(tmp_path / "from", target)
    assert (os.lstat(target).st_ino, tree(tmp_path)) == before
    assert (tmp_path / "from").is_dir()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EACCES, errno.EROFS])
def test_an_error_of_rename_names_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk.ctypes, "CDLL", _failing_with(code))
        with pytest.raises(OSError, match=re.escape(f"{os.strerror(code)}: '{tmp_path / 'step-1'}'")):
            _save(tmp_path / "step-1", durable=False)
    assert names(tmp_path) == []


def test_an_empty_directory_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    exports, state, _ = build(SITES)
    saver = CheckpointSaver(durable=False)
    saver.prepare(tmp_path / "step-1", exports, state, CONFIG)
    (tmp_path / "step-1").mkdir()
    inode = (tmp_path / "step-1").stat().st_ino
    with pytest.raises(SaveError, match="an empty directory is in the way"):
        saver.finalize(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1").stat().st_ino == inode
    assert names(tmp_path / "step-1") == []


# -- creating and removing ---------------------------------------------------------------------------------


def test_an_existing_file_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError):
        disk.create_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_removing_what_is_gone_is_fine(tmp_path: Path) -> None:
    disk.remove_tree(tmp_path / "never")
    (tmp_path / "full" / "er").mkdir(parents=True)
    disk.remove_tree(tmp_path / "full")
    assert names(tmp_path) == []
