"""What `plan` predicts is what a run observes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.cases import parse_case
from benchmarks.predict import predict
from benchmarks.worker import Worker
from tests.benchmarks.orders import TINY, make_order

CASES = [
    TINY,
    "olmoe-1b-7b/lora8/ep8/l2/bfloat16",
    "mixtral-8x7b/lora1/ep2/l1/float16",
    "gpt-oss-20b/lora1/ep8/l1/bfloat16",
    "sweep/65536B/ep8/l1/bfloat16",
    "sweep/4194304B/ep1/l1/bfloat16",
    *(f"irregular/lora8/{layout}/ep2/l1/bfloat16" for layout in ("sparse", "reordered", "interleaved", "gapped")),
    "irregular/lora8/vacant/ep1/l1/bfloat16",
]


@pytest.mark.parametrize("path", ["slice", "coalesced"])
@pytest.mark.parametrize("case_id", CASES)
def test_transfers_and_bytes_are_the_observed_ones(tmp_path: Path, case_id: str, path: str) -> None:
    outcome = Worker(make_order(tmp_path, path, ("observe",), case_id=case_id), 0).run("observe")
    assert outcome.status == "ok", outcome.error
    predicted = predict(parse_case(case_id), path, 0, 1, "cpu")
    for what, count in (("optimizer", predicted.optimizer), ("all", predicted.all)):
        expected = {"calls": count.calls, "bytes": count.bytes}
        assert outcome.transfers[what] == {"logged": expected, "observed": expected}


@pytest.mark.parametrize("path", ["slice", "coalesced"])
@pytest.mark.parametrize("case_id", ["olmoe-1b-7b/lora8/ep1/l2/bfloat16"])
def test_predicted_peaks_are_within_a_tenth(tmp_path: Path, case_id: str, path: str) -> None:
    outcome = Worker(make_order(tmp_path, path, ("memory",), case_id=case_id), 0).run("memory")
    assert outcome.status == "ok", outcome.error
    predicted = predict(parse_case(case_id), path, 0, 1, "cpu").to_record()
    steady = outcome.samples[-1]
    for name in ("host_peak_bytes", "host_peak_prepare_bytes", "host_peak_finalize_bytes"):
        assert steady[name] == pytest.approx(predicted[name], rel=0.1), name


@pytest.mark.parametrize("path", ["slice", "coalesced", "staged"])
def test_a_planned_disk_use_is_what_lies_on_disk(tmp_path: Path, path: str) -> None:
    worker = Worker(make_order(tmp_path, path, ("timing",)), 0)
    predicted = predict(parse_case(TINY), path, 0, 1, "cpu")
    assert worker.saver is not None
    where = worker.next_directory()
    worker.prepare(where)
    snapshot = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    worker.saver.finalize(where)
    checkpoint = sum(f.stat().st_size for f in where.rglob("*") if f.is_file())
    # Headers and the manifest name every key.
    peak = checkpoint if path == "staged" else snapshot + checkpoint
    assert predicted.disk_bytes == pytest.approx(peak, rel=0.15)


def test_deepseek_v3_whole_is_planned_in_no_time_and_no_memory() -> None:
    case = parse_case("deepseek-v3/lora8/ep8/l58/bfloat16")
    start = time.process_time()
    predictions = [predict(case, path, rank, 8, "cuda") for path in ("slice", "coalesced") for rank in range(8)]
    assert time.process_time() - start < 10
    assert sum(p.optimizer.calls for p in predictions[:8]) == 58 * 256 * 6 * 3
    assert sum(p.optimizer.calls for p in predictions[8:]) == 58 * 8 * 6 * 3
    assert sum(p.optimizer.bytes for p in predictions[:8]) == sum(p.optimizer.bytes for p in predictions[8:])


def test_the_ring_of_the_staged_path_is_in_the_peak_of_its_first_save(tmp_path: Path) -> None:
    case_id = "olmoe-1b-7b/lora8/ep1/l2/bfloat16"
    outcome = Worker(make_order(tmp_path, "staged", ("memory",), case_id=case_id), 0).run("memory")
    assert outcome.status == "ok", outcome.error
    predicted = predict(parse_case(case_id), "staged", 0, 1, "cpu").to_record()
    for name in ("host_peak_bytes", "host_peak_prepare_bytes", "host_peak_finalize_bytes"):
        assert outcome.samples[0][name] == pytest.approx(predicted[name], rel=0.1), name
