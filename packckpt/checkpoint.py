"""Read a checkpoint back: verified, with lazy tensors."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from packckpt.contents import Contents
from packckpt.errors import CheckpointError, ExportError
from packckpt.manifest import ADAPTER_FILE
from packckpt.optimizer import COMPONENTS, Hyperparameters
from packckpt.tensorfile import TensorSpec
from packckpt.tensorreader import spec_of
from packckpt.verify import changed_problem, undigested_contents, verified_contents
from packckpt.windows import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packckpt.exports import Export


class KeyState(NamedTuple):
    """Optimizer state of one key: three float32 host tensors of the exported shape, and the step count."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int


class Checkpoint:
    """A verified checkpoint whose tensors are read when they are asked for.

    The files stay open, so that the checkpoint can be read even after it was removed; `close`, or use it as a
    context manager. Memory: the manifest, and the pages that were read, which the system takes back when it needs
    them.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._keys = tuple(sorted(contents.exported))
        self._closed = False

    @property
    def path(self) -> Path:
        """The directory that was loaded."""
        return self._contents.root

    @property
    def config(self) -> dict[str, Any]:
        """The adapter configuration as it was written."""
        return self._contents.config

    @property
    def keys(self) -> tuple[str, ...]:
        """The exported keys, in string order."""
        return self._keys

    @property
    def optimizer(self) -> Hyperparameters | None:
        """The hyper-parameters, or None where no optimizer was saved."""
        return self._contents.manifest.optimizer

    @property
    def digest(self) -> str:
        """The BLAKE2b-256 hex digest of the manifest."""
        return self._contents.manifest.digest

    def spec(self, key: str) -> TensorSpec:
        """Return dtype and shape of an exported value without reading it.

        Raises:
            CheckpointError: no such key.
        """
        return spec_of(self._contents.entry(key))

    def exported(self, key: str) -> torch.Tensor:
        """Return the exported value `(out, in)` on the host, in the dtype of the trained parameter."""
        return self.view(WEIGHTS, key).clone()

    def state(self, key: str) -> KeyState:
        """Return master, exp_avg and exp_avg_sq as float32 `(out, in)` on the host, and the step.

        Raises:
            CheckpointError: no such key, or no optimizer was saved.
        """
        master, exp_avg, exp_avg_sq = (self.component(key, name) for name in COMPONENTS)
        return KeyState(master, exp_avg, exp_avg_sq, self.step(key))

    def component(self, key: str, component: str) -> torch.Tensor:
        """Return one of "master", "exp_avg", "exp_avg_sq" of a key; see `state`."""
        return self.view(component, key).clone()

    def view(self, component: str, key: str) -> torch.Tensor:
        """Return a tensor as a view of its file, which must not be written to: nothing is copied.

        Args:
            component: "lora" for the exported value, or "master", "exp_avg", "exp_avg_sq".
            key: of the export.

        Raises:
            CheckpointError: no such key, no optimizer was saved, or the checkpoint was closed.
        """
        contents = self._open_contents()
        return contents.files[contents.file_of(component, key)].tensor(key)

    def step(self, key: str) -> int:
        """Return the step count of a key; errors as for `state`."""
        return self._contents.step(key)

    def restore(
        self,
        exports: Iterable[Export],
        optimizer: torch.optim.Optimizer | None,
        masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        subset: bool = False,
    ) -> None:
        """Put the checkpoint back into parameters, masters and moments; everything is checked before a byte is written.

        Arguments, memory and errors: see `packckpt.restore.restore`. The digests were checked when it was loaded, by
        a reading of their own; `restore_checkpoint` reads once.
        """
        from packckpt.restore import restore

        restore(self._open_contents(), exports, optimizer, masters, subset=subset)

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._closed = True
        self._contents.files.clear()

    def _open_contents(self) -> Contents:
        if self._closed:
            raise CheckpointError(f"{self.path}: is closed; load it again")
        return self._contents

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Verify a checkpoint (see `verify_checkpoint`) and open it for reading.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    return Checkpoint(verified_contents(path))


def restore_checkpoint(
    path: str | os.PathLike[str],
    exports: Iterable[Export],
    optimizer: torch.optim.Optimizer | None,
    masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
    *,
    subset: bool = False,
) -> Checkpoint:
    """Restore from a checkpoint that is read once: its digests are checked while it is put in place.

    Quicker than `load_checkpoint(path).restore(...)`, most of all where the files are not in the system's cache, and
    with one difference: a damaged file is noticed when its bytes have been placed. Everything else (manifest,
    headers, keys, shapes, dtypes) is checked before anything is written.

    Args:
        path: the checkpoint directory.
        exports, optimizer, masters, subset: as for `packckpt.restore.restore`.

    Returns:
        the checkpoint, verified: every file of it was read and its digest compared.

    Raises:
        ExportError, OptimizerError: as for `packckpt.restore.restore`; nothing was written.
        CheckpointError: what is wrong with which file. Where the message says so, parameters and optimizer hold
            parts of the damaged checkpoint: restore another one before they are used.
    """
    from packckpt.restore import restore

    contents = undigested_contents(path)
    try:
        restore(contents, exports, optimizer, masters, subset=subset, digested=True)
    except ExportError:
        # With a damaged header the checkpoint fits no trainer, and the trainer is not at fault.
        problem = changed_problem(contents.root / ADAPTER_FILE, contents.manifest.files[ADAPTER_FILE])
        if problem is not None:
            raise CheckpointError(problem) from None
        raise
    return Checkpoint(contents)
