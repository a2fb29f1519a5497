"""The few file-system operations whose details decide whether a save survives: create, sync, rename."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def create_file(path: str | os.PathLike[str], buffering: int = -1) -> IO[bytes]:
    """Open a new file for writing, with the mode that the umask leaves; an existing one is an error."""
    return open(path, "xb", buffering=buffering)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put a file's name into an error of the disk, which does not know it when writing or syncing fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def sync_file(file: IO[bytes]) -> None:
    """Flush a file and wait until the disk has its data."""
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: str | os.PathLike[str]) -> None:
    """Wait until the disk has the data of a file that is closed."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Wait until the disk has the entries of a directory."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str | os.PathLike[str], flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Wait until the disk has a directory, and every file and directory in it."""
    for root, _, files in os.walk(path, topdown=False):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                sync_file(file)
        sync_directory(root)


def rename_new(source: Path, destination: Path) -> None:
    """Rename a directory to a name that nothing has; never replaces anything, not even an empty directory.

    Plain `rename` replaces an empty directory silently, so Linux's `RENAME_NOREPLACE` is used where the file
    system knows it; elsewhere a look before the rename has to do.

    Raises:
        FileExistsError: the destination exists.
    """
    if _rename_noreplace(source, destination):
        return
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    os.rename(source, destination)


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it; what is gone already is fine."""
    shutil.rmtree(path, ignore_errors=True)


def _rename_noreplace(source: Path, destination: Path) -> bool:
    """Return whether the rename was done; False where the system or file system lacks the flag."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    ctypes.set_errno(0)
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), _RENAME_NOREPLACE)
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(destination))
