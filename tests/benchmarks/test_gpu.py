"""On a real GPU: every count agrees with the profiler's, and every figure is there or has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.cases import parse_case
from benchmarks.paths import SAVER_PATHS
from benchmarks.predict import predict
from benchmarks.worker import Worker
from tests.benchmarks.orders import make_order

CASE = "qwen3-30b-a3b/lora8/ep8/l1/bfloat16"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize("path", SAVER_PATHS)
def test_plan_log_observer_and_profiler_agree(tmp_path: Path, path: str) -> None:
    worker = Worker(make_order(tmp_path, path, ("observe", "profile"), case_id=CASE, device="cuda"), 0)
    observed, profiled = worker.run("observe"), worker.run("profile")
    assert (observed.error, profiled.error) == (None, None)
    predicted = predict(parse_case(CASE), path, 0, 1, "cuda")
    for what, count in (("optimizer", predicted.optimizer), ("all", predicted.all)):
        expected = {"calls": count.calls, "bytes": count.bytes}
        assert observed.transfers[what] == {"logged": expected, "observed": expected}
        assert profiled.transfers[what] == {"logged": expected, "profiled": expected}
    assert observed.digest == profiled.digest
    assert profiled.samples[0]["memcpy_seconds"] > 0


@pytest.mark.parametrize("path", SAVER_PATHS)
def test_timing_and_memory_have_their_device_figures(tmp_path: Path, path: str) -> None:
    worker = Worker(make_order(tmp_path, path, ("memory", "timing"), case_id=CASE, device="cuda"), 0)
    memory, timing = worker.run("memory"), worker.run("timing")
    assert (memory.error, timing.error) == (None, None)
    for sample in timing.samples:
        assert 0 < sample["device_seconds"] <= 1.1 * sample["fence_seconds"]
    resident = predict(parse_case(CASE), path, 0, 1, "cuda").resident_device_bytes
    for sample in memory.samples:
        assert sample["device_resident_bytes"] >= resident
        assert sample["device_peak_allocated_bytes"] is not None


def test_torch_stager_runs_beside(tmp_path: Path) -> None:
    worker = Worker(
        make_order(tmp_path, "slice", ("reference",), case_id=CASE, device="cuda", path="default-stager"), 0
    )
    outcome = worker.run("reference")
    assert outcome.error is None
    assert all(sample["device_seconds"] > 0 for sample in outcome.samples)
