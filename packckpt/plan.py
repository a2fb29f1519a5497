"""Decide, before a byte moves, which exports go as one copy and which go slice by slice, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, get_args

import torch

from packckpt.dtypes import STATE_DTYPE
from packckpt.errors import OptimizerError, PackckptError
from packckpt.exports import Export, blocks_of, check_exports
from packckpt.optimizer import COMPONENTS, AdamState, ParameterState, StateReader
from packckpt.windows import DEFAULT_BUFFER_BYTES, WEIGHTS, FilePlan, plan_files

PathName = Literal["slice", "coalesced", "staged"]
PATHS: tuple[PathName, ...] = get_args(PathName)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Exports of one parameter that follow one another, in one block.

    A coalesced unit holds rows 0..E-1 in order, whose state is captured together; others are captured one by one.
    """

    exports: tuple[Export, ...]
    state: ParameterState | None
    coalesced: bool

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter that the exports are cut from."""
        return self.exports[0].parameter

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameter, and what the optimizer holds for it."""
        return [self.parameter, *(self.state.held if self.state is not None else ())]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """One layer block: its name, and its units in export order."""

    name: str
    units: tuple[Unit, ...]

    @property
    def exports(self) -> Iterator[Export]:
        """The exports of the block, in order."""
        return (export for unit in self.units for export in unit.exports)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPlan:
    """How one parameter leaves the device.

    Attributes:
        label: its first key, and how many more there are.
        shape: of the parameter.
        exports: number of exports cut from it.
        coalesced: whether each optimizer state goes as one copy.
        reason: why, in words.
        optimizer_calls: transfers of master, exp_avg and exp_avg_sq; None on the staged path, where a copy
            carries many parameters.
        optimizer_bytes: the float32 bytes of the three.
    """

    label: str
    shape: tuple[int, ...]
    exports: int
    coalesced: bool
    reason: str
    optimizer_calls: int | None
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedTransfers:
    """Number of copies to the host and the bytes that they move, of weights and of optimizer state."""

    weight_calls: int
    weight_bytes: int
    optimizer_calls: int
    optimizer_bytes: int


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """What a save will copy from device to host.

    Attributes:
        path: "slice", "coalesced" or "staged".
        blocks: layer blocks in the order in which they are written.
        parameters: one entry a parameter, in the order of their first export.
        narrowed_keys: exports whose optimizer state is float64 and loses precision as float32.
        buffer_bytes: the most that one copy of the staged path brings.
    """

    path: PathName
    blocks: tuple[BlockPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    narrowed_keys: tuple[str, ...]
    buffer_bytes: int

    @cached_property
    def files(self) -> list[FilePlan]:
        """The exports laid out as the files of a checkpoint, which is how the staged path copies them."""
        return plan_files(
            (block.name, [(export, unit.state) for unit in block.units for export in unit.exports])
            for block in self.blocks
        )

    @cached_property
    def transfers(self) -> PlannedTransfers:
        """The copies of the whole save, as the transfer log will count them; tensors without elements need none.

        On the staged path this walks every window, so it is done when it is asked for.
        """
        return _staged_transfers(self) if self.path == "staged" else _unit_transfers(self)

    @property
    def weight_calls(self) -> int:
        """Number of device-to-host copies of exported values."""
        return self.transfers.weight_calls

    @property
    def weight_bytes(self) -> int:
        """Bytes of those copies, in the parameters' dtypes."""
        return self.transfers.weight_bytes

    @property
    def optimizer_calls(self) -> int:
        """Number of device-to-host copies of master, exp_avg and exp_avg_sq."""
        return self.transfers.optimizer_calls

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of those copies, as float32; missing moments are copied as zeros, but for the staged path."""
        return self.transfers.optimizer_bytes

    def explain(self) -> str:
        """Return one line a parameter: coalesced or not, its transfers, and why."""
        lines = [
            f"{_manner(self.path, p):<9}  {'-' if p.optimizer_calls is None else p.optimizer_calls:>6} copies  "
            f"{list(p.shape)}  {p.label}: {p.reason}"
            for p in self.parameters
        ]
        total = f"{self.path}: {self.optimizer_calls} optimizer copies, {self.optimizer_bytes} bytes"
        return "\n".join([*lines, total])


def plan_transfers(
    exports: Iterable[Export],
    state: AdamState | None,
    path: PathName = "coalesced",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> TransferPlan:
    """Plan the device-to-host copies of a save; no tensor is read and nothing is allocated.

    A parameter's exports are coalesced when they are exactly its rows 0..E-1, once each, in order, next to
    each other in the list and in one layer block, and everything that the optimizer holds for it has its
    shape. Time and memory grow linearly with the exports.

    Args:
        exports: what leaves the trainer; the order matters.
        state: the optimizer's state, or None to save the exported values alone.
        path: "coalesced", "slice" for one copy an export and state, or "staged" for one copy a buffer.
        buffer_bytes: of the staged path's ring.

    Raises:
        ExportError: not exports, or a key twice.
        OptimizerError: the optimizer does not hold a parameter, or holds what cannot be saved.
    """
    if path not in PATHS:
        raise PackckptError(f"path is {path!r}; expected one of {', '.join(PATHS)}")
    if state is not None and not isinstance(state, AdamState):
        raise OptimizerError(
            f"state is a {type(state).__name__}; expected AdamState.from_optimizer(optimizer, masters=...), or None"
        )
    checked = check_exports(exports)
    positions = _positions_by_parameter(checked)
    reader = None if state is None else state.reader()
    decisions = [_decide(checked, rows, reader, path) for rows in positions.values()]
    return TransferPlan(
        path=path,
        blocks=_blocks(checked, decisions),
        parameters=tuple(decision.summary(checked, path) for decision in decisions),
        buffer_bytes=buffer_bytes,
        narrowed_keys=tuple(checked[position].key for d in decisions if _narrows(d.state) for position in d.positions),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Decision:
    """What was decided for one parameter: the positions of its exports, and how they travel."""

    positions: Sequence[int]
    state: ParameterState | None
    coalesced: bool
    reason: str

    def summary(self, exports: Sequence[Export], path: PathName) -> ParameterPlan:
        first = exports[self.positions[0]]
        count = len(self.positions)
        label = first.key if count == 1 else f"{first.key} (+{count - 1})"
        copies = 0 if self.state is None else len(COMPONENTS)
        calls = copies * (1 if self.coalesced else count) if first.parameter.numel() else 0
        return ParameterPlan(
            label=label,
            shape=tuple(first.parameter.shape),
            exports=count,
            coalesced=self.coalesced,
            reason=self.reason,
            optimizer_calls=None if path == "staged" else calls,
            optimizer_bytes=copies * count * _row_numel(first.parameter) * STATE_DTYPE.itemsize,
        )


def _positions_by_parameter(exports: Sequence[Export]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for position, export in enumerate(exports):
        positions.setdefault(id(export.parameter), []).append(position)
    return positions


def _decide(
    exports: Sequence[Export], positions: Sequence[int], reader: StateReader | None, path: PathName
) -> _Decision:
    first = exports[positions[0]]
    state = None if reader is None else reader.read(first.key, first.parameter)
    if first.expert is None:
        alone = "gathered into buffers on its device" if path == "staged" else "whole parameter: one copy a state"
        return _Decision(positions, state, False, alone)
    _check_rows_held(exports, positions, state)
    if path == "slice":
        return _Decision(positions, state, False, "the slice path copies every expert by itself")
    if path == "staged":
        return _Decision(positions, state, False, "gathered into buffers on its device")
    obstacle = _obstacle(exports, positions, state)
    if obstacle is not None:
        return _Decision(positions, state, False, obstacle)
    return _Decision(positions, state, True, f"rows 0 to {len(positions) - 1}, complete and in order")


def _check_rows_held(exports: Sequence[Export], positions: Sequence[int], state: ParameterState | None) -> None:
    """Refuse a state whose expert axis is too short for a row that is exported."""
    parameter = exports[positions[0]].parameter
    for component in COMPONENTS if state is not None else ():
        value = state.component(component) if state is not None else None
        if value is None or value.shape[0] >= parameter.shape[0]:
            continue
        last = max((exports[position] for position in positions), key=lambda export: export.expert or 0)
        if value.shape[0] <= (last.expert or 0):
            raise OptimizerError(
                f"{last.key}: {component} has shape {list(value.shape)} and no row {last.expert}; the parameter has "
                f"shape {list(parameter.shape)}"
            )


def _obstacle(exports: Sequence[Export], positions: Sequence[int], state: ParameterState | None) -> str | None:
    """Return why a packed parameter cannot go as one copy, or None where it can."""
    parameter = exports[positions[0]].parameter
    rows = [exports[position].expert or 0 for position in positions]
    return (
        _shape_obstacle(parameter, state)
        or _rows_obstacle(rows, parameter.shape[0])
        or _neighbour_obstacle(exports, positions)
        or _block_obstacle(exports, positions)
    )


def _shape_obstacle(parameter: torch.Tensor, state: ParameterState | None) -> str | None:
    for component in COMPONENTS if state is not None else ():
        value = state.component(component) if state is not None else None
        if value is not None and value.shape != parameter.shape:
            return f"{component} has shape {list(value.shape)}, the parameter {list(parameter.shape)}"
    return None


def _rows_obstacle(rows: Sequence[int], experts: int) -> str | None:
    if rows == list(range(experts)):
        return None
    seen: set[int] = set()
    for row in rows:
        if row in seen:
            return f"repeated: row {row} is exported more than once"
        seen.add(row)
    shown = f"rows {', '.join(map(str, rows[:8]))}{', ...' if len(rows) > 8 else ''}"
    if len(rows) < experts:
        return f"sparse: {shown} of {experts}"
    return f"reordered: {shown}"


def _neighbour_obstacle(exports: Sequence[Export], positions: Sequence[int]) -> str | None:
    # Positions ascend, so a run without gaps is as long as its ends are apart.
    if positions[-1] - positions[0] == len(positions) - 1:
        return None
    gap = next(a for a, b in pairwise(positions) if b != a + 1)
    return f"interleaved with {exports[gap + 1].key}"


def _block_obstacle(exports: Sequence[Export], positions: Sequence[int]) -> str | None:
    # A block is written and let go before the next; a copy that serves two would have to be kept.
    first, *others = blocks_of(exports[position].key for position in positions)
    other = next((block for block in others if block != first), None)
    return None if other is None else f"spans the blocks {first} and {other}"


def _blocks(exports: Sequence[Export], decisions: Iterable[_Decision]) -> tuple[BlockPlan, ...]:
    """Group units by block; blocks in string order, units in export order."""
    decision_of = {id(exports[decision.positions[0]].parameter): decision for decision in decisions}
    placed = zip(exports, blocks_of(export.key for export in exports), strict=True)
    units: dict[str, list[Unit]] = {}
    for (parameter_id, block), run in groupby(placed, lambda pair: (id(pair[0].parameter), pair[1])):
        decision = decision_of[parameter_id]
        unit = Unit(tuple(export for export, _ in run), decision.state, decision.coalesced)
        units.setdefault(block, []).append(unit)
    return tuple(BlockPlan(name, tuple(units[name])) for name in sorted(units))


def _unit_transfers(plan: TransferPlan) -> PlannedTransfers:
    parameters = [unit.parameter for block in plan.blocks for unit in block.units for _ in unit.exports]
    filled = [parameter for parameter in parameters if parameter.numel()]
    return PlannedTransfers(
        weight_calls=len(filled),
        weight_bytes=sum(_row_numel(parameter) * parameter.element_size() for parameter in filled),
        optimizer_calls=sum(parameter.optimizer_calls or 0 for parameter in plan.parameters),
        optimizer_bytes=sum(parameter.optimizer_bytes for parameter in plan.parameters),
    )


def _staged_transfers(plan: TransferPlan) -> PlannedTransfers:
    counts = {True: [0, 0], False: [0, 0]}
    for file in plan.files:
        count = counts[file.component == WEIGHTS]
        for window in file.windows(plan.buffer_bytes):
            for copy in window.copies:
                count[0] += copy.calls
                count[1] += copy.bytes
    return PlannedTransfers(*counts[True], *counts[False])


def _manner(path: PathName, parameter: ParameterPlan) -> str:
    if path == "staged":
        return "staged"
    return "coalesced" if parameter.coalesced else "slice"


def _row_numel(parameter: torch.Tensor) -> int:
    return parameter.shape[-1] * parameter.shape[-2]


def _narrows(state: ParameterState | None) -> bool:
    values = [] if state is None else [state.component(component) for component in COMPONENTS]
    return any(value is not None and value.dtype is torch.float64 for value in values)
