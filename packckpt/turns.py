"""A lock that is had in the order in which it was asked for, which `threading.Lock` does not promise."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A first-come, first-served lock; use it as a context manager."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()

    def __enter__(self) -> None:
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            try:
                self._condition.wait_for(lambda: self._waiting[0] is ticket)
            except BaseException:
                self._leave(ticket)
                raise

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._leave(self._waiting[0])

    def _leave(self, ticket: object) -> None:
        self._waiting.remove(ticket)
        self._condition.notify_all()
