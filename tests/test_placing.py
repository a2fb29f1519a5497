"""Rows go back into tensors on an accelerator through a ring: in order, in pieces, without waiting for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from packckpt import Export
from packckpt.placing import Placer
from tests import emulated
from tests.builders import arange, assert_same_tensor

emulated.install_or_skip()


def stacks(source: torch.Tensor, keys: Sequence[str]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Give rows as a checkpoint does: in an order of its own, some of them together."""
    for positions in (list(range(len(keys)))[1::2], list(range(len(keys)))[::2][::-1]):
        if positions:
            rows = [int(keys[position]) for position in positions]
            yield positions, source[rows].transpose(1, 2).contiguous()


@pytest.mark.parametrize("place", [lambda tensor: tensor, emulated.to_device], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_stacks_in_any_order_reach_their_rows(
    place: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    source = torch.arange(7 * 3 * 5).reshape(7, 3, 5).to(torch.float32)
    rows = [6, 0, 3, 1, 5]
    target = place(torch.zeros(7, 5, 3, dtype=dtype).transpose(1, 2))
    with Placer(1 << 10) as placer:
        placer.place(target, [Export(str(row), target, expert=row) for row in rows], partial(stacks, source))
    wanted = torch.zeros(7, 3, 5)
    wanted[rows] = source[rows]
    assert_same_tensor(emulated.to_host(target) if target.device.type != "cpu" else target, wanted.to(dtype))


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are not aligned in their file were copied, one by one."""
    monkeypatch.setattr("packckpt.placing._MOST_WAITING_BYTES", 100)
    target, waiting = torch.zeros(64, 2, 3), []
    with Placer(1 << 10) as placer:

        def one_by_one(keys: Sequence[str]) -> Iterator[tuple[list[int], torch.Tensor]]:
            for position, key in enumerate(keys):
                waiting.append(placer._waiting_bytes)
                yield [position], torch.full((1, 3, 2), float(key))

        placer.place(target, [Export(str(row), target, expert=row) for row in range(64)], one_by_one)
    assert 0 < max(waiting) <= 100
    assert_same_tensor(target, torch.arange(64.0).reshape(64, 1, 1).expand(64, 2, 3).contiguous())


@pytest.mark.parametrize("buffer_bytes", [64, 96, 200, 1 << 20])
def test_tensors_of_many_sizes_go_through_a_small_ring(buffer_bytes: int) -> None:
    """Small and full chunks in turn: letting the oldest go need not make room in one piece."""
    shapes = [(8, 1, 2), (8, 4, 4), (3, 2, 2), (8, 4, 4), (5, 4, 4), (1, 4, 4), (8, 1, 1), (8, 4, 4)]
    wanted = [arange(*shape, start=100 * number) for number, shape in enumerate(shapes)]
    targets = [emulated.to_device(torch.zeros(shape)) for shape in shapes]
    with Placer(64, buffer_bytes) as placer:
        for target, source in zip(targets, wanted, strict=True):
            exports = [Export(str(row), target, expert=row) for row in range(len(source))]
            placer.place(target, exports, partial(stacks, source))
    for target, source in zip(targets, wanted, strict=True):
        assert_same_tensor(emulated.to_host(target), source)
