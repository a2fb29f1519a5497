"""Rows of host tensors come to their places transposed and converted, whoever gathers and in whatever mode."""

from __future__ import annotations

import threading

import pytest
import torch

from packckpt import plan_transfers, transfer
from packckpt.gathering import HostGather, Sources
from tests.builders import STRIDES, Trainer, expected_content

ROWS = [range(6), range(5, -1, -1), (0, 2, 4), (3, 0, 5, 1)]


def gathered(trainer: Trainer, component: str) -> dict[str, torch.Tensor]:
    """Gather one file on another thread; return its tensors by key."""
    plan = plan_transfers(trainer.exports, trainer.state, "staged")
    (file,) = [file for file in plan.files if file.component == component]
    (window,) = file.windows(plan.buffer_bytes)
    (copy,) = window.copies
    memory = torch.empty(copy.bytes, dtype=torch.uint8).fill_(255).view(copy.dtype)
    thread = threading.Thread(target=HostGather(copy.runs, Sources(file), memory))
    thread.start()
    thread.join()
    found, start = {}, 0
    for export in file.exports:
        stop = start + export.shape[0] * export.shape[1]
        found[export.key] = memory[start:stop].view(export.shape)
        start = stop
    return found


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("shape", [(3, 5), (63, 65), (65, 64), (150, 70), (70, 150)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_transposed_in_blocks_or_at_once(shape: tuple[int, int], strides: str, dtype: torch.dtype) -> None:
    trainer = Trainer()
    for number, rows in enumerate(ROWS):
        parameter = trainer.parameter(6, *shape, dtype=dtype, state_dtype=torch.float32, strides=STRIDES[strides])
        trainer.export_rows(f"p{number}", parameter, rows)
    trainer.dense("d", *shape, dtype=dtype, strides=STRIDES[strides])
    expected = expected_content(trainer)
    found = gathered(trainer, "lora")
    assert len(found) == sum(map(len, ROWS)) + 1
    assert all(torch.equal(value, expected[f"lora/{key}"]) for key, value in found.items())


@pytest.mark.parametrize("most", [1, 5, 66, 132, 1 << 20])
def test_converted_in_pieces_that_torch_does_not_share(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_UNSHARED_ELEMENTS", most)
    converted: list[int] = []
    copy = torch.Tensor.copy_

    def recording_copy(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        converted.append(source.numel())
        return copy(self, source)

    trainer = Trainer()
    trainer.packed("a", experts=3, rows=10, columns=66, state_dtype=torch.bfloat16)
    trainer.dense("d", 7, 9, state_dtype=torch.float64)
    expected = expected_content(trainer)
    monkeypatch.setattr(torch.Tensor, "copy_", recording_copy)
    found = gathered(trainer, "exp_avg")
    monkeypatch.undo()
    assert all(torch.equal(value, expected[f"exp_avg/{key}"]) for key, value in found.items())
    assert max(converted) <= most
    assert sum(converted) == 3 * 660 + 63


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_converted_on_a_thread_that_knows_no_mode(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        trainer = Trainer()
        trainer.packed("a", experts=5, rows=66, columns=70, state_dtype=dtype)
        expected = expected_content(trainer)
        found = gathered(trainer, "master")
        assert all(torch.equal(value, expected[f"master/{key}"]) for key, value in found.items())
    assert len(found) == 5
