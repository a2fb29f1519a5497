"""Read a checkpoint back: verified, with lazy tensors."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from packckpt.errors import CheckpointError
from packckpt.manifest import ADAPTER_FILE
from packckpt.optimizer import COMPONENTS, Hyperparameters
from packckpt.tensorfile import TensorSpec
from packckpt.tensorreader import spec_of
from packckpt.verify import Contents, verified_contents
from packckpt.windows import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
        self._root = contents.root
        self._config = contents.config
        self._manifest = contents.manifest
        self._exported = contents.files[ADAPTER_FILE].entries
        self._files = dict(contents.files)

    @property
    def path(self) -> Path:
        """The directory that was loaded."""
        return self._root

    @property
    def config(self) -> dict[str, Any]:
        """The adapter configuration as it was written."""
        return self._config

    @property
    def keys(self) -> tuple[str, ...]:
        """The exported keys, in string order."""
        return tuple(sorted(self._exported))

    @property
    def optimizer(self) -> Hyperparameters | None:
        """The hyper-parameters, or None where no optimizer was saved."""
        return self._manifest.optimizer

    @property
    def digest(self) -> str:
        """The BLAKE2b-256 hex digest of the manifest."""
        return self._manifest.digest

    def spec(self, key: str) -> TensorSpec:
        """Return dtype and shape of an exported value without reading it.

        Raises:
            CheckpointError: no such key.
        """
        try:
            return spec_of(self._exported[key])
        except KeyError:
            raise CheckpointError(f"{self.path}: has no key {key}; it has {len(self.keys)} others") from None

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
        """
        ((_, stack),) = self.stacks(component, [key])
        return stack[0]

    def stacks(self, component: str, keys: Sequence[str]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield tensors as views of their files, many of one shape as one view where they lie evenly.

        Args:
            component: as for `view`.
            keys: of the exports.

        Yields:
            positions in `keys`, and a tensor `[positions, out, in]` that must not be written to.

        Raises:
            CheckpointError: no such key, no optimizer was saved, or the checkpoint was closed.
        """
        self.expect_open()
        positions_of: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            positions_of.setdefault(self._file_of(component, key), []).append(position)
        for name, positions in positions_of.items():
            for found, stack in self._files[name].stacks([keys[position] for position in positions]):
                yield [positions[index] for index in found], stack

    def _file_of(self, component: str, key: str) -> str:
        if key not in self._exported:
            self.spec(key)  # raises
        if component == WEIGHTS:
            return ADAPTER_FILE
        self._expect_optimizer(key)
        return self._manifest.parameters[key][COMPONENTS.index(component)]

    def _expect_optimizer(self, key: str) -> None:
        if self.optimizer is None:
            raise CheckpointError(f"{self.path}: was saved without an optimizer; there is no state of {key}")

    def expect_open(self) -> None:
        """Refuse to go on with a checkpoint that was closed.

        Raises:
            CheckpointError: it was.
        """
        if not self._files:
            raise CheckpointError(f"{self.path}: is closed; load it again")

    def step(self, key: str) -> int:
        """Return the step count of a key; errors as for `state`."""
        self.spec(key)
        self._expect_optimizer(key)
        return int(self._manifest.steps[key])

    def restore(
        self,
        exports: Iterable[Export],
        optimizer: torch.optim.Optimizer | None,
        masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        subset: bool = False,
    ) -> None:
        """Put the checkpoint back into parameters, masters and moments; see `packckpt.restore.restore`."""
        from packckpt.restore import restore

        restore(self, exports, optimizer, masters, subset=subset)

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._files.clear()

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
