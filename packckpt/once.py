"""Work that several threads may ask for, and that one of them does."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Once:
    """Call it to have the work done: whoever comes first does it, the others wait for it.

    Every caller gets the error that it raised. It holds nothing of the work once that is done.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._turn = threading.Lock()

    def __call__(self) -> None:
        """Do the work, or wait until it is done; raise what it raised."""
        with self._turn:
            if self._error is not None:
                raise self._error
            if self._work is None:
                return
            try:
                self._work()
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._work = None
