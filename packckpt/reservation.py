"""The directory `.<name>.reserved` beside a destination: one save at a time may be under way to it.

The owner keeps a lock on a file in it. The kernel drops that lock when the owner dies, however it dies, so a
lock that can be had on the same running kernel means a dead owner, and the reservation is taken over. What
another machine left cannot be judged from here (some network file systems keep locks to one machine): it is
refused, and the message says whose it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from packckpt.disk import remove_tree
from packckpt.errors import SaveError

_OWNER_FILE = "owner.json"


@dataclass(slots=True)
class Reservation:
    """A destination that is reserved for this process.

    Attributes:
        directory: `.<name>.reserved`.
        created_parents: directories above the destination that had to be made, outermost first.
    """

    directory: Path
    created_parents: tuple[Path, ...]
    _descriptor: int

    def release(self, *, keep_parents: bool) -> None:
        """Remove the reservation; remove the parents that it made unless they are to stay."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        # Removed before it is unlocked: nobody may find it unlocked and take over what is going away.
        remove_tree(self.directory)
        os.close(descriptor)
        if keep_parents:
            return
        for parent in reversed(self.created_parents):
            try:
                parent.rmdir()
            except OSError:
                return  # somebody else put something there


def reserve(destination: Path) -> Reservation:
    """Reserve a destination; take over what a dead process of this machine left there.

    Raises:
        SaveError: another save to that destination is under way, or may be; says whose.
        OSError: the directory cannot be made.
    """
    created = _make_parents(destination.parent)
    directory = reservation_of(destination)
    try:
        try:
            directory.mkdir()
        except FileExistsError:
            return _take_over(destination, directory, created)
        return _lock(destination, directory, created)
    except BaseException:
        for parent in reversed(created):
            try:
                parent.rmdir()
            except OSError:
                break
        raise


def reservation_of(destination: Path) -> Path:
    """Return the reservation's path for a destination."""
    return destination.with_name(f".{destination.name}.reserved")


def leftovers_of(destination: Path) -> list[Path]:
    """Return snapshots and temporary directories of saves to this destination that exist."""
    prefixes = (f".{destination.name}.snapshot-r", f".{destination.name}.tmp-")
    with os.scandir(destination.parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.name.startswith(prefixes))


def _claim(directory: Path) -> int:
    """Lock the owner file and write who we are; return its descriptor, which holds the lock."""
    descriptor = os.open(directory / _OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # After the lock is ours the directory may already be gone with an owner who just finished.
        if not _same_file(descriptor, directory / _OWNER_FILE):
            raise BlockingIOError
        owner = {
            "boot": _boot_id(),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _take_over(destination: Path, directory: Path, created: tuple[Path, ...]) -> Reservation:
    owner = _owner(directory)
    # Without an owner's note its maker died, or is, between making the directory and writing the note.
    if owner.get("boot", _boot_id()) != _boot_id():
        raise SaveError(
            f"{destination}: reserved by {_whose(owner)}, another machine or an earlier start of this one. Wait "
            f"for that save; where its process is gone for good, remove {directory}"
        )
    reservation = _lock(destination, directory, created)
    for leftover in leftovers_of(destination):
        remove_tree(leftover)
    return reservation


def _lock(destination: Path, directory: Path, created: tuple[Path, ...]) -> Reservation:
    try:
        return Reservation(directory, created, _claim(directory))
    except BlockingIOError:
        raise SaveError(
            f"{destination}: reserved by {_whose(_owner(directory))}, which is alive: another save to it is under "
            "way. Finalize or abort that one first"
        ) from None
    except FileNotFoundError:
        raise SaveError(f"{destination}: its reservation went away just now; try again") from None


def _whose(owner: dict[str, object]) -> str:
    return (
        f"process {owner.get('process', 'unknown')} on {owner.get('host', 'an unknown machine')} "
        f"since {owner.get('since', 'an unknown time')}"
    )


def _owner(directory: Path) -> dict[str, object]:
    try:
        content = json.loads((directory / _OWNER_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _make_parents(parent: Path) -> tuple[Path, ...]:
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
    return tuple(reversed(missing))
