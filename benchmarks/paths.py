"""The paths that are compared: those of `CheckpointSaver`, and torch's own stager."""

from __future__ import annotations

from dataclasses import dataclass

from packckpt import PATHS

SAVER_PATHS = PATHS
# Captures only, and writes no checkpoint: torch's own stager, as it comes.
REFERENCE = "default-stager"


class PathError(ValueError):
    """A path that is not known; names those that are."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: the name that it is compared under, and what runs.

    Two names may stand for one implementation: A against A shows what the measurement itself adds.
    """

    name: str
    implementation: str

    def __post_init__(self) -> None:
        if self.implementation not in SAVER_PATHS:
            raise PathError(f"path is {self.implementation!r}; expected one of {', '.join(SAVER_PATHS)}")
        if not self.name or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise PathError(f"path name is {self.name!r}; expected letters, digits, '-', '_' and '.'")


def parse_arm(text: str) -> Arm:
    """Return the arm of `PATH` or `NAME=PATH`."""
    name, _, implementation = text.rpartition("=")
    return Arm(name or implementation, implementation)
