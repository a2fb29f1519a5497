"""One rank's process: `python -m benchmarks.worker ORDER RANK RESULT`. It measures, and writes what a record needs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks import host_memory, nvml
from benchmarks.cases import parse_case
from benchmarks.devices import Device, open_device
from benchmarks.missing import Missing
from benchmarks.outcome import Outcome, describe
from benchmarks.parent import end_with_parent
from benchmarks.passes import PASSES
from benchmarks.record import Pass
from benchmarks.stopwatch import Stopwatch
from benchmarks.task import Order
from benchmarks.workload import RealTensors, Trainer, build
from packckpt import AdamState, CheckpointSaver, Export, TransferLog


class Worker:
    """Holds what the passes of one process share: device, trainer, saver."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order = order
        self.rank = rank
        self.together = order.task.concurrency == "together" and order.task.world_size > 1
        self.device: Device = open_device(order.device, 0 if order.share_device else _local_rank(rank))
        self.gpu = nvml.open_gpu(self.device.uuid) if self.device.kind == "cuda" else Missing("no GPU")
        self.watch = Stopwatch(self.device)
        self.scratch = Path(order.scratch)
        self._trainer: Trainer | None = None
        self._saver: CheckpointSaver | None = None
        self._saves = 0

    def run(self, what: Pass) -> Outcome:
        """Run one pass; a failure is an outcome too."""
        outcome = Outcome()
        try:
            PASSES[what](self, outcome)
        except Exception as error:
            outcome = Outcome(status="failed", error=describe(error))
        return outcome

    @property
    def trainer(self) -> Trainer:
        """The trainer of this rank, built when it is first needed."""
        if self._trainer is None:
            case = parse_case(self.order.task.case_id or "")
            tensors = RealTensors(self.device.torch_device, case.seed + 1000 * self.rank)
            self._trainer = build(case, self.rank, tensors)
        return self._trainer

    @property
    def saver(self) -> CheckpointSaver:
        """The saver, after a first save of a few bytes: what it imports and opens is then no part of a figure."""
        if self._saver is None:
            self._saver = CheckpointSaver(
                path=self.order.task.implementation,  # type: ignore[arg-type]  # checked by Arm
                durable=self.order.durable,
                timeout_seconds=self.order.timeout_seconds,
            )
            parameter = torch.nn.Parameter(torch.ones(2, 2, 2, device=self.device.torch_device))
            exports = [Export(f"r{self.rank}.{row}", parameter, expert=row) for row in (0, 1)]
            state = AdamState.from_optimizer(torch.optim.AdamW([parameter], lr=1e-4))
            where = self.scratch / "warm-up"
            self._saver.save(where, exports, state, {"base_model_name_or_path": "warm-up"})
            self.remove(where)
            self._saver.release_buffers()  # what a saver keeps is in the peak of the first save that is measured
        return self._saver

    def warm_up(self) -> None:
        """Build saver and trainer now: what that takes is no part of what is measured next."""
        _ = self.saver, self.trainer

    def next_directory(self) -> Path:
        """Return a checkpoint directory that no save has had."""
        self._saves += 1
        return self.scratch / f"save-{self._saves}"

    def remove(self, directory: Path) -> None:
        """Remove a checkpoint once every rank is done with it."""
        self.barrier()
        if self.rank == self.order.task.ranks[0]:
            shutil.rmtree(directory, ignore_errors=True)

    def expect_warm(self) -> None:
        """Make the next save a steady one: save once where no pass before did."""
        if not self._saves:
            directory = self.next_directory()
            self.prepare(directory)
            self.saver.finalize(directory)
            self.remove(directory)

    def barrier(self) -> None:
        """Wait until every rank that runs is here."""
        if self.together:
            torch.distributed.barrier()

    def prepare(self, directory: Path) -> TransferLog:
        """Prepare one save."""
        trainer = self.trainer
        return self.saver.prepare(directory, trainer.exports, trainer.state, trainer.config)

    def close(self) -> None:
        """Give the process groups back."""
        if self._saver is not None:
            self._saver.close()


def _local_rank(rank: int) -> int:
    return int(os.environ.get("LOCAL_RANK", rank))


def _join_ranks(order: Order, rank: int) -> None:
    """Meet the other ranks; control messages go over gloo, whatever the device."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=(Path(order.scratch) / "rendezvous").absolute().as_uri(),
        rank=rank,
        world_size=order.task.world_size,
        timeout=timedelta(seconds=order.timeout_seconds),
    )


def main(arguments: list[str]) -> None:
    """Run the passes of an order on one rank, and write the outcomes."""
    order, rank, result = Order.read(Path(arguments[0])), int(arguments[1]), Path(arguments[2])
    end_with_parent(os.getppid())
    for module in order.imports:
        importlib.import_module(module)
    torch.set_num_threads(order.threads)
    outcomes: dict[str, Any] = {}
    device: dict[str, Any] | None = None
    try:
        host_memory.touch_memory(order.touch_bytes)
        worker = Worker(order, rank)
        if worker.together:
            _join_ranks(order, rank)
        device = _describe_device(worker)
        for what in order.task.passes:
            outcomes[what] = asdict(worker.run(what))
        worker.close()
    except Exception as error:
        failed = asdict(Outcome(status="failed", error=describe(error)))
        outcomes = {what: outcomes.get(what, failed) for what in order.task.passes}
    result.write_text(json.dumps({"device": device, "outcomes": outcomes}), encoding="utf-8")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _describe_device(worker: Worker) -> dict[str, Any]:
    uuid = worker.device.uuid
    index = worker.device.torch_device.index
    return {
        "kind": worker.device.kind,
        "name": worker.device.name,
        "index": index,
        "uuid_hash": None if isinstance(uuid, Missing) else nvml.hash_uuid(uuid),
        "shared": worker.order.share_device and worker.order.task.world_size > 1,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
