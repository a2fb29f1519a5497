"""The ring: slots never overlap while they are held, and come back in the order in which they went out."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packckpt.ring import Ring, Slot


def has_room(ring: Ring, count_bytes: int) -> bool:
    """Return whether `acquire` would not wait now."""
    return not count_bytes or ring._place(-(-count_bytes // 64) * 64) is not None


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


def test_a_ring_that_is_closed_wakes_who_waits_for_it() -> None:
    ring = Ring(256, pinned=False)
    slots = [ring.acquire(128), ring.acquire(128)]
    raised: list[str] = []

    def wait() -> None:
        try:
            ring.acquire(64)
        except InterruptedError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    ring.close()
    waiting.join(timeout=30)
    slots[0].release()

    assert raised == ["the ring was closed"]
    with pytest.raises(InterruptedError):
        ring.acquire(64)


def test_a_slot_is_at_most_half_of_the_ring() -> None:
    with pytest.raises(ValueError, match="a slot of 129 bytes in a ring of 256; at most half"):
        Ring(256, pinned=False).acquire(129)


def test_a_slot_of_nothing_holds_no_place_in_a_full_ring() -> None:
    """At the seam of a wrapped, full ring it would make the ring look free, and its bytes be given out twice."""
    ring = Ring(256, pinned=False)
    first, second = ring.acquire(128), ring.acquire(128)
    first.release()
    third = ring.acquire(128)  # in the first one's place: the ring is wrapped and full
    ring.acquire(0).release()
    assert not has_room(ring, 128)
    assert (third.start, second.start) == (0, 128)


ACTIONS = st.lists(st.one_of(st.just(0), st.just(64), st.integers(0, 128), st.integers(-9, -1)), max_size=80)


@given(actions=ACTIONS)
def test_held_slots_never_share_a_byte(actions: list[int]) -> None:
    """A positive action takes a slot of that size where there is room, a negative one lets go of one that is held."""
    ring = Ring(256, pinned=False)
    held: list[tuple[Slot, int]] = []
    for number, action in enumerate(actions):
        if action >= 0 and has_room(ring, action):
            slot = ring.acquire(action)
            slot.memory.fill_(number)
            held.append((slot, number))
        elif held:
            slot, mark = held.pop(action % len(held))
            assert bool((slot.memory == mark).all()), "somebody wrote into a slot that was held"
            slot.release()
    for slot, mark in held:
        assert bool((slot.memory == mark).all()), "somebody wrote into a slot that was held"
    for slot, _ in held:
        slot.release()
    assert has_room(ring, 128)
