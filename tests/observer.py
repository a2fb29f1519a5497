"""Counts copies into host memory as torch's dispatcher sees them, whoever makes them and on whatever device.

The third of three counts that check each other: what the plan predicts, what the library's transfer module
logs, and this, which knows neither. It also works where source and destination are both CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@dataclass(frozen=True)
class HostCopy:
    """One copy into a CPU tensor ("copy"), or one value that became a Python number ("item")."""

    kind: Literal["copy", "item"]
    op: str
    source_device: torch.device
    source_dtype: torch.dtype
    destination_dtype: torch.dtype | None  # None where a Python number came out
    source_bytes: int
    destination_bytes: int
    shape: tuple[int, ...]
    source_stride: tuple[int, ...]


class CopyObserver(TorchDispatchMode):
    """Records every `aten._to_copy` and `aten.copy_` into a CPU tensor made in its `with` block.

    `_foreach_copy_` is one operator with a list: every entry of the list counts. `.item()` shows as
    `_local_scalar_dense`. A `TorchDispatchMode` belongs to its thread: copies of other threads are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[HostCopy] = []

    @property
    def copies(self) -> list[HostCopy]:
        return [event for event in self.events if event.kind == "copy"]

    @property
    def from_device(self) -> list[HostCopy]:
        """Copies whose source is not in host memory."""
        return [event for event in self.copies if event.source_device.type != "cpu"]

    @property
    def items(self) -> list[HostCopy]:
        return [event for event in self.events if event.kind == "item"]

    @property
    def d2h_calls(self) -> int:
        return len(self.from_device)

    @property
    def d2h_bytes(self) -> int:
        """Bytes in the dtype of the source, which is what a blocking copy moves."""
        return sum(event.source_bytes for event in self.from_device)

    @property
    def copy_calls(self) -> int:
        return len(self.copies)

    @property
    def copy_bytes(self) -> int:
        return sum(event.source_bytes for event in self.copies)

    @property
    def item_calls(self) -> int:
        return len(self.items)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket
        if name is aten._to_copy:
            self._see("_to_copy", args[0], result)
        elif name is aten.copy_:
            self._see("copy_", args[1], args[0])
        elif name is aten._foreach_copy_:
            for destination, source in zip(args[0], args[1], strict=True):
                self._see("_foreach_copy_", source, destination)
        elif name is aten._local_scalar_dense:
            self.events.append(_event("item", "_local_scalar_dense", args[0], None))
        return result

    def _see(self, op: str, source: torch.Tensor, destination: torch.Tensor) -> None:
        # Of a tensor without elements nothing is copied on any device, though the operator is called.
        if destination.device.type == "cpu" and destination.numel() > 0:
            self.events.append(_event("copy", op, source, destination))


def _event(kind: Literal["copy", "item"], op: str, source: torch.Tensor, destination: torch.Tensor | None) -> HostCopy:
    source_bytes = source.numel() * source.element_size()
    return HostCopy(
        kind=kind,
        op=op,
        source_device=source.device,
        source_dtype=source.dtype,
        destination_dtype=None if destination is None else destination.dtype,
        source_bytes=source_bytes,
        destination_bytes=source_bytes if destination is None else destination.numel() * destination.element_size(),
        shape=tuple(source.shape),
        source_stride=tuple(source.stride()),
    )
