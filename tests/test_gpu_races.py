"""On a real GPU: torch's stream sanitizer finds no race in a staged save, and what follows it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SAVES = """
import sys
import torch
from packckpt import AdamState, CheckpointSaver, Export, load_checkpoint

path, folder = sys.argv[1], sys.argv[2]
parameters = [
    torch.nn.Parameter(torch.arange(48 * 64 * 8, device="cuda", dtype=torch.float32).reshape(48, 64, 8) / (1 + number))
    for number in range(4)
]
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
rows = (range(48), range(47, -1, -1), range(0, 48, 3), (5, 4, 9, 40, 41))
exports = [
    Export(f"model.layers.{number % 2}.experts.{row}.m{number}", parameter, expert=row)
    for number, parameter in enumerate(parameters)
    for row in rows[number]
]
state = AdamState.from_optimizer(optimizer)
config = {"base_model_name_or_path": "m"}

def train():
    for parameter in parameters:
        parameter.grad = torch.sin(parameter)
    optimizer.step()

def held():
    moments = [[optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")] for p in parameters]
    return [t.detach().cpu().clone() for p, two in zip(parameters, moments) for t in (p, *two)]

# Buffers of 16 KiB: many windows, so that the two of them are filled again and again.
with CheckpointSaver(path, buffer_bytes=16 << 10, durable=False) as saver:
    for number in range(3):
        train()
        wanted = held()
        before = [(parameter, parameter.detach().clone()) for parameter in parameters]
        saver.prepare(f"{folder}/{number}", exports, state, config)
        with torch.no_grad():  # at once, on the training stream
            for parameter in parameters:
                parameter.fill_(-1)
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameter][name].fill_(-2)
        saver.finalize(f"{folder}/{number}")
        with load_checkpoint(f"{folder}/{number}") as checkpoint:
            checkpoint.restore(exports, optimizer)
        for found, expected, row_list in zip(held(), wanted, [r for r in rows for _ in range(3)], strict=True):
            rows_saved = torch.tensor(sorted(row_list))
            assert torch.equal(found[rows_saved], expected[rows_saved]), number
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
print("fine")
"""


@pytest.mark.parametrize("path", ["slice", "coalesced", "staged"])
def test_the_stream_sanitizer_finds_no_race(path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVES, path, str(tmp_path)],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "data race" not in done.stderr, done.stderr[-4000:]
    assert done.stdout == "fine\n"
