"""How the staged path cuts a save: files in key order, windows that fit a buffer, one copy for each of them.

It is planned by column: numbers of a whole file are arrays, and an object stands for many exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from packckpt.dtypes import STATE_DTYPE
from packckpt.errors import ExportError
from packckpt.exports import Export
from packckpt.optimizer import COMPONENTS, ParameterState
from packckpt.progressions import Numbers, paired_progressions

WEIGHTS = "lora"
DEFAULT_BUFFER_BYTES = 64 << 20
# What the CPU gathers needs no large copies, and small windows keep every thread busy up to the end. Still smaller
# ones cost more turns with the interpreter than they give.
CPU_WINDOW_BYTES = 16 << 20


class Landing(NamedTuple):
    """Where a tensor of a file comes from, and the dtype in which it stands there; no device means zeros."""

    device: torch.device | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows of one tensor, of each of which the same part is exported, gathered by few operations.

    Attributes:
        number: of the tensor in its layout.
        segments: rows of the tensor `[experts, in, out]`, and where they begin in the copy's memory, in elements.
        start, stop: rows of each exported `(out, in)` tensor; all of them unless it is larger than a window.
        columns: elements in one row of it.
    """

    number: int
    segments: tuple[tuple[range, range], ...]
    start: int
    stop: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements of all its rows."""
        return sum(len(rows) for rows, _ in self.segments) * (self.stop - self.start) * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One transfer to the host: tensors of one device and dtype, side by side in file order.

    Attributes:
        device, dtype: of what arrives.
        runs: what is gathered for it.
        offset_bytes: where in the window's memory it lands.
        numel: number of elements.
    """

    device: torch.device
    dtype: torch.dtype
    runs: tuple[Run, ...]
    offset_bytes: int
    numel: int

    @property
    def calls(self) -> int:
        """How often bytes are moved for it: once, and on the CPU, where nothing crosses, once for each run."""
        return len(self.runs) if self.device.type == "cpu" else 1

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive bytes of one file, at most a buffer of them, and the copies that bring them.

    Attributes:
        copies: what is transferred; zeros are not.
        parts: its bytes in file order: where they begin in the window's memory (None for zeros), and how many.
    """

    copies: tuple[Copy, ...]
    parts: tuple[tuple[int | None, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes of the ring that the window takes."""
        return sum(copy.bytes for copy in self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Exports in string order of their keys, which one file or several hold.

    Memory: two numbers and a pointer for each export, and its windows, once they were asked for.

    Attributes:
        exports: in that order.
        numbers: of each export's parameter, among `parameters`.
        rows: of each export in its parameter; 0 where it is the whole.
        parameters, states: what the exports are cut from, and what the optimizer holds for it.
    """

    exports: tuple[Export, ...]
    numbers: Numbers
    rows: Numbers
    parameters: tuple[torch.Tensor, ...]
    states: tuple[ParameterState | None, ...]
    _cut: dict[tuple[int, tuple[Landing, ...]], tuple[Window, ...]] = field(default_factory=dict)

    def windows(self, landings: tuple[Landing, ...], buffer_bytes: int) -> tuple[Window, ...]:
        """Cut a file whose tensors land like this; files that are alike share their windows."""
        found = self._cut.get((buffer_bytes, landings))
        if found is None:
            found = self._cut[buffer_bytes, landings] = tuple(_windows(self, landings, buffer_bytes))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One file of the checkpoint: all weights, or one component of one block.

    Attributes:
        component: "lora", "master", "exp_avg" or "exp_avg_sq".
        block: the layer block, or None for the weights of all of them.
        layout: its exports, in the order of the file.
    """

    component: str
    block: str | None
    layout: Layout

    @property
    def exports(self) -> tuple[Export, ...]:
        """Its exports, in string order of their keys."""
        return self.layout.exports

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which exports of a parameter stand in this file."""
        return stored_dtype(self.component, parameter.dtype)

    def source(self, number: int) -> torch.Tensor | None:
        """Return the tensor that exports of a parameter are cut from here, or None for zeros."""
        if self.component == WEIGHTS:
            return self.layout.parameters[number]
        state = self.layout.states[number]
        assert state is not None
        return state.component(self.component)

    def windows(self, buffer_bytes: int) -> Sequence[Window]:
        """Cut the file into windows of at most `buffer_bytes`, which holds one row at least (`expect_rows_fit`).

        Where all of it is on the CPU they hold at most `CPU_WINDOW_BYTES`, or one row.
        """
        landings = tuple(map(self._landing, range(len(self.layout.parameters))))
        crosses = any(landing.device is not None and landing.device.type != "cpu" for landing in landings)
        return self.layout.windows(landings, buffer_bytes if crosses else min(buffer_bytes, CPU_WINDOW_BYTES))

    def _landing(self, number: int) -> Landing:
        source = self.source(number)
        return Landing(None if source is None else source.device, self.dtype_of(self.layout.parameters[number]))


def stored_dtype(component: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which one component of a parameter of the given dtype stands in a checkpoint."""
    return dtype if component == WEIGHTS else STATE_DTYPE


def expect_rows_fit(files: Iterable[FilePlan], buffer_bytes: int) -> None:
    """Refuse a buffer that does not hold one row of every exported tensor.

    Raises:
        ExportError: names the key and the sizes.
    """
    for file in files:
        layout = file.layout
        sizes = [p.shape[-2] * file.dtype_of(p).itemsize for p in layout.parameters]
        if max(sizes, default=0) <= buffer_bytes:
            continue
        position = int(np.argmax(np.array(sizes)[layout.numbers] > buffer_bytes))
        raise ExportError(
            f"{layout.exports[position].key}: one row of the exported tensor takes "
            f"{sizes[layout.numbers[position]]} bytes, a buffer holds {buffer_bytes}; raise buffer_bytes"
        )


def plan_files(blocks: Iterable[tuple[str, Iterable[tuple[Export, ParameterState | None]]]]) -> list[FilePlan]:
    """Lay exports out as the files of a checkpoint: the weights, then the three components of each block.

    Args:
        blocks: name of each layer block, and its exports with the state of their parameters, in any order.
    """
    ordered = {name: sorted(pairs, key=_key) for name, pairs in sorted(blocks, key=itemgetter(0))}
    # Most blocks follow one another in the file of all weights too: what is sorted already is soon sorted again.
    weights = FilePlan(WEIGHTS, None, _layout(sorted(chain.from_iterable(ordered.values()), key=_key)))
    files = [weights]
    for name, pairs in ordered.items():
        if stepped := [pair for pair in pairs if pair[1] is not None]:
            layout = _layout(stepped)
            files += [FilePlan(component, name, layout) for component in COMPONENTS]
    return files


def _key(pair: tuple[Export, ParameterState | None]) -> str:
    return pair[0].key


def _layout(pairs: Sequence[tuple[Export, ParameterState | None]]) -> Layout:
    exports = tuple([export for export, _ in pairs])
    of_parameter = {id(pair[0].parameter): pair for pair in pairs}
    number_of = {identity: number for number, identity in enumerate(of_parameter)}
    return Layout(
        exports,
        np.array([number_of[id(export.parameter)] for export in exports], np.int64),
        np.array([export.expert or 0 for export in exports], np.int64),
        tuple(export.parameter for export, _ in of_parameter.values()),
        tuple(state for _, state in of_parameter.values()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Columns of the pieces of a file: exported tensors, or consecutive rows of one that is larger than a window.

    Attributes:
        numbers, rows: as in `Layout`, for each piece.
        starts, stops: rows of the exported tensor.
        numels: elements.
        sizes: bytes.
    """

    numbers: Numbers
    rows: Numbers
    starts: Numbers
    stops: Numbers
    numels: Numbers
    sizes: Numbers

    def at(self, where: slice | np.ndarray[Any, Any]) -> _Pieces:
        """Return some of the pieces."""
        return _Pieces(
            self.numbers[where],
            self.rows[where],
            self.starts[where],
            self.stops[where],
            self.numels[where],
            self.sizes[where],
        )


def _pieces(layout: Layout, landings: Sequence[Landing], most_bytes: int) -> _Pieces:
    """Cut exports into pieces of at most that many bytes, or of one row; those without elements have none."""
    shapes = np.array([p.shape[-2:] for p in layout.parameters], np.int64).reshape(-1, 2)
    columns, heights = shapes[:, 0], shapes[:, 1]
    row_bytes = columns * np.array([landing.dtype.itemsize for landing in landings], np.int64)
    steps = np.where(heights * row_bytes <= most_bytes, heights, np.maximum(1, most_bytes // np.maximum(1, row_bytes)))
    counts = np.where(row_bytes > 0, -(-heights // np.maximum(1, steps)), 0)[layout.numbers]
    numbers, rows = np.repeat(layout.numbers, counts), np.repeat(layout.rows, counts)
    position_in_export = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = position_in_export * steps[numbers]
    stops = np.minimum(starts + steps[numbers], heights[numbers])
    numels = (stops - starts) * columns[numbers]
    return _Pieces(numbers, rows, starts, stops, numels, (stops - starts) * row_bytes[numbers])


def _windows(layout: Layout, landings: Sequence[Landing], most_bytes: int) -> Iterator[Window]:
    pieces = _pieces(layout, landings, most_bytes)
    columns = [parameter.shape[-2] for parameter in layout.parameters]
    # Larger elements first: every copy is then aligned for its dtype.
    brought = sorted({landing for landing in landings if landing.device is not None}, key=_alignment)
    group_of = {landing: group for group, landing in enumerate(brought)}
    groups = np.array([group_of.get(landing, -1) for landing in landings], np.int64)[pieces.numbers]
    ends = np.cumsum(pieces.sizes)
    first, begin = 0, 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, begin + most_bytes, "right")))
        where = slice(first, stop)
        yield _window(pieces.at(where), groups[where], brought, columns)
        first, begin = stop, int(ends[stop - 1])


def _alignment(landing: Landing) -> tuple[int, str, str]:
    return -landing.dtype.itemsize, str(landing.dtype), str(landing.device)


def _window(pieces: _Pieces, groups: Numbers, brought: Sequence[Landing], columns: Sequence[int]) -> Window:
    copies: list[Copy] = []
    offset_bytes = 0
    places_bytes = np.full(len(groups), -1, np.int64)
    for group in np.unique(groups[groups >= 0]):
        device, dtype = brought[group]
        assert device is not None
        mask = groups == group
        of_group = pieces.at(mask)
        places = np.cumsum(of_group.numels) - of_group.numels
        places_bytes[mask] = offset_bytes + places * dtype.itemsize
        runs = tuple(_runs(of_group, places, columns))
        copies.append(Copy(device, dtype, runs, offset_bytes, int(of_group.numels.sum())))
        offset_bytes += copies[-1].bytes
    return Window(tuple(copies), tuple(_parts(groups, places_bytes, pieces.sizes)))


def _parts(groups: Numbers, places_bytes: Numbers, sizes: Numbers) -> Iterator[tuple[int | None, int]]:
    """Yield the parts of a window, in file order: what lies side by side in one copy is one part.

    Each part is hashed by a call that needs the interpreter's lock before and after it: thousands of them keep
    threads waiting for one another.
    """
    firsts = np.flatnonzero(np.diff(groups, prepend=-2))
    for first, size in zip(firsts, np.add.reduceat(sizes, firsts), strict=True):
        yield None if groups[first] < 0 else int(places_bytes[first]), int(size)


def _runs(pieces: _Pieces, places: Numbers, columns: Sequence[int]) -> Iterator[Run]:
    # In the order of the source: `0, 1, 10, 11, ..., 2, 20, ...` of a file is then a few slices of both.
    order = np.lexsort((pieces.rows, pieces.starts, pieces.numbers))
    ascending, places = pieces.at(order), places[order]
    changes = np.diff(ascending.numbers, prepend=-1) | np.diff(ascending.starts, prepend=-1)
    firsts = [*np.flatnonzero(changes).tolist(), len(order)]
    rows, row_places = ascending.rows.tolist(), places.tolist()
    for first, stop in pairwise(firsts):
        number = int(ascending.numbers[first])
        segments = paired_progressions(rows[first:stop], row_places[first:stop])
        yield Run(number, tuple(segments), int(ascending.starts[first]), int(ascending.stops[first]), columns[number])
