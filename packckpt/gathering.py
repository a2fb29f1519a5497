"""Gather rows of tensors that are on the host already: prepared by the thread that saves, done by any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packckpt.transfer import convert, same_bits
from packckpt.windows import FilePlan, Run

_BLOCK = 64  # columns that are transposed together


class Sources:
    """What a file is cut from, looked up once for each of its tensors; lives while the file is captured."""

    def __init__(self, file: FilePlan) -> None:
        self.component = file.component
        self._file = file
        self._exported: dict[int, torch.Tensor] = {}
        self._bits: dict[int, np.ndarray[Any, Any]] = {}

    def exported(self, number: int) -> torch.Tensor:
        """Return a tensor of the file as `[experts, out, in]`, a view; one that is exported whole is one expert."""
        if number not in self._exported:
            source = self._file.source(number)
            assert source is not None
            packed = source.detach() if source.dim() == 3 else source.detach()[None]
            self._exported[number] = packed.transpose(1, 2)
        return self._exported[number]

    def bits(self, number: int) -> np.ndarray[Any, Any]:
        """Return the same of a tensor on the host, as integers of its size."""
        if number not in self._bits:
            self._bits[number] = same_bits(self.exported(number))
        return self._bits[number]


class HostGather:
    """Call it to bring runs to their places in a copy's memory, transposed and converted, on the calling thread.

    Args:
        runs: of one copy from host memory.
        sources: of their file.
        memory: where they belong, in the dtype of the copy.

    torch's modes are a thread's own. Nothing here asks for them: the arrays have none, and what is converted is
    neither written to the trainer's tensors nor part of a graph.
    """

    def __init__(self, runs: Sequence[Run], sources: Sources, memory: torch.Tensor) -> None:
        self._dtype = memory.dtype
        self._memory = same_bits(memory)
        self._runs = [(run, self._source(sources, run)) for run in runs]

    def __call__(self) -> None:
        """Copy everything."""
        for run, source in self._runs:
            for rows, places in run.segments:
                part = source[rows.start : rows.stop : rows.step, run.start : run.stop]
                destination = self._destination(run, places)
                if isinstance(part, torch.Tensor):
                    convert(torch.from_numpy(destination).view(self._dtype), part)
                else:
                    _transpose(destination, part)

    def _source(self, sources: Sources, run: Run) -> torch.Tensor | np.ndarray[Any, Any]:
        exported = sources.exported(run.number)
        # numpy stays on its thread, where torch shares a large copy among threads that the save keeps busy.
        return sources.bits(run.number) if exported.dtype is self._dtype else exported

    def _destination(self, run: Run, places: range) -> np.ndarray[Any, Any]:
        itemsize = self._memory.itemsize
        return np.ndarray(
            (len(places), run.stop - run.start, run.columns),
            self._memory.dtype,
            self._memory,
            places.start * itemsize,
            (places.step * itemsize, run.columns * itemsize, itemsize),
        )


def _transpose(destination: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy `[rows, out, in]` to dense memory, in blocks of columns where the source is transposed and large.

    A row of the destination is read across the source, one element of each of its cache lines. In blocks the lines
    are still in the core's cache when the next row needs them.
    """
    _, height, columns = source.shape
    across = source.strides[2] > source.strides[1] and height >= _BLOCK
    for start in range(0, columns, _BLOCK if across else columns):
        stop = start + _BLOCK if across else columns
        np.copyto(destination[:, :, start:stop], source[:, :, start:stop])
