"""The host side of a save, by pytest-benchmark: `python -m pytest benchmarks`. Not part of `make test`.

Every target runs once a round (`iterations=1`) with a set-up of its own, so that the counts are those reported.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import parse_case
from benchmarks.paths import SAVER_PATHS
from benchmarks.workload import RealTensors, ShadowTensors, Trainer, build
from packckpt import CheckpointSaver, load_checkpoint, plan_transfers, restore_checkpoint, verify_checkpoint

ROUNDS, WARM_UPS = 5, 1
MODEL = "qwen3-30b-a3b/lora8/ep8/l1/bfloat16"
WIDE = "deepseek-v3/lora8/ep1/l29/bfloat16"
DIGEST_BYTES = 64 << 20


@pytest.fixture
def trainer() -> Trainer:
    return build(parse_case(MODEL), 0, RealTensors(torch.device("cpu"), 0))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Directories that no save has had."""
    numbers = itertools.count()
    yield lambda: tmp_path / f"save-{next(numbers)}"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("path", SAVER_PATHS)
def test_planning(benchmark: Any, path: str) -> None:
    wide = build(parse_case(WIDE), 0, ShadowTensors())
    plan = benchmark.pedantic(
        plan_transfers,
        args=(wide.exports, wide.state, path),
        rounds=ROUNDS,
        warmup_rounds=WARM_UPS,
        iterations=1,
    )
    benchmark.extra_info.update(exports=len(wide.exports), optimizer_calls=plan.optimizer_calls)


@pytest.mark.parametrize("path", SAVER_PATHS)
def test_prepare(benchmark: Any, trainer: Trainer, fresh: Callable[[], Path], path: str) -> None:
    """Transfer and snapshot."""
    saves: list[Any] = []
    saver = CheckpointSaver(path=path)  # type: ignore[arg-type]  # one of its paths

    def set_up() -> tuple[tuple[Path], dict[str, Any]]:
        saver.close()  # drops the save before it
        return (fresh(),), {}

    def prepare(where: Path) -> None:
        saves.append(saver.prepare(where, trainer.exports, trainer.state, trainer.config))

    benchmark.pedantic(prepare, setup=set_up, rounds=ROUNDS, warmup_rounds=WARM_UPS, iterations=1)
    saver.close()
    log = saves[-1]
    benchmark.extra_info.update(
        saves=len(saves),
        optimizer_calls=log.optimizer.calls,
        optimizer_bytes=log.optimizer.bytes,
        weight_calls=log.weight.calls,
        weight_bytes=log.weight.bytes,
    )


@pytest.mark.parametrize("path", SAVER_PATHS)
def test_commit(benchmark: Any, trainer: Trainer, fresh: Callable[[], Path], path: str) -> None:
    """Merge, digest, write, sync, rename."""
    saver = CheckpointSaver(path=path)  # type: ignore[arg-type]  # one of its paths
    digests: list[str] = []

    def set_up() -> tuple[tuple[Path], dict[str, Any]]:
        where = fresh()
        saver.prepare(where, trainer.exports, trainer.state, trainer.config)
        return (where,), {}

    benchmark.pedantic(
        lambda where: digests.append(saver.finalize(where)),
        setup=set_up,
        rounds=ROUNDS,
        warmup_rounds=WARM_UPS,
        iterations=1,
    )
    benchmark.extra_info.update(saves=len(digests), digests=len(set(digests)))


def test_digest(benchmark: Any) -> None:
    data = bytes(DIGEST_BYTES)
    benchmark.pedantic(
        lambda: hashlib.blake2b(data, digest_size=32).hexdigest(),
        rounds=ROUNDS,
        warmup_rounds=WARM_UPS,
        iterations=1,
    )
    benchmark.extra_info.update(bytes=DIGEST_BYTES)


@pytest.mark.parametrize("what", ["verify", "load and restore", "restore in one reading"])
def test_reading_back(benchmark: Any, trainer: Trainer, fresh: Callable[[], Path], what: str) -> None:
    where = fresh()
    CheckpointSaver().save(where, trainer.exports, trainer.state, trainer.config)
    masters = [(export.parameter, trainer.state.master_of(export.parameter)) for export in trainer.exports]
    pairs = list({id(parameter): (parameter, master) for parameter, master in masters}.values())

    def load_and_restore() -> None:
        with load_checkpoint(where) as checkpoint:
            checkpoint.restore(trainer.exports, trainer.state.optimizer, pairs)

    def restore_in_one_reading() -> None:
        restore_checkpoint(where, trainer.exports, trainer.state.optimizer, pairs).close()

    targets: dict[str, Callable[[], object]] = {
        "verify": lambda: verify_checkpoint(where),
        "load and restore": load_and_restore,
        "restore in one reading": restore_in_one_reading,
    }
    benchmark.pedantic(targets[what], rounds=ROUNDS, warmup_rounds=WARM_UPS, iterations=1)
    benchmark.extra_info.update(exports=len(trainer.exports))
