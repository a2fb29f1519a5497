"""The only place where bytes leave the device: one class a path, same signature, same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from packckpt.dtypes import STATE_DTYPE
from packckpt.errors import OptimizerError
from packckpt.exports import Export
from packckpt.optimizer import COMPONENTS, ParameterState, step_number
from packckpt.plan import BlockPlan, PathName, Unit

_BITS_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSHARED_ELEMENTS = 32_767  # torch works on as many with the thread that asks (at::internal::GRAIN_SIZE)
Kind = Literal["weight", "optimizer", "step"]


@dataclass(slots=True)
class Count:
    """Number of transfers and the bytes that they moved."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class TransferLog:
    """What really left the device in one save, by kind: weights, optimizer state, step counts.

    Attributes:
        notes: where the save had to fall back to something slower, in words.
    """

    weight: Count = field(default_factory=Count)
    optimizer: Count = field(default_factory=Count)
    step: Count = field(default_factory=Count)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: Kind, moved: torch.Tensor) -> None:
        """Count one transfer of the bytes of `moved`."""
        self.add_bytes(kind, moved.numel() * moved.element_size())

    def add_bytes(self, kind: Kind, count_bytes: int) -> None:
        """Count one transfer of that size."""
        count: Count = getattr(self, kind)
        count.calls += 1
        count.bytes += count_bytes


class Path(Protocol):
    """How one block of exports reaches the host: the seam between planning and writing.

    `capture` returns tensors by snapshot name (`lora/<key>`, `master/<key>`, `exp_avg/<key>`,
    `exp_avg_sq/<key>`), each of the exported shape `(out, in)`; weights in the parameter's dtype, state as
    float32. The tensors are on the host in storage that nobody else holds, in any strides. Every copy has
    ended when it returns.
    """

    def capture(self, block: BlockPlan, log: TransferLog) -> dict[str, torch.Tensor]:
        """Copy one block to the host."""
        ...


class SlicePath:
    """What trainers do today: one blocking copy for each export and each of master, exp_avg, exp_avg_sq.

    The row is cut and cast to float32 on its device, copied in its own strides, and read as its transpose.
    A moment that the optimizer does not hold is made of zeros on the device and copied like any other.

    Host memory: one block of exports (weights and 12 bytes an element of state). Device memory: one expert
    as float32 where the state is not float32, is missing, or is a view with gaps.
    """

    def capture(self, block: BlockPlan, log: TransferLog) -> dict[str, torch.Tensor]:
        """Copy one block to the host; see `Path`."""
        captured: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for unit in block.units:
                self._capture_unit(unit, captured, log)
        return captured

    def _capture_unit(self, unit: Unit, captured: dict[str, torch.Tensor], log: TransferLog) -> None:
        for export in unit.exports:
            _capture_weights(export, captured, log)
            for component in COMPONENTS if unit.state is not None else ():
                assert unit.state is not None
                # Without a name, so that it is let go before the next is made.
                captured[f"{component}/{export.key}"] = _to_host(
                    _row(unit.state, component, export.expert).T.to(STATE_DTYPE), "optimizer", log
                )


class CoalescedPath(SlicePath):
    """Each state of a complete, consecutive packed parameter in one copy; the experts are cut on the host.

    What the plan could not coalesce takes the slice path. Weights are copied expert by expert.

    Host memory: one block of exports, as on the slice path: the rows are views of the one host copy.
    Device memory: one packed parameter as float32 where the state is not float32, is missing, or is a view
    with gaps (torch packs it first).
    """

    def _capture_unit(self, unit: Unit, captured: dict[str, torch.Tensor], log: TransferLog) -> None:
        if not unit.coalesced or unit.state is None:
            super()._capture_unit(unit, captured, log)
            return
        for export in unit.exports:
            _capture_weights(export, captured, log)
        for component in COMPONENTS:
            host = _to_host(_whole(unit.state, component).to(STATE_DTYPE), "optimizer", log)
            for row, export in enumerate(unit.exports):
                captured[f"{component}/{export.key}"] = host[row].T


def path_named(name: PathName) -> Path:
    """Return the path of that name."""
    return CoalescedPath() if name == "coalesced" else SlicePath()


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until every kernel on the accelerators among `devices` has ended; CPUs need no waiting."""
    for device in {device for device in devices if device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)


def read_steps(named: Sequence[tuple[str, object]], log: TransferLog) -> list[int]:
    """Return step counts as whole numbers; those on one device arrive in one copy.

    Args:
        named: pairs of a key (for errors) and the step as the optimizer holds it: a number, a tensor of one
            element on any device, or None for a parameter that was never stepped.

    Raises:
        OptimizerError: a step that is not a finite whole number; names the key.
    """
    on_host = _gather_device_steps(named, log)
    return [
        0 if value is None else step_number(key, _scalar(key, on_host.get(id(value), value))) for key, value in named
    ]


def _gather_device_steps(named: Sequence[tuple[str, object]], log: TransferLog) -> Mapping[int, torch.Tensor]:
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for key, value in named:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            _check_one_element(key, value)
            groups.setdefault((value.device, value.dtype), {})[id(value)] = value
    on_host: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for steps in groups.values():
            stacked = torch.stack([step.detach().reshape(()) for step in steps.values()])
            on_host.update(zip(steps, _to_host(stacked, "step", log), strict=True))
    return on_host


def _scalar(key: str, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    _check_one_element(key, value)
    return value.item()


def _check_one_element(key: str, value: torch.Tensor) -> None:
    if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool:
        raise OptimizerError(
            f"{key}: step is a tensor of shape {list(value.shape)} and dtype {value.dtype}; expected one real number"
        )


def _capture_weights(export: Export, captured: dict[str, torch.Tensor], log: TransferLog) -> None:
    value = export.parameter if export.expert is None else export.parameter[export.expert]
    captured[f"lora/{export.key}"] = _to_host(value.T, "weight", log)


def _row(state: ParameterState, component: str, expert: int | None) -> torch.Tensor:
    value = state.component(component)
    if value is None:
        return torch.zeros_like(state.master if expert is None else state.master[expert])
    return value if expert is None else value[expert]


def _whole(state: ParameterState, component: str) -> torch.Tensor:
    value = state.component(component)
    return torch.zeros_like(state.master, dtype=STATE_DTYPE) if value is None else value


def _to_host(source: torch.Tensor, kind: Kind, log: TransferLog) -> torch.Tensor:
    """Copy to fresh host memory in one blocking transfer.

    The destination takes the strides of a dense source, so that a transposed view is one plain copy and is
    not packed on the device. `.to("cpu")` would return the source itself where it is on the host already.
    """
    host = torch.empty_like(source.detach(), device="cpu")
    copy_in(host, source.detach(), kind, log)
    return host


def copy_in(
    host: torch.Tensor, source: torch.Tensor, kind: Kind, log: TransferLog, *, non_blocking: bool = False
) -> None:
    """Copy a tensor into host memory, and log it: every byte that leaves a device passes here."""
    host.copy_(source, non_blocking=non_blocking)
    if host.numel():
        log.add(kind, host)


def reorder(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy one host matrix to another of its shape, of any strides and dtype, on the calling thread alone.

    torch shares a large copy among its threads, and on a machine whose cores are busy writing and hashing it then
    waits for them: 8 ms for 8 MiB that numpy copies in 1 ms (two cores, both in use).
    """
    if source.dtype is destination.dtype:
        np.copyto(same_bits(destination), same_bits(source))
    else:
        convert(destination[None], source[None])


def convert(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy host matrices `[number, rows, columns]` to another dtype, on the calling thread alone.

    In pieces that torch does not share: it would make a team of threads for each thread that asks for more.
    """
    _, height, columns = source.shape
    across = max(1, min(columns, _UNSHARED_ELEMENTS))
    down = max(1, _UNSHARED_ELEMENTS // across)
    for number in range(len(source)):
        for top in range(0, height, down):
            for left in range(0, columns, across):
                piece = number, slice(top, top + down), slice(left, left + across)
                destination[piece].copy_(source[piece])


def same_bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a host tensor as an array of integers of the same size: numpy lacks some of torch's dtypes."""
    array: np.ndarray[Any, Any] = tensor.view(_BITS_OF_ITEMSIZE[tensor.element_size()]).numpy()
    return array
