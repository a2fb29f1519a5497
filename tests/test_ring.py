"""The ring: slots never overlap while they are held, and come back in the order in which they went out."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packckpt.ring import Ring, Slot


def test_slots_follow_one_another_and_wrap() -> None:
    ring = Ring(256, pinned=False)
    first, second = ring.acquire(128), ring.acquire(64)
    assert (first.start, second.start) == (0, 128)
    first.release()
    third = ring.acquire(128)  # does not fit behind the second, so it takes the first one's place
    assert third.start == 0
    assert third.memory.data_ptr() == ring.memory.data_ptr()


def test_a_slot_waits_until_its_place_is_free() -> None:
    ring = Ring(256, pinned=False)
    held = [ring.acquire(128), ring.acquire(128)]
    got: list[Slot] = []
    thread = threading.Thread(target=lambda: got.append(ring.acquire(128)))
    thread.start()
    held[1].release()
    thread.join(0.2)
    assert not got, "the slot in the middle of the ring is free, but the one before it is not"
    held[0].release()
    thread.join(10)
    assert got[0].start == 0


def test_a_slot_is_at_most_half_of_the_ring() -> None:
    with pytest.raises(ValueError, match="a slot of 129 bytes in a ring of 256; at most half"):
        Ring(256, pinned=False).acquire(129)


@given(sizes=st.lists(st.integers(0, 100), max_size=60), release=st.lists(st.integers(0, 5), max_size=60))
def test_held_slots_never_share_a_byte(sizes: list[int], release: list[int]) -> None:
    ring = Ring(400, pinned=False)
    held: deque[tuple[Slot, int]] = deque()
    for number, size in enumerate(sizes):
        # As the writers do: any of the held ones may be done first.
        while held and (len(held) > 2 or number < len(release)):
            index = release[number] % len(held) if number < len(release) else 0
            slot, mark = held[index]
            assert bool((slot.memory == mark).all()), "somebody wrote into a slot that was held"
            del held[index]
            slot.release()
            if len(held) <= 1:
                break
        if sum(slot.stop - slot.start for slot, _ in held) > 200:
            while held:
                held.popleft()[0].release()
        slot = ring.acquire(size)
        slot.memory.fill_(number % 251)
        held.append((slot, number % 251))
    for slot, mark in held:
        assert bool((slot.memory == mark).all())
