"""Memory that several threads share, counted and not owned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """Lets threads allocate no more than a bound together; one alone may have more.

    Args:
        most_bytes: the bound.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._taken_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count_bytes: int) -> Iterator[None]:
        """Wait until there is room for so many bytes, or nobody else has any; they are free again afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken_bytes or self._taken_bytes + count_bytes <= self._most_bytes)
            self._taken_bytes += count_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken_bytes -= count_bytes
                self._changed.notify_all()
