"""Jobs of one strand run in order; different strands run side by side; an error ends them all."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

import pytest

from packckpt.strands import Strands


def test_a_strand_keeps_its_order_and_the_others_do_not_wait_for_it() -> None:
    strands = Strands(threads=3)
    done: list[tuple[str, int]] = []
    both = threading.Barrier(2, timeout=10)

    def job(name: str, number: int) -> None:
        if number == 0:
            both.wait()  # passes only if the two strands run at the same time
        done.append((name, number))

    for number in range(20):
        for name in "ab":
            strands.submit(name, partial(job, name, number))
    strands.finish()
    for name in "ab":
        assert [number for who, number in done if who == name] == list(range(20))


def test_the_first_error_is_raised_and_every_job_is_released() -> None:
    strands = Strands(threads=2)
    released: list[int] = []

    def fail() -> None:
        raise OSError("the disk is full")

    strands.submit("a", fail, partial(released.append, 0))
    with suppress(OSError):
        for number in range(1, 2000):
            strands.submit("b", lambda: None, partial(released.append, number))
    with pytest.raises(OSError, match="the disk is full"):
        strands.finish()
    assert sorted(released) == list(range(len(released)))


def test_submit_waits_while_too_many_bytes_are_under_way() -> None:
    strands = Strands(threads=2, most_bytes=100)
    go = threading.Event()
    strands.submit("a", lambda: go.wait(10) and None, size_bytes=60)  # type: ignore[func-returns-value]
    submitted = threading.Event()

    def submit_more() -> None:
        strands.submit("b", lambda: None, size_bytes=60)
        submitted.set()

    thread = threading.Thread(target=submit_more)
    thread.start()
    assert not submitted.wait(0.2)
    go.set()
    assert submitted.wait(10)
    thread.join()
    strands.finish()


def test_one_job_larger_than_the_bound_still_runs() -> None:
    strands = Strands(threads=1, most_bytes=10)
    done: list[int] = []
    strands.submit("a", partial(done.append, 1), size_bytes=50)
    strands.finish()
    assert done == [1]


def test_cancel_drops_what_waits_and_ends_the_threads() -> None:
    before = threading.active_count()
    strands = Strands(threads=1)
    go, done = threading.Event(), []
    strands.submit("a", lambda: go.wait(10) and None)  # type: ignore[func-returns-value]
    released: list[int] = []
    strands.submit("a", lambda: done.append(1), partial(released.append, 1))
    go.set()
    strands.cancel()
    assert released == [1]
    assert threading.active_count() == before
    with pytest.raises(InterruptedError, match="given up"):
        strands.submit("a", lambda: None)
