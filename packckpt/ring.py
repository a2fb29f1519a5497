"""Host memory that a staged save goes through: allocated once, kept, and given out in turn."""

from __future__ import annotations

import threading
from collections import deque

import torch

_ALIGNMENT_BYTES = 64


class Slot:
    """A part of the ring that one window has for itself until it lets it go."""

    def __init__(self, ring: Ring, memory: torch.Tensor, start: int, stop: int) -> None:
        self._ring = ring
        self.memory = memory
        self.start = start
        self.stop = stop
        self.released = False

    def release(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._ring.release(self)


def _rounded(count_bytes: int) -> int:
    return -(-count_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Ring:
    """A fixed piece of host memory, handed out in order around and around.

    Args:
        size_bytes: of the whole ring; no slot can be larger than half of it. A power of two wastes nothing
            where it is pinned (torch rounds pinned blocks up to one and keeps them).
        pinned: page-lock it, for copies from an accelerator that do not block.

    Host memory: `size_bytes`, from the first slot on until the ring is dropped.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            self.memory.zero_()  # touched here, as pinned memory is: windows then find no page missing
        self._changed = threading.Condition()
        self._live: deque[Slot] = deque()
        self._closed = False

    def acquire(self, count_bytes: int) -> Slot:
        """Wait until that much is free in one piece, and take it.

        A slot is free again when it was released and so was every slot that was handed out before it.

        Raises:
            InterruptedError: the ring was closed.
        """
        if count_bytes > len(self.memory) // 2:
            raise ValueError(f"a slot of {count_bytes} bytes in a ring of {len(self.memory)}; at most half of it")
        if not count_bytes:
            # It has no place: one at the seam of a full ring would look like a free ring.
            return Slot(self, self.memory[:0], 0, 0)
        rounded = _rounded(count_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._place(rounded) is not None)
            start = self._place(rounded)
            if self._closed or start is None:
                raise InterruptedError("the ring was closed")
            slot = Slot(self, self.memory[start : start + count_bytes], start, start + rounded)
            self._live.append(slot)
            return slot

    def close(self) -> None:
        """Hand nothing out any more, also to those who wait; slots that are out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def release(self, slot: Slot) -> None:
        """Mark a slot as free."""
        with self._changed:
            slot.released = True
            while self._live and self._live[0].released:
                self._live.popleft()
            self._changed.notify_all()

    def _place(self, count_bytes: int) -> int | None:
        size = len(self.memory)
        if not self._live:
            return 0
        head, tail = self._live[0].start, self._live[-1].stop
        wrapped = self._live[-1].start < head
        if wrapped:
            return tail if head - tail >= count_bytes else None
        if size - tail >= count_bytes:
            return tail
        return 0 if head >= count_bytes else None
