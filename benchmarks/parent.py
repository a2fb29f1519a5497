"""A worker ends when the driver does: an orphan would disturb whatever is measured next."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent is gone; does nothing where it cannot."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)
