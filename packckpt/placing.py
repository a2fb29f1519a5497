"""Put what a chunk holds where it belongs: rows of parameters, masters and moments, on the host or a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from packckpt.fillings import Portion
from packckpt.merge import cut_shard
from packckpt.progressions import Numbers, paired_progressions, progressions
from packckpt.transfer import convert, reorder, same_bits

Bits = np.ndarray[Any, Any]


def place_on_host(portion: Portion, memory: torch.Tensor) -> None:
    """Write a portion from a chunk's memory to its rows.

    Args:
        portion: its destination is on the host.
        memory: uint8, the chunk's bytes on the host.
    """
    destination = portion.filling.destination
    for found, stack in _stacks(portion, memory):
        parts = _cut(portion, stack)
        rows = portion.rows[found.start : found.stop]
        if len(rows) == 1:
            reorder(destination[rows[0]], parts[0])
        else:
            # Row by row, threads would wait for one another's turn with the interpreter.
            _write_rows(same_bits(destination), rows, same_bits(_in_dtype(parts, destination.dtype)))


def _in_dtype(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if parts.dtype is dtype:
        return parts
    converted = torch.empty(parts.shape, dtype=dtype)
    convert(converted, parts)
    return converted


def _write_rows(destination: Bits, rows: Numbers, parts: Bits) -> None:
    if parts.shape[1] > parts.shape[2]:
        # numpy's inner loop runs over the last axis: a short one takes up to 1.6 times as long.
        destination, parts = destination.swapaxes(1, 2), parts.swapaxes(1, 2)
    destination[rows] = parts


def place_on_device(portion: Portion, memory: torch.Tensor) -> None:
    """Write a portion to its rows on the device where the chunk's bytes are; arguments as for `place_on_host`."""
    destination = portion.filling.destination
    for found, stack in _stacks(portion, memory):
        parts = _cut(portion, stack)
        for taken, rows in paired_progressions(range(len(found)), portion.rows[found.start : found.stop].tolist()):
            into = destination[rows.start : rows.stop : rows.step]
            # Transposed and converted by the one operation.
            into.copy_(parts[taken.start : taken.stop : taken.step])


def _cut(portion: Portion, stack: torch.Tensor) -> torch.Tensor:
    export = portion.filling.export
    return cut_shard(export.key, stack, export.shard, export.shape)


def _stacks(portion: Portion, memory: torch.Tensor) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield a portion's tensors as `[tensors, *shape]`, and which they are: those that lie evenly apart as one view.

    The experts of a packed parameter mostly do: what lies between two of them is of one size.
    """
    dtype, shape = portion.filling.dtype, portion.filling.shape
    start = 0
    for places in [_evenly(portion.places)] if portion.even else progressions(portion.places.tolist()):
        # A file of several dtypes has no gaps, so what follows another dtype may not be aligned.
        aligned = not places.start % dtype.itemsize and not places.step % dtype.itemsize
        for part in [places] if aligned else [range(place, place + 1) for place in places]:
            yield range(start, start + len(part)), _stack(memory, part, dtype, shape)
            start += len(part)


def _evenly(places: Numbers) -> range:
    first, last = int(places[0]), int(places[-1])
    return range(first, last + 1, (last - first) // (len(places) - 1) if len(places) > 1 else 1)


def _stack(memory: torch.Tensor, places: range, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size_bytes = math.prod(shape) * dtype.itemsize
    data = memory[places[0] : places[-1] + size_bytes]
    flat = (data.clone() if int(data.storage_offset()) % dtype.itemsize else data).view(dtype)
    if len(places) == 1:
        return flat.view(1, *shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return flat.as_strided((len(places), *shape), (places.step // dtype.itemsize, *strides))
