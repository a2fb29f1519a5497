"""What a planned save takes in host and device memory at its peak, over what is resident before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from packckpt.dtypes import STATE_DTYPE
from packckpt.exports import Export
from packckpt.optimizer import COMPONENTS
from packckpt.plan import BlockPlan, TransferPlan, Unit
from packckpt.tensorfile import BATCH_BYTES


@dataclass(frozen=True, slots=True)
class Peaks:
    """Predicted peaks of `prepare`, from the sizes of what the path holds at one time.

    Attributes:
        host_bytes: host memory: the largest block and what is packed for writing, or the ring.
        device_bytes: on accelerators: what is cast, packed or gathered there. For tensors on the CPU that is in
            `host_bytes`.
    """

    host_bytes: int
    device_bytes: int


def predicted_peaks(plan: TransferPlan) -> Peaks:
    """Predict the peaks of a save from its plan; nothing is allocated.

    Buffers of the interpreter and of the libraries (a few MiB) are not counted.
    """
    if plan.path == "staged":
        return Peaks(2 * plan.buffer_bytes, _largest_gathered_bytes(plan))
    on_host = max((_temporary_bytes(block, on_host=True) for block in plan.blocks), default=0)
    on_device = max((_temporary_bytes(block, on_host=False) for block in plan.blocks), default=0)
    held = max((_block_bytes(block) for block in plan.blocks), default=0)
    return Peaks(held + BATCH_BYTES + on_host, on_device)


def _block_bytes(block: BlockPlan) -> int:
    total = 0
    for unit in block.units:
        state_bytes = 0 if unit.state is None else len(COMPONENTS) * STATE_DTYPE.itemsize
        total += sum(_numel(export) * (export.parameter.element_size() + state_bytes) for export in unit.exports)
    return total


def _temporary_bytes(block: BlockPlan, *, on_host: bool) -> int:
    sizes = [size for unit in block.units for on_cpu, size in _unit_temporaries(unit) if on_cpu == on_host]
    return max(sizes, default=0)


def _unit_temporaries(unit: Unit) -> Iterator[tuple[bool, int]]:
    """Yield, for each copy of a unit, whether it is on the CPU and the bytes that are made before it."""
    first = unit.exports[0]
    yield _is_cpu(first.parameter), _packed_bytes(_row(first.parameter, first))
    for component in COMPONENTS if unit.state is not None else ():
        assert unit.state is not None
        source = unit.state.component(component)
        held = unit.state.master if source is None else source
        part = held if unit.coalesced else _row(held, first)
        # A cast and zeros are made dense, and are not packed once more.
        made = source is None or part.dtype is not STATE_DTYPE
        yield _is_cpu(held), part.numel() * STATE_DTYPE.itemsize if made else _packed_bytes(part)


def _largest_gathered_bytes(plan: TransferPlan) -> int:
    """Bytes of the largest window on an accelerator; one is gathered at a time, and on the CPU none."""
    windows = (window for file in plan.files for window in file.windows(plan.buffer_bytes))
    copies = (copy for window in windows for copy in window.copies if copy.device.type != "cpu")
    return max((copy.bytes for copy in copies), default=0)


def _row(tensor: torch.Tensor, export: Export) -> torch.Tensor:
    return tensor if export.expert is None else tensor[export.expert]


def _packed_bytes(part: torch.Tensor) -> int:
    """Bytes of the dense copy that torch makes of a view with gaps before it can be copied at once."""
    return 0 if _is_dense(part) or _is_cpu(part) else part.numel() * part.element_size()


def _is_dense(part: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(part.stride(), part.shape, strict=True)):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _is_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _numel(export: Export) -> int:
    return export.shape[0] * export.shape[1]
