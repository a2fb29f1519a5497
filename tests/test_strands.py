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


def test_a_thread_that_finds_every_strand_busy_does_the_first_part_of_a_job() -> None:
    strands = Strands(threads=2)
    begun, did_ahead = threading.Event(), threading.Event()
    threads: dict[str, str] = {}
    done: list[str] = []

    def first() -> None:
        threads["first"] = threading.current_thread().name
        begun.set()
        assert did_ahead.wait(20), "the other thread has nothing else to do"
        done.append("first")

    def ahead() -> None:
        threads["ahead"] = threading.current_thread().name
        done.append("ahead")
        did_ahead.set()

    strands.submit("a", first)
    assert begun.wait(20)
    strands.submit("a", lambda: done.append("second"), ahead=ahead)
    strands.finish()
    assert done == ["ahead", "first", "second"]
    assert threads["ahead"] != threads["first"]


def test_an_error_in_the_first_part_ends_all() -> None:
    strands = Strands(threads=2)
    begun, failed = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        begun.set()
        assert failed.wait(20)

    def ahead() -> None:
        failed.set()
        raise OSError("no memory")

    strands.submit("a", first)
    assert begun.wait(20)
    released: list[int] = []
    strands.submit("a", lambda: done.append("second"), partial(released.append, 1), ahead=ahead)
    with pytest.raises(OSError, match="no memory"):
        strands.finish()
    assert (done, released) == ([], [1])


def test_when_no_more_come_the_longest_strand_goes_first() -> None:
    strands = Strands(threads=1)
    begun, go = threading.Event(), threading.Event()
    done: list[tuple[str, int]] = []

    def hold() -> None:
        begun.set()
        assert go.wait(20)

    strands.submit("held", hold)
    assert begun.wait(20)
    for strand, number, size_bytes in (("a", 0, 10), ("b", 0, 10), ("b", 1, 10), ("c", 0, 5), ("b", 2, 2)):
        strands.submit(strand, partial(done.append, (strand, number)), size_bytes=size_bytes)
    finishing = threading.Thread(target=strands.finish)
    finishing.start()
    while not strands._closing:
        pass
    go.set()
    finishing.join()
    assert done == [("b", 0), ("b", 1), ("b", 2), ("a", 0), ("c", 0)]
