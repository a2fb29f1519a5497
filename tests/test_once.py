"""Work for whoever comes first: done by one thread, waited for by the others, an error for all of them."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from packckpt.once import Once


def test_one_thread_does_it_and_the_others_wait() -> None:
    begun, go = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        assert go.wait(20)
        done.append("work")

    once = Once(work)

    def caller() -> list[str]:
        once()
        return list(done)

    with ThreadPoolExecutor(4) as threads:
        callers = [threads.submit(caller) for _ in range(4)]
        assert begun.wait(20)
        assert not any(each.done() for each in callers), "nobody goes on before the work is done"
        go.set()
        assert [each.result(20) for each in callers] == [["work"]] * 4
    once()
    assert done == ["work"]


def test_every_caller_gets_the_error() -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise OSError("gone")

    once = Once(fail)
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            once()
    assert tries == [1]


def test_nothing_of_the_work_is_held_when_it_is_done() -> None:
    class Held:
        def __call__(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    once = Once(held)
    del held
    assert gone() is not None
    once()
    gc.collect()
    assert gone() is None
