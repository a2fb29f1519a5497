"""What a file of a checkpoint holds for the tensors of a trainer, and the chunks in which it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packckpt.exports import Export

Numbers = np.ndarray[Any, np.dtype[np.int64]]


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
    """

    filling: Filling
    rows: Numbers
    places: Numbers


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
    """All tensors of a file that are wanted, in the order in which they stand there.

    Args:
        fillings: of one file; no tensor is wanted twice, and those without elements are left out.
    """

    def __init__(self, fillings: Sequence[Filling]) -> None:
        self._fillings = [filling for filling in fillings if filling.tensor_bytes]
        counts = [len(filling.offsets) for filling in self._fillings]
        begins = np.concatenate([np.zeros(0, np.int64), *(filling.offsets for filling in self._fillings)])
        order = np.argsort(begins, kind="stable")
        self._begins = begins[order]
        self._sizes = np.repeat(np.array([f.tensor_bytes for f in self._fillings], np.int64), counts)[order]
        self._owners = np.repeat(np.arange(len(counts)), counts)[order]
        rows = np.concatenate([np.zeros(0, np.int64), *(filling.rows for filling in self._fillings)])
        self._rows = rows[order]
        # Where each would end if all of them lay side by side, as they do in the memory of a chunk.
        self._ends = np.cumsum(self._sizes)

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
        begins, sizes, ends = (
            column[tensors.start : tensors.stop] for column in (self._begins, self._sizes, self._ends)
        )
        owners, rows = self._owners[tensors.start : tensors.stop], self._rows[tensors.start : tensors.stop]
        base = int(ends[0] - sizes[0])
        places = ends - sizes - base
        portions = []
        for owner in np.unique(owners):
            mine = owners == owner
            portions.append(Portion(self._fillings[owner], rows[mine], places[mine]))
        return Chunk(_spans(begins, begins + sizes), tuple(portions), int(ends[-1]) - base)


def _spans(begins: Numbers, ends: Numbers) -> tuple[tuple[int, int], ...]:
    """Join what follows one another without a gap."""
    after_gap = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = begins[np.concatenate([[0], after_gap])]
    lasts = ends[np.concatenate([after_gap - 1, [len(ends) - 1]])]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))
