"""What a file of a checkpoint holds for the tensors of a trainer, and the chunks in which it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packckpt.exports import Export
from packckpt.progressions import Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Tensors of one file that go to rows of one tensor of the trainer.

    Attributes:
        destination: `[rows, out, in]`, any strides, dtype and device; a whole parameter is one row.
        export: the first of them, which stands for all: they have one shard and one shape.
        dtype, shape: of each of them in the file.
        offsets: where each begins, in bytes from the file's start; ascending.
        rows: where each goes.
    """

    destination: torch.Tensor
    export: Export
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Numbers
    rows: Numbers

    @property
    def tensor_bytes(self) -> int:
        """Size of one tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """What a chunk holds for one tensor of the trainer.

    Attributes:
        filling: which it is part of.
        rows: where each tensor goes.
        places: where each begins in the chunk's memory, in bytes; ascending.
        even: whether they lie evenly apart.
    """

    filling: Filling
    rows: Numbers
    places: Numbers
    even: bool


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Parts of a file that are read at once, side by side into memory.

    Attributes:
        spans: first byte of each part in the file, and the one behind its last; ascending.
        portions: what is there.
        bytes: of memory.
    """

    spans: tuple[tuple[int, int], ...]
    portions: tuple[Portion, ...]
    bytes: int


class FileLayout:
    """All tensors of a file that are wanted, numbered in the order in which they stand there.

    It is kept by column, and a chunk takes a few operations for each filling: there may be ten thousand tensors.

    Args:
        fillings: of one file; no tensor is wanted twice, and those without elements are left out.
    """

    def __init__(self, fillings: Sequence[Filling]) -> None:
        self._fillings = [filling for filling in fillings if filling.tensor_bytes]
        counts = [len(filling.offsets) for filling in self._fillings]
        begins = np.concatenate([np.zeros(0, np.int64), *(filling.offsets for filling in self._fillings)])
        order = np.argsort(begins, kind="stable")
        self._begins = begins[order]
        self._owners = np.repeat(np.arange(len(counts)), counts)[order]
        self._sizes = np.array([filling.tensor_bytes for filling in self._fillings], np.int64)[self._owners]
        # Where each would end if all of them lay side by side, as they do in the memory of a chunk.
        self._ends = np.cumsum(self._sizes)
        # By filling: the numbers of its tensors, where they begin side by side, and how far that goes evenly.
        self._numbers = np.split(np.argsort(order, kind="stable"), np.cumsum(counts)[:-1])
        self._places = [(self._ends - self._sizes)[numbers] for numbers in self._numbers]
        self._even_until = [_even_until(places) for places in self._places]

    @property
    def accelerator(self) -> torch.device | None:
        """An accelerator that some of the tensors go to, if any."""
        devices = (filling.destination.device for filling in self._fillings)
        return next((device for device in devices if device.type != "cpu"), None)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest tensor."""
        return max((filling.tensor_bytes for filling in self._fillings), default=0)

    @property
    def tensors(self) -> range:
        """All tensors, by number."""
        return range(len(self._begins))

    def split(self, tensors: range, most_bytes: int) -> Iterator[range]:
        """Yield a range of tensors in parts of at most so many bytes, or of one tensor."""
        start = tensors.start
        while start < tensors.stop:
            limit = self._ends[start] - self._sizes[start] + most_bytes
            stop = max(start + 1, int(np.searchsorted(self._ends, limit, side="right")))
            yield range(start, min(stop, tensors.stop))
            start = stop

    def chunk(self, tensors: range) -> Chunk:
        """Return the tensors of a range as one chunk."""
        begins, sizes = self._begins[tensors.start : tensors.stop], self._sizes[tensors.start : tensors.stop]
        base, end = int(self._ends[tensors.start] - sizes[0]), int(self._ends[tensors.stop - 1])
        owners = np.flatnonzero(np.bincount(self._owners[tensors.start : tensors.stop]))
        portions = tuple(self._portion(owner, tensors, base) for owner in owners.tolist())
        return Chunk(_spans(begins, begins + sizes), portions, end - base)

    def _portion(self, owner: int, tensors: range, base: int) -> Portion:
        filling = self._fillings[owner]
        start, stop = np.searchsorted(self._numbers[owner], (tensors.start, tensors.stop)).tolist()
        even = bool(self._even_until[owner][start] >= stop - 1)
        return Portion(filling, filling.rows[start:stop], self._places[owner][start:stop] - base, even)


def _even_until(places: Numbers) -> Numbers:
    """Return for each place the last one up to which they lie as far apart as it and the next do."""
    steps = places[1:] - places[:-1]
    changes = np.append(np.flatnonzero(steps[1:] != steps[:-1]) + 1, len(steps))
    until: Numbers = changes[np.searchsorted(changes, np.arange(len(places)), side="right").clip(max=len(changes) - 1)]
    return until


def _spans(begins: Numbers, ends: Numbers) -> tuple[tuple[int, int], ...]:
    """Join what follows one another without a gap."""
    after_gap = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = begins[np.concatenate([[0], after_gap])]
    lasts = ends[np.concatenate([after_gap - 1, [len(ends) - 1]])]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))
