"""When prepare returns, the trainer may change everything: nothing saved may change with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import CheckpointSaver
from tests import emulated
from tests.builders import (
    CONFIG,
    PATHS,
    STRIDES,
    Trainer,
    allocated_on_device,
    assert_same_content,
    expected_content,
    read_content,
)

emulated.install_or_skip()


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def make(place: Any, dtype: torch.dtype, strides: str, own_master: bool) -> Trainer:
    trainer = Trainer(place)
    for layer in (0, 1):
        step = place(torch.tensor(7.0 + layer))
        trainer.packed(
            "a", layer=layer, dtype=dtype, own_master=own_master, strides=STRIDES[strides], step=step, rows=8, columns=8
        )
        trainer.export_rows(
            "sparse", trainer.parameter(4, 3, 2, dtype=dtype, own_master=own_master), [3, 1], layer=layer
        )
        trainer.dense("b", layer=layer, dtype=dtype, own_master=own_master, strides=STRIDES[strides])
    return trainer


def change(trainer: Trainer) -> None:
    with torch.no_grad():
        for tensor in trainer.tensors():
            tensor.add_(1)


@contextmanager
def changing(trainer: Trainer) -> Iterator[list[int]]:
    """Change everything over and over, on a thread of its own."""
    done, rounds = threading.Event(), [0]

    def run() -> None:
        while not done.is_set():
            change(trainer)
            rounds[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
    finally:
        done.set()
        thread.join()


# Float32 contiguous state on the host is where `.cpu()`, `.float()` and `.contiguous()` return the same object.
CASES = {
    "host float32, the parameter is the master": (host, torch.float32, "contiguous", True),
    "host float32": (host, torch.float32, "contiguous", False),
    "host float32, transposed": (host, torch.float32, "transposed", True),
    "host float32, gapped": (host, torch.float32, "gapped", True),
    "host bfloat16": (host, torch.bfloat16, "contiguous", False),
    "device float32": (emulated.to_device, torch.float32, "contiguous", True),
    "device bfloat16, transposed": (emulated.to_device, torch.bfloat16, "transposed", False),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
class TestAfterPrepare:
    def test_one_change_of_everything(self, path: Any, case: str, tmp_path: Path) -> None:
        trainer = make(*CASES[case])
        expected = expected_content(trainer)
        saver = CheckpointSaver(path, durable=False)
        saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        change(trainer)
        trainer.optimizer.param_groups[0].update(lr=77.0)
        trainer.exports.clear()
        saver.finalize(tmp_path / "c")

        assert_same_content(read_content(tmp_path / "c"), expected)
        assert '"learning_rate": 0.001' in (tmp_path / "c" / "checkpoint.json").read_text()

    def test_a_thread_that_changes_everything_in_a_loop(self, path: Any, case: str, tmp_path: Path) -> None:
        trainer = make(*CASES[case])
        expected = expected_content(trainer)
        saver = CheckpointSaver(path, durable=False)
        saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        with changing(trainer) as rounds:
            while not rounds[0]:
                pass
            saver.finalize(tmp_path / "c")

        assert rounds[0] > 0
        assert_same_content(read_content(tmp_path / "c"), expected)


def test_the_configuration_is_a_copy_too(tmp_path: Path) -> None:
    trainer = make(*CASES["host float32"])
    config: dict[str, Any] = {**CONFIG, "modules": ["a"]}
    saver = CheckpointSaver(durable=False)
    saver.prepare(tmp_path / "c", trainer.exports, trainer.state, config)
    config["modules"].append("b")
    config["r"] = 99
    saver.finalize(tmp_path / "c")

    assert '"b"' not in (tmp_path / "c" / "adapter_config.json").read_text()
    assert '"r": 4' in (tmp_path / "c" / "adapter_config.json").read_text()


def test_the_change_would_be_seen() -> None:
    trainer = make(*CASES["host bfloat16"])
    before = expected_content(trainer)
    change(trainer)

    assert all(
        not torch.equal(before[name], value)
        for name, value in expected_content(trainer).items()
        if name.startswith(("lora/", "master/", "exp_avg/", "exp_avg_sq/"))
    )


def test_the_saver_lets_the_trainer_go(tmp_path: Path) -> None:
    """Between prepare and finalize no tensor of the trainer is kept alive on the device."""
    before = allocated_on_device()
    trainer = make(*CASES["device float32"])
    saver = CheckpointSaver(durable=False)
    saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
    del trainer

    assert allocated_on_device() == before
    saver.finalize(tmp_path / "c")
