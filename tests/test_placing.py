"""A chunk's tensors reach their rows: evenly or not, aligned or not, whole or sharded, on the host or a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packckpt import Export, Shard, transfer
from packckpt.fillings import Filling, Portion
from packckpt.placing import place_on_device, place_on_host
from packckpt.tensorfile import tensor_bytes
from tests import emulated
from tests.builders import arange, assert_same_tensor

emulated.install_or_skip()


def chunk_of(tensors: list[torch.Tensor], gaps: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Lay tensors out in memory, with so many bytes before each; return it, and where each begins."""
    memory, places = bytearray(), []
    for tensor, gap in zip(tensors, gaps, strict=True):
        memory += b"\xa5" * gap
        places.append(len(memory))
        memory += tensor_bytes(tensor)
    return torch.frombuffer(memory, dtype=torch.uint8), places


def place(
    destination: torch.Tensor, export: Export, tensors: list[torch.Tensor], rows: list[int], gaps: list[int]
) -> None:
    memory, places = chunk_of(tensors, gaps)
    filling = Filling(destination, export, tensors[0].dtype, tuple(tensors[0].shape), np.array(places), np.array(rows))
    even = len(set(np.diff(places))) < 2
    portion = Portion(filling, np.array(rows), np.array(places), even)
    if destination.device.type == "cpu":
        place_on_host(portion, memory)
    else:
        place_on_device(portion, emulated.to_device(memory))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return emulated.to_host(tensor) if tensor.device.type != "cpu" else tensor


PLACES = pytest.mark.parametrize("where", [lambda tensor: tensor, emulated.to_device], ids=["host", "device"])


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gaps", [[0] * 5, [8] * 5, [0, 8, 0, 4, 40], [1, 3, 0, 2, 5], [3, 0, 0, 0, 0]], ids=str)
def test_rows_in_any_order(where: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, gaps: list[int]) -> None:
    source = arange(7, 3, 5, dtype=torch.float32)
    rows = [6, 0, 3, 1, 5]
    target = where(torch.zeros(7, 5, 3, dtype=dtype))
    place(target.transpose(1, 2), Export("k", target, expert=0), [source[row] for row in rows], rows, gaps)
    wanted = torch.zeros(7, 3, 5)
    wanted[rows] = source[rows]
    assert_same_tensor(on_host(target), wanted.transpose(1, 2).contiguous().to(dtype))


def test_what_is_converted_is_no_work_for_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_UNSHARED_ELEMENTS", 4)
    converted: list[int] = []
    copy = torch.Tensor.copy_

    def recording_copy(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        converted.append(source.numel())
        return copy(self, source)

    source, target = arange(6, 3, 5, dtype=torch.float32), torch.zeros(6, 5, 3, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    for rows in ([3], [4, 0, 1]):
        place(
            target.transpose(1, 2), Export("k", target, expert=0), [source[row] for row in rows], rows, [0] * len(rows)
        )
    monkeypatch.undo()
    wanted = torch.zeros(6, 5, 3, dtype=torch.float64)
    for row in (3, 4, 0, 1):
        wanted[row] = source[row].T
    assert_same_tensor(target, wanted)
    assert max(converted) <= 4
    assert sum(converted) == 4 * 15


@PLACES
@pytest.mark.parametrize("shard", [Shard(1, 2, 0), Shard(1, 2, 1), Shard(0, 2, 0, (2, 4))], ids=str)
def test_a_shard_of_each(where: Callable[[torch.Tensor], torch.Tensor], shard: Shard) -> None:
    whole = arange(4, 6, 4, dtype=torch.float32)
    part = whole[:, 3:] if shard.component_sizes is None and not shard.dim else whole[:, :, 2:]
    if shard.component_sizes is not None:
        part = whole[:, [0, 2, 3]]
    target = where(torch.zeros(4, part.shape[2], part.shape[1]))
    export = Export("k", target, expert=0, shard=shard)
    place(target.transpose(1, 2), export, list(whole[[2, 0, 3]]), [2, 0, 3], [0, 0, 0])
    wanted = part.clone()
    wanted[1] = 0
    assert_same_tensor(on_host(target), wanted.transpose(1, 2).contiguous())


@given(
    rows=st.permutations(range(9)).flatmap(lambda order: st.integers(1, 9).map(lambda count: list(order)[:count])),
    gap=st.lists(st.integers(0, 9), min_size=9, max_size=9),
    step=st.integers(1, 3),
    on_device=st.booleans(),
)
def test_any_rows_and_gaps(rows: list[int], gap: list[int], step: int, on_device: bool) -> None:
    """The destination is every `step`-th row of a longer tensor, so nothing of it is dense."""
    source = arange(9, 2, 3, dtype=torch.float32)
    held = torch.zeros(9 * step, 3, 2)
    long = emulated.to_device(held) if on_device else held
    target = long[::step]
    place(target.transpose(1, 2), Export("k", target, expert=0), [source[r] for r in rows], rows, gap[: len(rows)])
    wanted = torch.zeros(9 * step, 3, 2)
    for row in rows:
        wanted[row * step] = source[row].T
    assert_same_tensor(on_host(long), wanted)
