"""How the staged path cuts a save: files in key order, windows that fit a buffer, one copy for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from packckpt.dtypes import STATE_DTYPE
from packckpt.errors import ExportError
from packckpt.exports import Export
from packckpt.optimizer import COMPONENTS, ParameterState
from packckpt.progressions import paired_progressions

WEIGHTS = "lora"
DEFAULT_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows `start` to `stop` of one exported tensor, as they stand in the file.

    Attributes:
        export: whose tensor it is.
        source: the tensor that it is cut from (parameter, master or moment), or None for zeros.
        start, stop: rows of the exported `(out, in)` tensor; all of them unless it is larger than a buffer.
        columns: elements in one row of it.
        dtype: as written.
        complete: whether it is the whole exported tensor.
        bytes: its size in the file.
    """

    export: Export
    source: torch.Tensor | None
    start: int
    stop: int
    columns: int
    dtype: torch.dtype
    complete: bool
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pieces of one source that are gathered by few operations.

    Either complete rows of a packed tensor, ascending, or a single piece.

    Attributes:
        pieces: of one shape.
        places: where each of them begins in the copy's memory, in elements.
    """

    pieces: tuple[Piece, ...]
    places: tuple[int, ...]

    @property
    def source(self) -> torch.Tensor:
        """The tensor that all pieces are cut from."""
        source = self.pieces[0].source
        assert source is not None
        return source

    @property
    def packed(self) -> bool:
        """Whether the pieces are complete rows of a packed tensor."""
        return self.pieces[0].export.expert is not None and self.pieces[0].complete

    @property
    def segments(self) -> list[tuple[range, range]]:
        """Rows of a packed run, and their places, as slices."""
        return paired_progressions([piece.export.expert or 0 for piece in self.pieces], self.places)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of each piece, as it stands in the file."""
        first = self.pieces[0]
        return first.stop - first.start, first.columns

    @property
    def numel(self) -> int:
        """Number of elements of all pieces."""
        rows, columns = self.shape
        return len(self.pieces) * rows * columns


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One transfer to the host: pieces of one device and dtype, side by side in file order.

    Attributes:
        device, dtype: of what arrives.
        runs: what is gathered for it.
        offset_bytes: where in the window's buffer it lands.
        component: of the file that it is for.
    """

    device: torch.device
    dtype: torch.dtype
    runs: tuple[Run, ...]
    offset_bytes: int
    component: str

    @property
    def calls(self) -> int:
        """How often bytes are moved for it: once, and on the CPU, where nothing crosses, once for each run."""
        return len(self.runs) if self.device.type == "cpu" else 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(run.numel for run in self.runs)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive bytes of one file, at most a buffer of them, and the copies that bring them.

    Attributes:
        pieces: in file order.
        copies: what is transferred; zeros are not.
    """

    pieces: tuple[Piece, ...]
    copies: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the ring that the window takes."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def contiguous(self) -> bool:
        """Whether what lands in the buffer is what the file holds, byte for byte."""
        return len(self.copies) == 1 and self.bytes == sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One file of the checkpoint: all weights, or one component of one block.

    Attributes:
        component: "lora", "master", "exp_avg" or "exp_avg_sq".
        block: the layer block, or None for the weights of all of them.
        exports: in string order of their keys, with the state of their parameters.
    """

    component: str
    block: str | None
    exports: tuple[tuple[Export, ParameterState | None], ...]

    def dtype_of(self, export: Export) -> torch.dtype:
        """Return the dtype in which an export stands in this file."""
        return export.parameter.dtype if self.component == WEIGHTS else STATE_DTYPE

    def windows(self, buffer_bytes: int) -> Iterator[Window]:
        """Cut the file into windows of at most `buffer_bytes`, which holds one row at least (`expect_rows_fit`)."""
        pieces: list[Piece] = []
        size = 0
        for piece in self._pieces(buffer_bytes):
            if pieces and size + piece.bytes > buffer_bytes:
                yield self._window(pieces)
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.bytes
        if pieces:
            yield self._window(pieces)

    def _window(self, pieces: Sequence[Piece]) -> Window:
        return Window(tuple(pieces), _copies(pieces, self.component))

    def _pieces(self, buffer_bytes: int) -> Iterator[Piece]:
        for export, state in self.exports:
            source = self._source(export, state)
            dtype = self.dtype_of(export)
            rows, columns = export.shape
            row_bytes = columns * dtype.itemsize
            step = rows if rows * row_bytes <= buffer_bytes else max(1, buffer_bytes // row_bytes)
            for start in range(0, rows, step) if step else (0,):
                stop = min(start + step, rows)
                complete = stop - start == rows
                yield Piece(export, source, start, stop, columns, dtype, complete, (stop - start) * row_bytes)

    def _source(self, export: Export, state: ParameterState | None) -> torch.Tensor | None:
        if self.component == WEIGHTS:
            return export.parameter
        assert state is not None
        return state.component(self.component)


def expect_rows_fit(files: Iterable[FilePlan], buffer_bytes: int) -> None:
    """Refuse a buffer that does not hold one row of every exported tensor.

    Raises:
        ExportError: names the key and the sizes.
    """
    fitting: set[tuple[int, torch.dtype]] = set()
    for file in files:
        for export, _ in file.exports:
            dtype = file.dtype_of(export)
            if (id(export.parameter), dtype) in fitting:
                continue
            row_bytes = export.shape[1] * dtype.itemsize
            if row_bytes > buffer_bytes:
                raise ExportError(
                    f"{export.key}: one row of the exported tensor takes {row_bytes} bytes, a buffer holds "
                    f"{buffer_bytes}; raise buffer_bytes"
                )
            fitting.add((id(export.parameter), dtype))


def plan_files(exports: Iterable[tuple[Export, ParameterState | None]]) -> list[FilePlan]:
    """Lay exports out as the files of a checkpoint: the weights, then the three components of each block."""
    ordered = sorted(exports, key=lambda pair: pair[0].key)
    weights = FilePlan(WEIGHTS, None, tuple(ordered))
    by_block: dict[str, list[tuple[Export, ParameterState | None]]] = {}
    for export, state in ordered:
        if state is not None:
            by_block.setdefault(export.block, []).append((export, state))
    files = [FilePlan(c, block, tuple(by_block[block])) for block in sorted(by_block) for c in COMPONENTS]
    return [weights, *files]


def _copies(pieces: Sequence[Piece], component: str) -> tuple[Copy, ...]:
    """Group pieces into one copy for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        if piece.source is not None and piece.bytes:
            groups.setdefault((piece.source.device, piece.dtype), []).append(piece)
    copies: list[Copy] = []
    offset_bytes = 0
    # Larger elements first: every copy is then aligned for its dtype.
    for (device, dtype), group in sorted(groups.items(), key=lambda item: -item[0][1].itemsize):
        copies.append(Copy(device, dtype, tuple(_runs(group)), offset_bytes, component))
        offset_bytes += copies[-1].bytes
    return tuple(copies)


def _runs(pieces: Iterable[Piece]) -> list[Run]:
    packed: dict[int, list[tuple[Piece, int]]] = {}
    single: list[Run] = []
    place = 0
    for piece in pieces:
        if piece.export.expert is not None and piece.complete:
            packed.setdefault(id(piece.source), []).append((piece, place))
        else:
            single.append(Run((piece,), (place,)))
        place += (piece.stop - piece.start) * piece.columns
    return [*map(_run_of_rows, packed.values()), *single]


def _run_of_rows(placed: Iterable[tuple[Piece, int]]) -> Run:
    # In the order of the source: `0, 1, 10, 11, ..., 2, 20, ...` of a file is then a few slices of both.
    ascending = sorted(placed, key=lambda item: item[0].export.expert or 0)
    return Run(tuple(piece for piece, _ in ascending), tuple(place for _, place in ascending))
