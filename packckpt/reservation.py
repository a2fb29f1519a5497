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
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from packckpt.disk import naming, remove_tree
from packckpt.errors import SaveError

_OWNER_FILE = "owner.json"
# What this process has reserved, for its forked children.
_held: WeakSet[Reservation] = WeakSet()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reservation:
    """A destination that is reserved for this process.

    Attributes:
        destination: what is reserved.
        created_parents: directories above the destination that had to be made, outermost first.
    """

    destination: Path
    created_parents: tuple[Path, ...]
    _descriptor: int

    def forget(self) -> None:
        """Let the lock go and leave the directory to whoever holds it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self, *, keep_parents: bool) -> None:
        """Remove the reservation; remove the parents that it made unless they are to stay.

        What ranks that are gone left of the save goes with it.
        """
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        remove_leftovers(self.destination)
        # Removed before it is unlocked: nobody may find it unlocked and take over what is going away.
        remove_tree(reservation_of(self.destination))
        os.close(descriptor)
        if not keep_parents:
            _remove_empty(self.created_parents)


def reserve(destination: Path) -> Reservation:
    """Reserve a destination; take over what a dead process of this machine left there.

    Raises:
        SaveError: another save to that destination is under way, or may be; says whose.
        OSError: the directory cannot be made.
    """
    created: list[Path] = []
    directory = reservation_of(destination)
    try:
        _make_parents(destination.parent, created)
        try:
            directory.mkdir()
        except FileExistsError:
            _expect_of_this_machine(destination, directory)
            made = False
        else:
            made = True
        reservation = _lock(destination, directory, tuple(created), made)
    except BaseException:
        _remove_empty(created)
        raise
    try:
        # Whoever left something is gone, or has ended its save: the reservation is ours.
        remove_leftovers(destination)
    except BaseException:
        reservation.release(keep_parents=False)
        raise
    return reservation


def reservation_of(destination: Path) -> Path:
    """Return the reservation's path for a destination."""
    return destination.with_name(f".{destination.name}.reserved")


def remove_leftovers(destination: Path) -> None:
    """Remove snapshots and temporary directories of saves to this destination; never raises an `OSError`."""
    # Whole names: nothing else that begins alike is ours to remove.
    ours = re.compile(re.escape(f".{destination.name}.") + r"(snapshot-r\d+|tmp)-[0-9a-f]{16}")
    with suppress(OSError), os.scandir(destination.parent) as entries:
        for leftover in [Path(entry.path) for entry in entries if ours.fullmatch(entry.name)]:
            remove_tree(leftover)


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
        with naming(directory / _OWNER_FILE):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _expect_of_this_machine(destination: Path, directory: Path) -> None:
    owner = _owner(directory)
    # Without an owner's note its maker died or is about to write it; the lock tells which.
    if owner.get("boot", _boot_id()) != _boot_id():
        raise SaveError(
            f"{destination}: reserved by {_whose(owner)}, another machine or an earlier start of this one. Wait "
            f"for that save; where its process is gone for good, remove {directory}"
        )


def _lock(destination: Path, directory: Path, created: tuple[Path, ...], made: bool) -> Reservation:
    try:
        descriptor = _claim(directory)
    except BlockingIOError:
        raise SaveError(
            f"{destination}: reserved by {_whose(_owner(directory))}, which is alive: another save to it is under "
            "way. Finalize or abort that one first"
        ) from None
    except FileNotFoundError:
        raise SaveError(f"{destination}: its reservation went away just now; try again") from None
    except BaseException:
        if made:
            remove_tree(directory)
        raise
    reservation = Reservation(destination, created, descriptor)
    _held.add(reservation)
    return reservation


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


def _make_parents(parent: Path, created: list[Path]) -> None:
    """Make the directory and those above it; add what was made to `created`, outermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for directory in reversed(missing):
        try:
            directory.mkdir()
        except FileExistsError:
            continue  # another rank or save was quicker
        created.append(directory)


def _remove_empty(directories: Sequence[Path]) -> None:
    for directory in reversed(directories):
        try:
            directory.rmdir()
        except OSError:
            return  # somebody else put something there


def _let_go_in_child() -> None:
    """Close what a fork inherited: a child that outlives its parent would keep the parent's locks."""
    for reservation in list(_held):
        reservation.forget()


os.register_at_fork(after_in_child=_let_go_in_child)
