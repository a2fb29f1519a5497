"""The passes of a worker: what each one runs, and which figures it keeps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.ceiling import measure_ceiling
from benchmarks.devices import Device
from benchmarks.host_memory import Sampler, Samples, minor_faults, settle_heap
from benchmarks.memory_watch import MemoryWatch, difference
from benchmarks.missing import Missing
from benchmarks.observer import CopyObserver, counted_synchronizations
from benchmarks.outcome import Outcome
from benchmarks.profile import profiled
from benchmarks.record import COUNTED, FIGURES, Count, Pass
from benchmarks.reference import StagerReference, views_of
from packckpt import TransferLog

if TYPE_CHECKING:
    from benchmarks.worker import Worker

TIMELINE_POINTS = 240


def _timing(worker: Worker, outcome: Outcome) -> None:
    worker.warm_up()
    for number in range(worker.order.saves):
        directory = worker.next_directory()
        gc.collect()
        worker.device.synchronize()
        worker.barrier()
        energy_before = _energy(worker)
        faults = [minor_faults()]
        prepared = worker.watch.measure(partial(worker.prepare, directory))
        faults.append(minor_faults())
        finalized = worker.watch.measure(partial(worker.saver.finalize, directory))
        faults.append(minor_faults())
        outcome.add_sample(
            number,
            {
                "fence_seconds": prepared.total_seconds,
                "prepare_seconds": prepared.call_seconds,
                "finalize_seconds": finalized.call_seconds,
                "device_seconds": prepared.device_seconds,
                "prepare_minor_faults": faults[1] - faults[0],
                "finalize_minor_faults": faults[2] - faults[1],
                "energy_joules": difference(energy_before, _energy(worker)),
            },
        )
        _keep_log(outcome, prepared.value)
        outcome.keep_digest(finalized.value)
        worker.remove(directory)


def _memory(worker: Worker, outcome: Outcome) -> None:
    worker.warm_up()
    for number in range(worker.order.memory_saves):
        directory = worker.next_directory()
        settle_heap()
        worker.barrier()
        with MemoryWatch(worker.device, worker.gpu) as watch:
            log = worker.prepare(directory)
            worker.device.synchronize()
            watch.prepared()
            digest = worker.saver.finalize(directory)
        outcome.add_sample(number, watch.figures)
        outcome.reasons.update(watch.remarks)
        _keep_log(outcome, log)
        outcome.keep_digest(digest)
        del log
        worker.remove(directory)


def _timeline(worker: Worker, outcome: Outcome) -> None:
    worker.warm_up()
    worker.expect_warm()
    directory = worker.next_directory()
    settle_heap()
    worker.barrier()
    allocated = worker.device.memory().allocated_bytes
    with Sampler(_device_reader(worker.device, allocated)) as samples:
        marks = [time.perf_counter()]
        log = worker.prepare(directory)
        worker.device.synchronize()
        marks.append(time.perf_counter())
        digest = worker.saver.finalize(directory)
        marks.append(time.perf_counter())
    worker.remove(directory)
    _keep_log(outcome, log)
    outcome.keep_digest(digest)
    outcome.timeline = _columns(samples, marks)
    if isinstance(allocated, Missing):
        outcome.reasons["timeline.device_allocated_bytes"] = allocated.reason


def _observe(worker: Worker, outcome: Outcome) -> None:
    worker.warm_up()
    trainer, directory = worker.trainer, worker.next_directory()
    with ExitStack() as stack:
        waits = None
        if worker.device.kind != "cpu":
            waits = stack.enter_context(counted_synchronizations(worker.device.kind))
        observer = stack.enter_context(CopyObserver(trainer.optimizer_tensors, trainer.parameter_tensors))
        log = worker.prepare(directory)
    digest = worker.saver.finalize(directory)
    worker.remove(directory)
    outcome.add_sample(
        0,
        {
            "synchronize_calls": Missing("the CPU has nothing to wait for") if waits is None else waits[0],
            "item_calls": observer.item_calls,
        },
    )
    _keep_log(outcome, log)
    outcome.keep_digest(digest)
    if worker.device.kind == "cpu" and worker.order.task.implementation == "staged":
        for what in ("all", "optimizer"):
            outcome.add_count(what, "observed", Missing("on the CPU the staged path gathers by numpy, below torch"))
        return
    outcome.add_count("all", "observed", observer.count("optimizer", "weight", "other"))
    own_masters = any(trainer.state.master_of(p) is p for p in trainer.parameter_tensors)
    outcome.add_count(
        "optimizer",
        "observed",
        Missing("parameters are their own masters: a copy of one cannot be told from the other")
        if own_masters
        else observer.count("optimizer"),
    )


def _profile(worker: Worker, outcome: Outcome) -> None:
    if worker.device.kind != "cuda":
        why = Missing(f"torch's profiler counts copies on CUDA only, and the device is {worker.device.kind}")
        outcome.add_sample(0, dict.fromkeys(FIGURES["profile"], why))
        outcome.reasons["digest"] = why.reason
        for what in COUNTED:
            outcome.add_count(what, "profiled", why)
        return
    worker.warm_up()
    directory = worker.next_directory()
    with profiled() as profile:
        log = worker.prepare(directory)
    digest = worker.saver.finalize(directory)
    worker.remove(directory)
    outcome.add_sample(0, {"memcpy_seconds": profile.memcpy_seconds, "synchronize_calls": profile.synchronize_calls})
    _keep_log(outcome, log)
    outcome.keep_digest(digest)
    outcome.add_count("all", "profiled", profile.transfers)
    outcome.add_count("optimizer", "profiled", _of_optimizer(profile.transfers, log))


def _reference(worker: Worker, outcome: Outcome) -> None:
    views = views_of(worker.trainer)
    stager = StagerReference(worker.device)
    for number in range(worker.order.saves):
        gc.collect()
        worker.barrier()
        faults = minor_faults()
        staged = worker.watch.measure(lambda: stager.stage(views))
        outcome.add_sample(
            number,
            {
                "fence_seconds": staged.total_seconds,
                "prepare_seconds": staged.call_seconds,
                "device_seconds": staged.device_seconds,
                "prepare_minor_faults": minor_faults() - faults,
            },
        )
        del staged
    stager.close()
    captures = "torch's stager captures only; it writes no checkpoint"
    outcome.reasons["digest"] = captures
    for what in ("optimizer", "all"):
        outcome.add_count(what, "logged", Missing("torch's stager keeps no log"))
        outcome.add_count(what, "observed", Missing("torch's stager copies storages below the dispatcher"))


def _ceiling(worker: Worker, outcome: Outcome) -> None:
    outcome.add_sample(0, measure_ceiling(worker.device, worker.scratch))


def _energy(worker: Worker) -> float | Missing:
    return worker.gpu if isinstance(worker.gpu, Missing) else worker.gpu.energy_joules()


def _keep_log(outcome: Outcome, log: TransferLog) -> None:
    total = Count(
        log.optimizer.calls + log.weight.calls + log.step.calls,
        log.optimizer.bytes + log.weight.bytes + log.step.bytes,
    )
    outcome.add_count("optimizer", "logged", Count(log.optimizer.calls, log.optimizer.bytes))
    outcome.add_count("all", "logged", total)


def _of_optimizer(seen: Count | Missing, log: TransferLog) -> Count | Missing:
    """The profiler knows no names: what the log calls weights and steps is taken off its count."""
    if isinstance(seen, Missing):
        return seen
    calls = seen.calls - log.weight.calls - log.step.calls
    size = seen.bytes - log.weight.bytes - log.step.bytes
    if calls < 0 or size < 0:
        return Missing(f"the profiler saw {seen.calls} copies, fewer than weights and steps alone")
    return Count(calls, size)


def _device_reader(device: Device, allocated: int | Missing) -> Callable[[], int | None]:
    if isinstance(allocated, Missing):
        return lambda: None

    def read() -> int | None:
        now = device.memory().allocated_bytes
        return None if isinstance(now, Missing) else now

    return read


def _columns(samples: Samples, marks: list[float]) -> dict[str, Any]:
    """Thin the samples to what a plot can show; each kept point is the one with the most memory of its stretch."""
    start = marks[0]
    indices = range(len(samples.seconds))
    stretch = max(1, -(-len(indices) // TIMELINE_POINTS))
    kept = [
        max(indices[first : first + stretch], key=lambda i: samples.host[i].resident_bytes)
        for first in range(0, len(indices), stretch)
    ]
    return {
        "seconds": [round(samples.seconds[i] - start, 6) for i in kept],
        "host_resident_bytes": [samples.host[i].resident_bytes for i in kept],
        "host_anonymous_bytes": [samples.host[i].anonymous_bytes for i in kept],
        "host_shared_bytes": [samples.host[i].shared_bytes for i in kept],
        "device_allocated_bytes": [samples.extra[i] for i in kept],
        "marks": [
            {"name": name, "start_seconds": round(a - start, 6), "end_seconds": round(b - start, 6)}
            for name, a, b in (("prepare", marks[0], marks[1]), ("finalize", marks[1], marks[2]))
        ],
    }


PASSES: dict[Pass, Callable[[Worker, Outcome], None]] = {
    "timing": _timing,
    "memory": _memory,
    "timeline": _timeline,
    "observe": _observe,
    "profile": _profile,
    "reference": _reference,
    "ceiling": _ceiling,
}
