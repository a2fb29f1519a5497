"""Say on stderr what is measured, and how long it may still take."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Progress:
    """Case k of n, what it is, how long it may still take: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._done = 0
        self._bar = _bar(total, self._stream)

    def start(self, title: str) -> None:
        """Name what is measured next."""
        if self._bar is not None:
            self._bar.set_description_str(title)
            return
        self.say(f"[{self._done + 1}/{self._total}] {title}{self._remaining()}")

    def finish(self) -> None:
        """Count what was measured."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)

    def say(self, line: str) -> None:
        """Print a line without tearing the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar."""
        if self._bar is not None:
            self._bar.close()

    def _remaining(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f"  (about {duration(seconds)} left)"


def duration(seconds: float) -> str:
    """Return a length of time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _bar(total: int, stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, file=stream, unit="task", dynamic_ncols=True)
