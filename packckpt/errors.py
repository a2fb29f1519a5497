"""The one family of errors that packckpt raises on purpose, and its warnings.

A message names the key or file, what was found, what was expected and what to do about it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence


class PackckptError(Exception):
    """Base of every error that packckpt raises on purpose."""


class ExportError(PackckptError):
    """An export, a list of exports or a configuration that cannot be saved or restored as it is."""


class OptimizerError(PackckptError):
    """Optimizer state that the checkpoint format has no place for, or that is not where it should be."""


class SaveError(PackckptError):
    """A save that could not be prepared, finalized or aborted; nothing was committed."""


class RankError(SaveError):
    """Another rank failed, disagreed or went away.

    Attributes:
        ranks: the ranks at fault, ascending.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class CheckpointError(PackckptError):
    """A checkpoint on disk that is not what its manifest says, or not what the caller expects.

    Attributes:
        problems: every fault that was found, one line each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


def warn_caller(message: str) -> None:
    """Warn, and name the line outside of packckpt that led here, however many calls it is away."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
