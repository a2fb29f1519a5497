"""Rows go back into tensors on an accelerator through a ring: in order, in pieces, without waiting for ever."""

from __future__ import annotations

import pytest
import torch

from packckpt import Export
from packckpt.placing import Placer
from tests import emulated
from tests.builders import arange, assert_same_tensor

emulated.install_or_skip()


@pytest.mark.parametrize("buffer_bytes", [64, 96, 200, 1 << 20])
def test_tensors_of_many_sizes_go_through_a_small_ring(buffer_bytes: int) -> None:
    """Small and full chunks in turn: letting the oldest go need not make room in one piece."""
    shapes = [(8, 1, 2), (8, 4, 4), (3, 2, 2), (8, 4, 4), (5, 4, 4), (1, 4, 4), (8, 1, 1), (8, 4, 4)]
    wanted = [arange(*shape, start=100 * number) for number, shape in enumerate(shapes)]
    targets = [emulated.to_device(torch.zeros(shape)) for shape in shapes]
    with Placer(64, buffer_bytes) as placer:
        for target, source in zip(targets, wanted, strict=True):
            exports = [Export(str(row), target, expert=row) for row in range(len(source))]
            placer.place(target, exports, lambda key, source=source: source[int(key)].T.contiguous())  # type: ignore[misc]
    for target, source in zip(targets, wanted, strict=True):
        assert_same_tensor(emulated.to_host(target), source)
