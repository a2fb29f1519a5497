"""What the files of a checkpoint hold, once they were checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packckpt.errors import CheckpointError
from packckpt.manifest import ADAPTER_FILE, Manifest
from packckpt.optimizer import COMPONENTS
from packckpt.tensorreader import Entry, TensorFileReader
from packckpt.windows import WEIGHTS


@dataclass(frozen=True)
class Contents:
    """The files of a checkpoint, open.

    Attributes:
        root: its directory.
        manifest, config: what its JSON files say.
        files: its tensor files, by relative path.
    """

    root: Path
    manifest: Manifest
    config: dict[str, Any]
    files: dict[str, TensorFileReader]

    @cached_property
    def exported(self) -> dict[str, Entry]:
        """Dtype, shape and place of every exported value, by key."""
        return self.files[ADAPTER_FILE].entries

    def entry(self, key: str) -> Entry:
        """Return dtype, shape and place of an exported value.

        Raises:
            CheckpointError: no such key.
        """
        try:
            return self.exported[key]
        except KeyError:
            raise CheckpointError(f"{self.root}: has no key {key}; it has {len(self.exported)} others") from None

    def step(self, key: str) -> int:
        """Return the step count of a key.

        Raises:
            CheckpointError: no such key, or no optimizer was saved.
        """
        self._expect_optimizer(key)
        return int(self.manifest.steps[key])

    def file_of(self, component: str, key: str) -> str:
        """Return the relative path of the file that holds one component of a key; errors as for `step`."""
        if component == WEIGHTS:
            self.entry(key)
            return ADAPTER_FILE
        self._expect_optimizer(key)
        return self.manifest.parameters[key][COMPONENTS.index(component)]

    def _expect_optimizer(self, key: str) -> None:
        self.entry(key)
        if self.manifest.optimizer is None:
            raise CheckpointError(f"{self.root}: was saved without an optimizer; there is no state of {key}")
